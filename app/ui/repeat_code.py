"""Python code that repeats a run anywhere: public functions of mmspec and transformers only, the input within it.

Everything of a visitor is written as a Python literal. Independent of gradio.
"""

from __future__ import annotations

import base64
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.modeling.random_models import SIZES
from mmspec.app.ui.credit import LOOP

if TYPE_CHECKING:
    from mmspec.app.ui.comparison import ComparisonRun
    from mmspec.app.ui.report import Report

MAX_EMBEDDED_BYTES = 4_000_000
"""Bytes of an input that is written into the code; a larger one is read from a file of its name."""
MAX_SHOWN_BYTES = 40_000
"""Bytes of an input up to which a page shows the code; above that it is offered as a file."""
CODE = """\
import base64

import torch
{imports}

import mmspec

data = {data}
{load}
mmspec.patch(model, {drafter}{compressor}{tree_size}, processor=processor)  # the line that makes it faster

{media}
{inputs}
inputs = inputs.to(model.device, model.dtype)
for name, options in (({baseline!r}, {plain}), ("mmspec", {{}})):
    torch.manual_seed({seed})
    ids = model.generate(**inputs, max_new_tokens={max_new_tokens}, {sampling}, mmspec=options)
    print(name, processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(mmspec.stats(model, last=True))
"""


@dataclass(frozen=True)
class RunRequest:
    """What a run gave to the processor and to `generate`, as plain data.

    Attributes:
        text: the prompt, for a processor without a chat template; None where there is one.
        question: as it is put into the template.
        variables: of the template.
        processor_options: further options of the processor.
        takes_videos: a clip is given as a video, not as pictures.
        sampling: options of `generate`.
        content: the file; empty where it is too large or not known.
    """

    text: str | None = None
    question: str = ""
    variables: dict[str, Any] = field(default_factory=dict)
    processor_options: dict[str, Any] = field(default_factory=dict)
    takes_videos: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    content: bytes = b""


def describe_request(run: ComparisonRun) -> RunRequest:
    """The request of a run whose model was loaded, as `build_inputs` built it."""
    from mmspec.app.io.images import Video
    from mmspec.app.modeling.chat import describe_inputs
    from mmspec.app.modeling.sampling import Sampling

    assert run.loaded_model is not None
    processor, media = run.loaded_model.processor, run.media
    parts = describe_inputs(processor, media, run.question, run.turns)
    takes_videos = isinstance(media, Video) and parts.takes_videos
    options = dict(parts.processor_options)
    if takes_videos and isinstance(media, Video):
        metadata = {name: _plain(value) for name, value in media.metadata.items()}
        options["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [metadata]}
    sampling = Sampling(run.settings.temperature).generation_kwargs(run.loaded_model.model.generation_config)
    return RunRequest(parts.text, parts.question, parts.variables, options, takes_videos, sampling, _read(run.file))


def _plain(value: Any) -> Any:
    """A value of a clip's metadata as Python numbers, so that it can be written down."""
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple | range) else value


def _read(file: Path | None) -> bytes:
    """The content of the input, if it is not too large; uploads may be gone by then."""
    try:
        is_small = file is not None and file.stat().st_size <= MAX_EMBEDDED_BYTES
        return file.read_bytes() if is_small and file is not None else b""
    except OSError:
        return b""


def build_code(report: Report) -> str:
    """The code of a run."""
    choice, request = report.metrics["choice"], report.request
    load, imports = _load(choice["model"], report.metrics["run"]["dtype"])
    if report.is_clip:
        imports.append("from mmspec.vision.video.frames import read_frames")
        media = f"images = read_frames(data, num_frames={len(report.media)}, isolated=True).images"
    else:
        imports.append("from mmspec.vision.images import decode_image")
        media = "images = [decode_image(data, max_pixels=100_000_000)]"
    return CODE.format(
        imports="\n".join(sorted(imports)),
        data=_data(report),
        load=load,
        media=media,
        inputs=_inputs(report),
        drafter=f"drafter={choice['drafter']!r}",
        compressor=f", compressor={choice['compressor']!r}" if choice["compressor"] else "",
        tree_size=f", tree_size={choice['tree_size']}" if choice["tree_size"] else "",
        baseline=choice["baseline"],
        plain='{"drafter": "none"}' if choice["baseline"] == LOOP else '{"enabled": False}',
        seed=choice["seed"],
        max_new_tokens=choice["max_new_tokens"],
        sampling=", ".join(f"{key}={value!r}" for key, value in request.sampling.items()),
    )


def _load(model: str, dtype: str) -> tuple[str, list[str]]:
    """The lines that load the model, and their imports."""
    if model == SCENES_MODEL:
        return "model, processor = load_scenes_model()", ["from mmspec.app.scenes import load_scenes_model"]
    if model in SIZES:  # random weights, of tests
        random_model = "from mmspec.app.modeling.random_models import random_model"
        return f"model, processor = random_model({model!r})", [random_model]
    lines = (
        f'model = AutoModelForImageTextToText.from_pretrained({model!r}, dtype=torch.{dtype}, device_map="auto")\n'
        f"processor = AutoProcessor.from_pretrained({model!r})"
    )
    return lines, ["from transformers import AutoModelForImageTextToText, AutoProcessor"]


def _data(report: Report) -> str:
    """The expression for the content of the file."""
    content = report.request.content
    if not content:
        return f'open({report.file_name!r}, "rb").read()  # the file of the question, beside this code'
    lines = textwrap.wrap(base64.b64encode(content).decode(), 110)
    return "base64.b64decode(\n" + "\n".join(f'    "{line}"' for line in lines) + "\n)"


def _inputs(report: Report) -> str:
    """The lines that build the inputs: by the chat template, or from the text for a processor without one."""
    request = report.request
    if request.text is not None:
        options = "".join(f", {name}={value!r}" for name, value in request.processor_options.items())
        return f'inputs = processor(text=[{request.text!r}], images=[images], return_tensors="pt"{options})'
    one = (
        '[{"type": "video", "video": numpy.stack([numpy.asarray(image) for image in images])}]'
        if request.takes_videos
        else '[{"type": "image", "image": image} for image in images]'
    )
    lines = ["import numpy", ""] if request.takes_videos else []
    lines += [f"media = {one}", "messages = ["]
    asked = [(turn.question, turn.answer) for turn in report.turns] + [(request.question, None)]
    for number, (question, answer) in enumerate(asked):
        pictures = "" if number else "*media, "
        text = f'{{"type": "text", "text": {question!r}}}'
        lines.append(f'    {{"role": "user", "content": [{pictures}{text}]}},')
        if answer is not None:
            lines.append(f'    {{"role": "assistant", "content": [{{"type": "text", "text": {answer!r}}}]}},')
    variables = "".join(f", {name}={value!r}" for name, value in request.variables.items())
    options = f", processor_kwargs={request.processor_options!r}" if request.processor_options else ""
    call = 'messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"'
    lines += ["]", "inputs = processor.apply_chat_template(", f"    {call}{options}{variables}", ")"]
    return "\n".join(lines)
