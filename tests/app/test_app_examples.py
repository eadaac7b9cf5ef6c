"""The way in to the scenes world: clips, examples, tasks of the bench, and the warning about photographs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caption_jobs import run_config
from job_rows import rows_of
from PIL import Image

import mmspec
from mmspec.app import examples as demo
from mmspec.app.caption.config import CaptionConfig
from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.io.images import ImageError
from mmspec.app.io.videos import load_video
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes import examples
from mmspec.app.scenes.domain_check import OUT_OF_DOMAIN_HINT, looks_like_scene
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene

CLIPS = [path for path in examples.list_example_files() if path.suffix == ".mp4"]


def photograph(seed: int = 0) -> Image.Image:
    """No two neighbours alike, as in the grass of a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)).resize((320, 240))
    return Image.fromarray((np.asarray(coarse) * 0.8 + rng.integers(0, 50, (240, 320, 3))).astype(np.uint8))


# --- clips in jobs ----------------------------------------------------------------------------------------------------


def test_pictures_and_clips_in_one_job(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(CLIPS[0], tmp_path / "in" / "b.mp4")
    shutil.copy(CLIPS[2], tmp_path / "in" / "C.MP4")
    render_scene(generate_scene(3)).save(tmp_path / "in" / "a.png")
    out = tmp_path / "o.jsonl"
    args = ["--out", str(out), "--max-new-tokens", "12", "--compare", "--no-progress", "--frames", "5"]
    assert main(["caption", str(tmp_path / "in"), "--model", "tiny", *args]) == 0
    assert "identical: 3/3" in capsys.readouterr().err
    found = {row["file_name"]: row for row in rows_of(out)}
    assert all(row["identical"] and row["plain"] == row["caption"] for row in found.values())
    assert len({row["prompt_sha1"] for row in found.values()}) == 2, "videos have their own prompt"
    alone = found["in/a.png"]["n_prompt_tokens"]
    assert found["in/b.mp4"]["n_prompt_tokens"] > alone + 4 * 15 and found["in/C.MP4"]["n_prompt_tokens"] > alone + 45


def test_a_clip_of_large_frames_is_refused() -> None:
    with pytest.raises(ImageError, match="more than 100 pixels"):
        load_video(CLIPS[0], max_pixels=100)


def test_a_missing_video_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ImageError, match=r"pip install -e '.*\[video\]'"):
        load_video(CLIPS[0])


# --- photographs ------------------------------------------------------------------------------------------------------


def test_scenes_look_like_scenes_and_photographs_do_not(tmp_path: Path) -> None:
    for seed in range(60):
        drawn = render_scene(generate_scene(seed, 6 if seed % 2 else None))
        assert looks_like_scene(drawn), seed
        drawn.resize((300, 260)).save(tmp_path / "a.jpg", quality=75)
        assert looks_like_scene(Image.open(tmp_path / "a.jpg")), seed
        assert not looks_like_scene(photograph(seed)), seed


def test_a_photograph_causes_one_warning(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "in").mkdir()
    render_scene(generate_scene(1)).save(tmp_path / "in" / "a.png")
    for number in range(3):
        photograph(number).save(tmp_path / "in" / f"b{number}.png")
    model, processor = random_model("tiny")
    captioner = Captioner(mmspec.patch(model, "none"), processor, max_new_tokens=4)
    for name, num_hints in (("scenes", 1), ("tiny", 0)):
        settings = CaptionConfig((str(tmp_path / "in"),), name, out=str(tmp_path / f"{name}.jsonl"), progress=False)
        assert run_config(settings, captioner) == 0
        err = capsys.readouterr().err
        assert err.count(OUT_OF_DOMAIN_HINT) == num_hints
        assert not num_hints or "in/b0.png does not look like" in err


# --- the command ----------------------------------------------------------------------------------------------------


def test_examples_print_both_texts(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    files = [examples.list_example_files()[0], CLIPS[0]]
    monkeypatch.setattr(examples, "list_example_files", lambda: files)
    monkeypatch.setattr(demo, "DEFAULT_MODEL", "tiny")
    monkeypatch.setattr(demo, "EXAMPLE_TOKENS", 12)
    assert main(["examples"]) == 0
    output = capsys.readouterr().out
    assert "2 of 2 texts identical to plain generate" in output and "tokens/s" in output and "tau" in output
    assert output.count("  plain ") == output.count("  mmspec ") == output.count("identical; ") == 2
    assert "Describe the image." in output and "Describe the video." in output
    with pytest.raises(SystemExit):
        main(["examples", "photo.jpg"])
    assert "mmspec: error: unrecognized arguments: photo.jpg" in capsys.readouterr().err


def test_a_damaged_model_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("mmspec.app.scenes.WEIGHTS_FOLDER", tmp_path)
    render_scene(generate_scene(1)).save(tmp_path / "a.png")
    assert main(["caption", str(tmp_path / "a.png"), "--model", "scenes", "--no-progress"]) == 2
    err = capsys.readouterr().err
    assert "checksums.json is missing: get it back" in err and err.count("\n") == 1
    with pytest.raises(Exception, match=r"checksums\.json is missing"):
        load_model("scenes")


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_build_of_the_kernels_is_said_before_it_begins(
    is_missing: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[str] = []
    monkeypatch.setattr("mmspec.cpu.c_library.needs_build", lambda: is_missing)
    monkeypatch.setattr("mmspec.cpu.c_kernel.load_kernel", lambda: built.append(capsys.readouterr().err))
    load_model("tiny")
    said = ["mmspec: building the C kernels, once; this takes some seconds\n"]
    assert built == (said if is_missing else []) and capsys.readouterr().err == ""
    with pytest.raises(UsageError, match="no such folder"):
        load_model("./nowhere")
    assert len(built) == is_missing, "what cannot be loaded needs no kernels"
