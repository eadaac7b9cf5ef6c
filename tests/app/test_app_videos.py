"""Videos in `mmspec caption`: passed as videos to models that take them; bad ones are rows with an error.

The processors of such models want torchvision, which is no dependency: their picture part is played here, so that what
is tested is the part that is ours and transformers' own handling of chats and placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny
import torch
from job_rows import rows_of
from PIL import Image
from transformers import LlavaNextVideoProcessor
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import make_batched_videos
from video_files import (
    FAULTY_READER,
    decoder_command_running,
    write_audio_only,
    write_empty_video,
    write_video,
)
from zoo.first import PINPOINTS

import mmspec
from mmspec.app.caption import executor
from mmspec.app.caption.config import CaptionConfig
from mmspec.app.cli.main import main
from mmspec.app.io.images import Video
from mmspec.app.io.videos import load_video
from mmspec.app.modeling import load
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.chat import ChatTurn, accepts_videos, build_inputs, encode_media, to_model_device
from mmspec.app.modeling.random_models import random_model
from mmspec.vision.video import decoder_pool as isolated
from mmspec.vision.video.decoder_pool import DecoderPool

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'video' %}<video>{% else %}<image>{% endif %}{% endfor %}{% endfor %}"
)


def caption(*args: object) -> int:
    return main(["caption", *map(str, args), "--no-progress", "--max-new-tokens", "6"])


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {Path(row["file_name"]).name: row for row in rows_of(path)}


class SmallVideoProcessor(BaseVideoProcessor):
    """Videos to pixels as `LlavaNextVideoVideoProcessor` does, in small; records what it receives."""

    def __init__(self) -> None:
        self.received: list[tuple[np.ndarray, Any]] = []

    def __call__(self, videos: Any, **options: Any) -> BatchFeature:
        assert options["do_sample_frames"] is False
        flat = make_batched_videos(videos)
        self.received += zip(flat, options["video_metadata"], strict=True)
        sizes = [np.stack([np.asarray(Image.fromarray(one).resize((16, 16))) for one in video]) for video in flat]
        pixels = [torch.from_numpy(video).permute(0, 3, 1, 2).float() / 128 - 1 for video in sizes]
        return BatchFeature({"pixel_values_videos": torch.stack(pixels)})


class Unchecked(LlavaNextVideoProcessor):
    """Without torchvision there is no class to check the parts against."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        """Anything will do."""


def moving() -> tuple[Any, Any]:
    """The tiny LLaVA-NeXT-Video and its processor."""
    spec = tiny.ModelSpec("llava_next_video")
    tokenizer = tiny.build_tokenizer(spec)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
    tokenizer.padding_side = "left"
    points, edge = [[2 * height, 2 * width] for height, width in PINPOINTS], {"height": 16, "width": 16}
    images = LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=edge, image_grid_pinpoints=points)
    common: dict[str, Any] = {"patch_size": 4, "vision_feature_select_strategy": "default"}
    common |= {"chat_template": TEMPLATE, "num_additional_image_tokens": 1}
    return tiny.build_model(spec), Unchecked(SmallVideoProcessor(), images, tokenizer, **common)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What `--model tiny` loads: the tiny LLaVA-NeXT-Video."""
    model, processor = moving()
    monkeypatch.setattr(load, "random_model", lambda *_: (model, processor))
    return model, processor


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Two clips of 12 frames and a picture."""
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in" / "a.mp4", 12)
    Image.new("RGB", (40, 30), "red").save(tmp_path / "in" / "b.png")
    write_video(tmp_path / "in" / "c.mkv", [np.full((48, 80, 3), 9 * number, np.uint8) for number in range(12)], fps=4)
    return tmp_path / "in"


# --- as a video, or as pictures ---------------------------------------------------------------------------------------


def test_a_model_that_takes_videos_gets_videos(clips: Path, family: tuple[Any, Any], capsys: Any) -> None:
    _, processor = family
    out = clips.parent / "o.jsonl"
    assert caption(clips, "--model", "tiny", "--out", out, "--frames", 4, "--compare") == 0
    assert "identical: 3/3" in capsys.readouterr().err
    (first, about), (second, later) = processor.video_processor.received[:2]
    assert first.shape == (4, 64, 64, 3) and second.shape == (4, 48, 80, 3) and first.dtype == np.uint8
    assert (first == load_video(clips / "a.mp4", 4).array()).all()
    assert about["frames_indices"] == [1, 4, 7, 10] and (about["fps"], later["fps"]) == (10, 4)
    assert later["total_num_frames"] == 12 and (later["width"], later["height"]) == (80, 48)
    found = rows(out)
    num_text_tokens = found["a.mp4"]["n_prompt_tokens"] - 4 * 4
    assert 0 < num_text_tokens < 20 and found["c.mkv"]["n_prompt_tokens"] == num_text_tokens + 16, "four tokens a frame"


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        (("--fps", 5), [1, 3, 5, 7, 9, 11], list(range(12))),  # 1.2 seconds of ten a second, 3 of four
        (("--fps", 5, "--frames", 4), [1, 4, 7, 10], [1, 4, 7, 10]),
    ],
)
def test_frames_by_the_second(
    flags: tuple[Any, ...], first: list[int], second: list[int], clips: Path, family: tuple[Any, Any]
) -> None:
    _, processor = family
    assert caption(clips, "--model", "tiny", "--out", clips.parent / "o.jsonl", "--frames", 12, *flags) == 0
    found = [about["frames_indices"] for _, about in processor.video_processor.received[:2]]
    assert found == [first, second]


def test_jobs_of_versions_without_frame_options_resume() -> None:
    usual = CaptionConfig(("a",), "scenes").fingerprint(1)
    assert "fps" not in usual
    assert CaptionConfig(("a",), "scenes", fps=1.0).fingerprint(1) == usual | {"fps": 1.0}


def test_a_video_is_not_so_many_pictures(clips: Path, family: tuple[Any, Any]) -> None:
    model, processor = family
    captioner = Captioner(mmspec.patch(model, "lookup", processor=processor), processor, max_new_tokens=6)
    video = load_video(clips / "a.mp4", 4)
    for template in (TEMPLATE, None):
        processor.chat_template = template
        inputs = captioner.build_inputs([video, video.frames[:1], video.frames], ["abc", "abcd", "a"])
        assert (inputs["input_ids"] == tiny.special_ids(model.tiny_spec).video).sum(1).tolist() == [16, 0, 0]
        assert inputs["pixel_values_videos"].shape == (1, 4, 3, 16, 16) and len(inputs["pixel_values"]) == 5
        captions = captioner.caption([video, video.frames[:1], video.frames], ["abc", "abcd", "a"], 0, [True] * 3)
        assert all(one.identical for one in captions)
    processor.chat_template = TEMPLATE.replace("video", "film")
    assert not accepts_videos(processor), "its template would leave them out"
    assert "pixel_values_videos" not in captioner.build_inputs([video], ["a"])


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_conversation_contains_its_video_once(clips: Path, family: tuple[Any, Any], template: str | None) -> None:
    model, processor = family
    processor.chat_template = template
    video = load_video(clips / "a.mp4", 4)
    inputs = build_inputs(model, processor, [video], ["abcd"], [(ChatTurn("abc", "cab"), ChatTurn("bc", "a"))])
    assert (inputs["input_ids"] == tiny.special_ids(model.tiny_spec).video).sum() == 16
    assert inputs["pixel_values_videos"].shape == (1, 4, 3, 16, 16) and "pixel_values" not in inputs
    text = processor.tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True)
    positions = [text.find(part) for part in ("abc", "cab", "bc", "abcd")]
    assert -1 not in positions and positions[0] < positions[1] < text.rfind("abcd")
    request, seconds = encode_media(model, inputs)
    assert seconds > 0 and "pixel_values_videos" not in request
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**request, **options), model.generate(**inputs, **options))


def test_videos_of_different_lengths_run_alone(clips: Path, family: tuple[Any, Any]) -> None:
    """LLaVA-NeXT-Video cannot take them together."""
    write_video(clips / "d.mp4", 3)
    out = clips.parent / "o.jsonl"
    assert caption(clips, "--model", "tiny", "--out", out, "--compare") == 0
    found = rows(out)
    assert all(row["identical"] and not row["error"] for row in found.values())
    assert found["a.mp4"]["n_prompt_tokens"] - found["d.mp4"]["n_prompt_tokens"] == 4 * (8 - 3)


def test_a_model_for_images_gets_images(clips: Path) -> None:
    model, processor = random_model("tiny")
    captioner, video = Captioner(model, processor, max_new_tokens=6), load_video(clips / "a.mp4", 4)
    assert isinstance(video, Video) and not accepts_videos(processor)
    video_inputs, image_inputs = (
        captioner.build_inputs([video], ["a"]),
        captioner.build_inputs([list(video.frames)], ["a"]),
    )
    assert video_inputs.keys() == image_inputs.keys() and all(
        torch.equal(video_inputs[name], image_inputs[name]) for name in video_inputs
    )
    assert len(video_inputs["pixel_values"]) == 4 and (video_inputs["input_ids"] == 4).sum() == 4 * 16


def test_seconds_keep_their_precision(family: tuple[Any, Any]) -> None:
    """Qwen2.5-VL computes positions from them: 0.8333 in bfloat16 is 0.832."""
    model = family[0].to(torch.bfloat16)
    assert to_model_device(model, "pixel_values_videos", torch.ones(1)).dtype == torch.bfloat16
    assert to_model_device(model, "second_per_grid_ts", torch.ones(1)).dtype == torch.float32


def test_a_prompt_must_not_hold_what_stands_for_a_video(clips: Path, family: tuple[Any, Any], capsys: Any) -> None:
    assert caption(clips, "--model", "tiny", "--prompt", "a <video>") == 2
    assert "--prompt must not contain <video>" in capsys.readouterr().err


# --- decoders that crash ----------------------------------------------------------------------------------------------


def spied(monkeypatch: pytest.MonkeyPatch, code: str = "") -> list[None]:
    """Plant something in the processes that decode; one entry for each that is started."""
    started, command = list[None](), decoder_command_running(code)

    def spy(timeout_s: float, memory: int) -> list[str]:
        started.append(None)
        return command(timeout_s, memory)

    monkeypatch.setattr(isolated, "worker_command", spy)
    return started


def test_a_crash_is_a_row_and_the_job_goes_on(clips: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    started = spied(monkeypatch, FAULTY_READER)
    monkeypatch.setattr(executor, "DecoderPool", partial(DecoderPool, timeout_s=4))
    for name in ("abort", "hang", "segv"):
        (clips / f"{name}.mp4").write_bytes((clips / "a.mp4").read_bytes())
    write_video(clips / "z.mp4", 5)
    out = clips.parent / "o.jsonl"
    assert caption(clips, "--model", "tiny", "--out", out, "--batch-size", 2, "--threads", 1) == 1
    found = rows(out)
    errors = {name: row["error"] for name, row in found.items()}
    assert [name for name, error in errors.items() if not error] == ["a.mp4", "b.png", "c.mkv", "z.mp4"]
    assert all(found[name]["caption"] for name in ("a.mp4", "b.png", "c.mkv", "z.mp4"))
    kinds = {"abort.mp4": "DecoderCrashed", "hang.mp4": "DecoderHung", "segv.mp4": "DecoderCrashed"}
    assert {name: error["type"] for name, error in errors.items() if error} == kinds
    messages = {name: error["message"] for name, error in errors.items() if error}
    assert messages["segv.mp4"].startswith("the decoder crashed on segv.mp4 (") and "signal 11" in messages["segv.mp4"]
    assert "signal 6" in messages["abort.mp4"] and "more than 4 seconds" in messages["hang.mp4"]
    assert all("\n" not in text for text in messages.values()) and len(started) <= 9
    assert "4 captioned, 3 failed" in capsys.readouterr().err


def test_pictures_are_decoded_in_the_same_processes(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process for each thread at most, for images and videos alike."""
    started = spied(monkeypatch)
    out = clips.parent / "both.jsonl"
    assert caption(clips, "--model", "tiny", "--out", out, "--threads", 1) == 0 and len(started) == 1
    started.clear()
    for clip in ("a.mp4", "c.mkv"):
        (clips / clip).unlink()
    assert caption(clips, "--model", "tiny", "--out", clips.parent / "o.jsonl") == 0 and len(started) == 1


