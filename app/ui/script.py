"""Python code that repeats a run anywhere: with the functions that the demo itself calls, the input within it.

Everything of a visitor is written as a Python literal. Independent of gradio.
"""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Mapping
from typing import Any

from mmspec.app.ui.run import SEED
from mmspec.app.ui.uploads import StoredFile

MAX_EMBEDDED_BYTES = 4_000_000
"""Bytes of an input that is written into the code; a larger one is read from a file of its name."""
CODE = """\
import base64

import torch

import mmspec
from mmspec.app.io.videos import load_media
from mmspec.app.modeling.chat import ChatTurn, build_inputs
from mmspec.app.modeling.load import {load}
from mmspec.app.modeling.sampling import Sampling

model, processor = {load}({model!r}, dtype={dtype!r})
mmspec.patch(model, drafter={drafter!r}{compressor}, processor=processor)  # the line that makes it faster

media = {media}
turns = [{turns}]
inputs = build_inputs(model, processor, [media], [{question!r}], [turns])
tokenizer = getattr(processor, "tokenizer", processor)
sampling = Sampling({temperature}).generation_kwargs(model.generation_config)
for name, options in (("mmspec", {{}}), ("plain generate", {{"enabled": False}})):
    torch.manual_seed({seed})
    ids = model.generate(**inputs, max_new_tokens={max_new_tokens}, **sampling, mmspec=options)
    print(name, tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    if not options:
        print(mmspec.stats(model, last=True))
"""


def build_script(report: Mapping[str, Any], source: str, file: StoredFile | None) -> str:
    """The code of a run.

    Args:
        report: see `Run.as_dict`.
        source: of the model: a hub id, or a built-in name; a folder is named without those above it.
        file: picture or clip.
    """
    settings = report["settings"]
    return CODE.format(
        load="load_text_model" if file is None else "load_model",
        model=source,
        dtype=report["dtype"],
        drafter=settings["drafter"],
        compressor=f", compressor={settings['compressor']!r}" if settings["compressor"] != "none" else "",
        media="()" if file is None else f"load_media({_data(file)}, isolated=True)",
        turns=", ".join(f"ChatTurn({turn['question']!r}, {turn['answer']!r})" for turn in report["turns"]),
        question=report["question"],
        temperature=settings["temperature"],
        seed=SEED,
        max_new_tokens=settings["max_new_tokens"],
    )


def _data(file: StoredFile) -> str:
    """The expression for the content of the file."""
    try:
        content = file.path.read_bytes() if file.path.stat().st_size <= MAX_EMBEDDED_BYTES else b""
    except OSError:  # uploads may be gone by then
        content = b""
    if not content:
        return f'open({file.name!r}, "rb").read()'  # the file of the question, beside the code
    lines = textwrap.wrap(base64.b64encode(content).decode(), 110)
    return "base64.b64decode(\n" + "\n".join(f'    "{line}"' for line in lines) + "\n)"
