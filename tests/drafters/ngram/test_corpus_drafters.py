"""Drafter folders, damaged and hostile: each loads, or is refused in one line that names the folder or the key."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from corpus_drafters import CONFIG, ODD_VALUES, WEIGHTS, generate_folders
from safetensors.torch import load_file, save_file

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.modeling.load import load_model
from mmspec.drafters.checkpoints.validate import FLOATS, INTEGERS, OBJECTS, check_config, parse_json
from mmspec.drafters.registry import WEIGHTS_DIR, build_drafter
from mmspec.interfaces import TargetInfo
from research.synthetic_images import write_images

FIXTURES = Path(__file__).parents[2] / "fixtures"
MAX_SECONDS = 20.0
PUBLISHED_TARGET = TargetInfo("llava", 16, 48, 8, media_token_ids=(4,))
SHAPE = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 48,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "eagle": {"model_type": "llama", **SHAPE},
    "msd": {"model_type": "llava", "image_token_index": -200, **SHAPE},
    "vispec": {"model_type": "llava_next", "image_token_id": 4, **SHAPE},
    "eagle3": {"model_type": "llama", "draft_vocab_size": 20, **SHAPE},
}


@pytest.fixture(scope="module")
def model() -> Any:
    """The target of the bundled heads."""
    return load_model("scenes")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole folders: the bundled heads, and the published layouts."""
    folders = {file.parent.name: file.parent for file in WEIGHTS_DIR.glob("*/config.json")}
    root = tmp_path_factory.mktemp("published")
    for kind, values in PUBLISHED.items():
        tensors = load_file(FIXTURES / f"{kind}.safetensors")
        weights = {name.removeprefix("weights."): v for name, v in tensors.items() if name.startswith("weights.")}
        folders[kind] = root / kind
        folders[kind].mkdir()
        save_file(weights, folders[kind] / WEIGHTS)
        (folders[kind] / CONFIG).write_text(json.dumps(values))
    return folders


def load(base: str, folder: Path, model: Any) -> str | None:
    """The refusal of the folder in one line, or None if it loads."""
    start = time.monotonic()
    try:
        if base in PUBLISHED:
            build_drafter(str(folder), PUBLISHED_TARGET)
        else:
            mmspec.patch(model[0], str(folder), processor=model[1])
            mmspec.unpatch(model[0])
        return None
    except (ValueError, OSError) as error:
        return str(error)
    finally:
        assert time.monotonic() - start < MAX_SECONDS
        assert not Path("EXECUTED").exists()


def run_corpus(bases: dict[str, Path], model: Any, folder: Path, seed: int, count: int) -> None:
    num_refused, faults = 0, list[str]()
    for base, hostile in generate_folders(bases, seed, count):
        path = hostile.write(folder / "drafter")
        try:
            message = load(base, path, model)
        except Exception as error:
            faults.append(f"{hostile.name}: {type(error).__name__}: {error}")
            continue
        finally:
            shutil.rmtree(path)
        if message is not None:
            num_refused += 1
            named = str(path) in message or "another target" in message or message.startswith("compressor ")
            if not named or "cannot be loaded: " in message:
                faults.append(f"{hostile.name}: {message}")
    assert not faults, "\n".join(faults[:20])
    assert num_refused > count / 3


def test_the_bases_load(bases: dict[str, Path], model: Any) -> None:
    for base, folder in bases.items():
        assert load(base, folder, model) is None, base


def test_hostile_folders_are_refused(bases: dict[str, Path], model: Any, tmp_path: Path) -> None:
    run_corpus(bases, model, tmp_path, 0, 130)


@pytest.mark.slow
def test_thousands_of_hostile_folders_are_refused(bases: dict[str, Path], model: Any, tmp_path: Path) -> None:
    run_corpus(bases, model, tmp_path, 1_000, 4_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": []}, "target must be an object; got []"),
        ({"target": {"layers": "ten"}}, "target.layers must be an integer from 0"),
        ({"hidden_size": 10**40}, "hidden_size must be an integer from 1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer from 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rule": []}, "rule must be a string"),
        ({"facts": 3}, "facts must be an object"),
        ({"compressor": "elastic"}, "compressor must be an object"),
        ({"compressor": {"name": 3, "tokens": 9}}, "compressor.name must be a string"),
        ({"compressor": {"name": "elastic"}}, "compressor.max_tokens is missing"),
    ],
)
def test_a_bad_config_exits_2_with_file_and_key(
    change: dict[str, Any], message: str, bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bases["msd"], tmp_path / "head")
    config = tmp_path / "head" / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    write_images(tmp_path / "in", 1)
    assert main(["caption", str(tmp_path / "in"), "--model", "scenes", "--drafter", str(tmp_path / "head")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and str(config) in err and message in err


@pytest.mark.parametrize("depth", [33, 5000, 400_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="nested deeper than 32 levels"):
        parse_json("[" * depth + "]" * depth)
    assert parse_json("[" * 32 + "]" * 32)


@pytest.mark.parametrize("key", [*INTEGERS, *FLOATS, *OBJECTS])
def test_every_odd_value_passes_or_names_its_key(key: str) -> None:
    refused = 0
    for value in ODD_VALUES:
        try:
            check_config({key: value})
        except ValueError as error:
            refused += str(error).startswith(key)
    assert refused > 10
