"""Python code that repeats a run anywhere: public functions of mmspec and transformers only, the input within it.

Everything of a visitor is written as a Python literal. Independent of gradio.
"""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.io.images import Video
from mmspec.app.modeling.random_models import SIZES
from mmspec.app.ui.run import SEED, Run
from mmspec.app.ui.uploads import StoredFile

MAX_EMBEDDED_BYTES = 4_000_000
"""Bytes of an input that is written into the code; a larger one is read from a file of its name."""
CODE = """\
import base64

import torch
{imports}

import mmspec

{data}{load}
mmspec.patch(model, {drafter}{compressor}, processor=processor)  # the line that makes it faster

{media}
inputs = inputs.to(model.device, model.dtype)
tokenizer = getattr(processor, "tokenizer", processor)
for name, options in (("mmspec", {{}}), ("plain generate", {{"enabled": False}})):
    torch.manual_seed({seed})
    ids = model.generate(**inputs, max_new_tokens={max_new_tokens}, {sampling}, mmspec=options)
    print(name, tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    if not options:
        print(mmspec.stats(model, last=True))
"""


def request_of(run: Run) -> dict[str, Any]:
    """What a run gave to the processor and to `generate`, as `build_inputs` built it."""
    from mmspec.app.modeling.chat import describe_inputs
    from mmspec.app.modeling.sampling import Sampling

    model = run.model
    sampling = Sampling(run.settings.temperature).generation_kwargs(model.model.generation_config)
    if run.media is None:
        return {"sampling": sampling}
    parts = describe_inputs(model.processor, run.media, run.question, run.turns)
    takes_videos = isinstance(run.media, Video) and parts.takes_videos
    options = dict(parts.processor_options)
    if takes_videos and isinstance(run.media, Video):
        metadata = {name: _plain(value) for name, value in run.media.metadata.items()}
        options["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [metadata]}
    return {
        "text": parts.text,
        "question": parts.question,
        "variables": parts.variables,
        "processor_options": options,
        "takes_videos": takes_videos,
        "sampling": sampling,
    }


def _plain(value: Any) -> Any:
    """A value of a clip's metadata as Python numbers, so that it can be written down."""
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple | range) else value


def build_script(report: Mapping[str, Any], request: Mapping[str, Any], source: str, file: StoredFile | None) -> str:
    """The code of a run.

    Args:
        report: see `Run.as_dict`.
        request: see `request_of`.
        source: of the model: a hub id, or a built-in name; a folder is named without those above it.
        file: picture or clip.
    """
    settings = report["settings"]
    load, imports = _load(source, report["dtype"], is_text=file is None)
    if file is None:
        media = ""
    elif report["is_clip"]:
        imports.append("from mmspec.vision.video.frames import read_frames")
        media = f"images = read_frames(data, num_frames={len(report['images'])}, isolated=True).images\n"
    else:
        imports.append("from mmspec.vision.images import decode_image")
        media = "images = [decode_image(data, max_pixels=100_000_000)]\n"
    return CODE.format(
        imports="\n".join(sorted(imports)),
        data="" if file is None else f"data = {_data(file)}\n",
        load=load,
        media=media + (_text_inputs(report) if file is None else _inputs(report, request)),
        drafter=f"drafter={settings['drafter']!r}",
        compressor=f", compressor={settings['compressor']!r}" if settings["compressor"] != "none" else "",
        seed=SEED,
        max_new_tokens=settings["max_new_tokens"],
        sampling=", ".join(f"{key}={value!r}" for key, value in request["sampling"].items()),
    )


def _load(model: str, dtype: str, *, is_text: bool) -> tuple[str, list[str]]:
    """The lines that load the model, and their imports."""
    if model == SCENES_MODEL:
        return "model, processor = load_scenes_model()", ["from mmspec.app.scenes import load_scenes_model"]
    if model in SIZES:  # random weights, of tests
        random_model = "from mmspec.app.modeling.random_models import random_model"
        return f"model, processor = random_model({model!r})", [random_model]
    kinds = ("AutoModelForCausalLM", "AutoTokenizer") if is_text else ("AutoModelForImageTextToText", "AutoProcessor")
    lines = (
        f'model = {kinds[0]}.from_pretrained({model!r}, dtype=torch.{dtype}, device_map="auto")\n'
        f"processor = {kinds[1]}.from_pretrained({model!r})"
    )
    return lines, [f"from transformers import {', '.join(kinds)}"]


def _data(file: StoredFile) -> str:
    """The expression for the content of the file."""
    try:
        content = file.path.read_bytes() if file.path.stat().st_size <= MAX_EMBEDDED_BYTES else b""
    except OSError:  # uploads may be gone by then
        content = b""
    if not content:
        return f'open({file.name!r}, "rb").read()  # the file of the question, beside this code'
    lines = textwrap.wrap(base64.b64encode(content).decode(), 110)
    return "base64.b64decode(\n" + "\n".join(f'    "{line}"' for line in lines) + "\n)"


def _messages(turns: Sequence[Mapping[str, str]], question: str, media: str) -> list[str]:
    """The lines of a conversation; `media` is before its first question."""
    lines = ["messages = ["]
    for number, turn in enumerate([*turns, {"question": question}]):
        text = f'{{"type": "text", "text": {turn["question"]!r}}}'
        content = f"[{media if not number else ''}{text}]" if media else repr(turn["question"])
        lines.append(f'    {{"role": "user", "content": {content}}},')
        if "answer" in turn:
            answer = f'[{{"type": "text", "text": {turn["answer"]!r}}}]' if media else repr(turn["answer"])
            lines.append(f'    {{"role": "assistant", "content": {answer}}},')
    return [*lines, "]"]


def _text_inputs(report: Mapping[str, Any]) -> str:
    lines = _messages(report["turns"], report["question"], "")
    call = 'messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"'
    return "\n".join([*lines, f"inputs = processor.apply_chat_template({call})"])


def _inputs(report: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    """The lines that build the inputs: by the chat template, or from the text for a processor without one."""
    if request["text"] is not None:
        options = "".join(f", {name}={value!r}" for name, value in request["processor_options"].items())
        return f'inputs = processor(text=[{request["text"]!r}], images=[images], return_tensors="pt"{options})'
    one = (
        '[{"type": "video", "video": numpy.stack([numpy.asarray(image) for image in images])}]'
        if request["takes_videos"]
        else '[{"type": "image", "image": image} for image in images]'
    )
    lines = ["import numpy", ""] if request["takes_videos"] else []
    lines += [f"media = {one}", *_messages(report["turns"], request["question"], "*media, ")]
    variables = "".join(f", {name}={value!r}" for name, value in request["variables"].items())
    kept = request["processor_options"]
    options = f", processor_kwargs={kept!r}" if kept else ""
    call = 'messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"'
    lines += ["inputs = processor.apply_chat_template(", f"    {call}{options}{variables}", ")"]
    return "\n".join(lines)