# --- bad files --------------------------------------------------------------------------------------------------------


def empty(path: Path) -> None:
    path.touch()


def cut(path: Path) -> None:
    """The index of the file, which stands at its end, is gone."""
    write_video(path, 12)
    path.write_bytes(path.read_bytes()[:-300])


def cut_late(path: Path) -> None:
    """The index stands first; some frames are gone."""
    write_video(path, 30, format={"movflags": "faststart"}, options={"g": "1"})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.7)])


def text(path: Path) -> None:
    path.write_text("no video\n" * 99)


def picture(path: Path) -> None:
    Image.new("RGB", (64, 48), "blue").save(path, "PNG")


def other_kind(path: Path) -> None:
    write_video(path.with_suffix(".mkv"), 12).rename(path)


def uneven(path: Path) -> None:
    """A variable frame rate."""
    write_video(path, 10, pts=[0, 100, 150, 700, 710, 1500, 1600, 1700, 3000, 3010])


BAD: dict[str, tuple[Callable[[Path], Any], str | None, str]] = {
    "empty.mp4": (empty, "Empty", "empty file (0 bytes)"),
    "cut.mp4": (cut, "BrokenVideo", "the file is cut: "),
    "late.mp4": (cut_late, "BrokenVideo", "the file is cut: "),
    "song.mp4": (write_audio_only, "BrokenVideo", "a video without frames: it has no video stream"),
    "none.mp4": (write_empty_video, "BrokenVideo", "a video without frames"),
    "text.mp4": (text, "BrokenVideo", "text.mp4 is not a video that can be read ("),
    "kind.mp4": (other_kind, None, ""),
    "uneven.mp4": (uneven, None, ""),
    "still.mp4": (picture, None, ""),  # content decides, not the name
    "clip.png": (lambda path: write_video(path.with_suffix(".mp4"), 5).rename(path), None, ""),
}


@pytest.mark.parametrize("accepts_videos", [False, True])
def test_every_kind_of_bad_video(
    accepts_videos: bool, tmp_path: Path, request: pytest.FixtureRequest, capsys: Any
) -> None:
    if accepts_videos:
        request.getfixturevalue("family")
    (tmp_path / "in").mkdir()
    for name, (make, _, _) in BAD.items():
        make(tmp_path / "in" / name)
    out = tmp_path / "o.jsonl"
    files = [*sorted((tmp_path / "in").iterdir()), tmp_path / "in" / "gone.mp4"]
    assert caption(*files, "--model", "tiny", "--out", out) == 1
    found = rows(out)
    assert found.pop("gone.mp4")["error"] == {"type": "Missing", "message": "no such file"}
    for name, row in found.items():
        _, kind, message = BAD[name]
        assert (row["error"] or {}).get("type") == kind, (name, row["error"])
        assert bool(row["caption"]) == (kind is None) and row["file_name"].endswith(name)
        if kind:
            assert row["error"]["message"].startswith(message) and "\n" not in row["error"]["message"]
            assert str(tmp_path) not in row["error"]["message"], "the row names the file already"
    err = capsys.readouterr().err
    assert "4 captioned, 7 failed" in err and "Traceback" not in err
