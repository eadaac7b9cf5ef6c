"""Names of the first release in configs, checkpoints, visual modes and drafter names are read for one release."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import HEAD_CONFIG, IMAGE_TOKEN_ID, NUM_LAYERS, FakeTarget, build_train_batch
from safetensors.torch import load_file

from mmspec.drafters.block.falcon import FalconDrafter, FalconHead
from mmspec.drafters.block.flash import FlashHead
from mmspec.drafters.block.parallel import ParallelHead
from mmspec.drafters.checkpoints.format import HeadMetadata, load_head, save_head
from mmspec.drafters.checkpoints.head_config import LEGACY_KEYS
from mmspec.drafters.checkpoints.load import load_trained
from mmspec.drafters.checkpoints.state_dict import STORED_NAMES
from mmspec.drafters.eagle.drafter import EagleDrafter
from mmspec.drafters.eagle.head import EagleHead
from mmspec.drafters.registry import WEIGHTS_DIR, build_drafter, drafter_names, is_known_drafter
from mmspec.drafters.training.batch import DraftModel
from mmspec.drafters.training.legacy import LEGACY_CONFIG_KEYS, LEGACY_WEIGHT_KEYS
from mmspec.drafters.training.losses import LossWeights
from mmspec.drafters.training.trainer import SettingsError, TrainConfig, Trainer

FLASH_CONFIG = replace(HEAD_CONFIG, intermediate_size=0, block_size=3, block_ffn_size=24, markov_rank=8)
PARALLEL_CONFIG = replace(HEAD_CONFIG, block_size=3, block_ffn_size=20)


def to_first_release(config: dict[str, Any]) -> dict[str, Any]:
    """A head's config with the keys and values of the first release."""
    former = {current: key for key, current in LEGACY_KEYS.items()}
    config = {former.get(key, key): value for key, value in config.items()}
    config["rule"] = {"placeholder": "blind", "text_only": "textual"}.get(config["rule"], config["rule"])
    config["target"] = {"layers" if key == "num_layers" else key: value for key, value in config["target"].items()}
    return config


@pytest.mark.parametrize("visual_mode", ["decoupled", "placeholder", "text_only"])
def test_a_config_of_the_first_release_is_read_with_one_warning(visual_mode: str, tmp_path: Path) -> None:
    head = FlashHead(FLASH_CONFIG)
    metadata = HeadMetadata(FLASH_CONFIG, visual_mode, NUM_LAYERS, "llava", architecture="flash")
    save_head(tmp_path, head, metadata, torch.float32)
    file = tmp_path / "config.json"
    config = to_first_release(json.loads(file.read_text()))
    assert {"kind", "rule", "wide", "block", "inner", "chain"} <= set(config)
    file.write_text(json.dumps(config))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drafter = load_trained(tmp_path)
    assert [warning.category for warning in caught] == [FutureWarning] and str(file) in str(caught[0].message)
    assert drafter.visual_mode == visual_mode and drafter.head.config == FLASH_CONFIG
    with pytest.warns(FutureWarning, match="block"):
        assert load_head(tmp_path)[1].num_layers == NUM_LAYERS


def test_contradicting_names_of_one_setting_are_refused(tmp_path: Path) -> None:
    save_head(tmp_path, EagleHead(HEAD_CONFIG), HeadMetadata(HEAD_CONFIG, "decoupled", NUM_LAYERS))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"block": 4}))
    with pytest.raises(ValueError, match=r"'block' is the former name of 'block_size'; got both, 4 and 1"):
        load_head(tmp_path)


def test_bundled_configs_use_current_names_and_stored_tensor_names() -> None:
    for folder in WEIGHTS_DIR.iterdir():
        config = json.loads((folder / "config.json").read_text())
        assert not set(LEGACY_KEYS) & set(config) and "num_layers" in config["target"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_head(folder)


@pytest.mark.parametrize(
    ("head", "prefixes"), [("flash", {"chain", "spread", "widen"}), ("parallel", {"link", "slots"})]
)
def test_tensors_have_the_names_of_the_first_release_on_disk(head: str, prefixes: set[str], tmp_path: Path) -> None:
    module = FlashHead(FLASH_CONFIG) if head == "flash" else ParallelHead(PARALLEL_CONFIG)
    save_head(tmp_path, module, HeadMetadata(module.config, "decoupled", NUM_LAYERS, architecture=head))
    names = {name.partition(".")[0] for name in load_file(tmp_path / "model.safetensors")}
    assert prefixes <= names and not {name.partition(".")[0] for name in STORED_NAMES} & names


def build_trainer(target: FakeTarget, folder: Path, max_steps: int = 4) -> Trainer:
    torch.manual_seed(1)
    draft_model = DraftModel(FlashHead(FLASH_CONFIG), "text_only", "flash")
    for part in (target.shared_embeddings.embed_tokens, target.shared_embeddings.lm_head):
        part.requires_grad_(False)
    placeholder = target.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)).detach()
    config = TrainConfig(max_steps=max_steps, batch_size=2, warmup_steps=1)
    return Trainer(
        folder,
        {"flash": draft_model},
        config,
        target.shared_embeddings,
        lambda step: build_train_batch(target),
        placeholder,
        {},
    )


def to_version_1(state: dict[str, Any]) -> None:
    """Edit a trainer's checkpoint as if written when `ttt_steps` did not count the first step."""
    del state["version"]
    state["settings"]["config"]["weights"]["ttt_steps"] -= 1


def to_first_release_checkpoint(file: Path) -> None:
    """Rewrite a trainer's checkpoint with the names of the first release."""
    state = torch.load(file, weights_only=True)
    to_version_1(state)
    settings = state["settings"]
    former_config = {current: key for key, current in LEGACY_CONFIG_KEYS.items()}
    former_weights = {current: key for key, current in LEGACY_WEIGHT_KEYS.items()}
    plan = {former_config.get(key, key): value for key, value in settings.pop("config").items()}
    plan["weights"] = {former_weights[key]: value for key, value in plan["weights"].items()}
    former = {current: key for key, current in LEGACY_KEYS.items()}
    model = {former.get(key, key): value for key, value in settings.pop("draft_models")["flash"].items()}
    settings |= {"plan": plan, "pupils": {"flash": model | {"rule": "textual"}}}

    def stored(name: str) -> str:
        for module, old in STORED_NAMES.items():
            name = name.replace(f"head.{module}.", f"head.{old}.")
        return name

    state["heads"] = {"flash": {stored(name): value for name, value in state["heads"]["flash"].items()}}
    torch.save(state, file)


def test_a_run_of_the_first_release_is_resumed(target: FakeTarget, tmp_path: Path) -> None:
    run = build_trainer(target, tmp_path)
    run.run(max_seconds=0.0)
    assert run.step == 1
    to_first_release_checkpoint(tmp_path / "state.pt")
    with pytest.warns(FutureWarning, match="earlier release"):
        resumed = build_trainer(target, tmp_path)
    assert resumed.step == 1
    for name, value in run.draft_models["flash"].head.state_dict().items():
        assert torch.equal(value, resumed.draft_models["flash"].head.state_dict()[name]), name
    with pytest.warns(FutureWarning), pytest.raises(SettingsError, match=r"other settings \(config\)"):
        build_trainer(target, tmp_path, max_steps=5)


def test_a_checkpoint_of_version_1_is_resumed(target: FakeTarget, tmp_path: Path) -> None:
    build_trainer(target, tmp_path).run(max_seconds=0.0)
    file = tmp_path / "state.pt"
    state = torch.load(file, weights_only=True)
    assert state["settings"]["config"]["weights"]["ttt_steps"] == LossWeights().ttt_steps == 3
    to_version_1(state)
    torch.save(state, file)
    assert build_trainer(target, tmp_path).step == 1


def test_former_names_are_accepted_with_one_warning(target: FakeTarget) -> None:
    with pytest.warns(DeprecationWarning, match="beam_width= is now called top_k=") as caught:
        assert EagleDrafter(target.head, num_layers=NUM_LAYERS, beam_width=3).top_k == 3
    assert len(caught) == 1 and caught[0].filename == __file__
    falcon = FalconHead(replace(HEAD_CONFIG, block_size=2))
    with pytest.warns(DeprecationWarning, match="passes= is now called max_forwards=") as caught:
        assert FalconDrafter(falcon, num_layers=NUM_LAYERS, passes=2).max_depth == 4
    assert len(caught) == 1 and caught[0].filename == __file__
    for module, former, current in (
        ("eagle.state", "EagleState", "DraftState"),
        ("training.batch", "DraftTargets", "HeadInputsAndLabels"),
        ("training.batch", "build_targets", "build_inputs_and_labels"),
    ):
        imported = import_module(f"mmspec.drafters.{module}")
        with pytest.warns(DeprecationWarning, match=f"{former} is now .*{current}"):
            assert getattr(imported, former) is getattr(imported, current)
        with pytest.raises(AttributeError, match="no attribute 'unknown'"):
            _ = imported.unknown


def test_former_visual_modes_and_drafter_names_are_accepted(target: FakeTarget) -> None:
    with pytest.warns(DeprecationWarning, match="visual mode 'blind' is now 'placeholder'"):
        assert EagleDrafter(target.head, "blind", num_layers=NUM_LAYERS).visual_mode == "placeholder"
    assert build_drafter("fused").name == "hybrid"
    assert is_known_drafter("fused") and "fused" not in drafter_names()
