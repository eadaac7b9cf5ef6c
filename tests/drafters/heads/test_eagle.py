"""Heads of one token a pass: inputs, nodes, training runs, storage; what they draft is in `test_block`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import (
    HEAD_CONFIG,
    IMAGE_TOKEN_ID,
    NUM_LAYERS,
    FakeTarget,
    begin_decoding,
    build_first_result,
    build_prompt,
    build_result,
    new_trainer,
    scores_by_path,
)
from fuzz import patch_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import mmspec
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.drafters import registry
from mmspec.drafters.checkpoints import format as checkpoint
from mmspec.drafters.checkpoints.format import HeadMetadata, load_head, save_head
from mmspec.drafters.checkpoints.state_dict import to_stored
from mmspec.drafters.heads.base.visual_inputs import VISUAL_MODES, DraftInputs, left_pack
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import DecoderLayer, EagleConfig, EagleHead
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Layer
from mmspec.drafters.registry import build_drafter
from mmspec.drafters.training.batch import DraftModel
from mmspec.drafters.training.trainer import SettingsError, Trainer
from mmspec.economy.chooser import Chooser
from mmspec.economy.known import Economy
from mmspec.engine.tree import root_only
from mmspec.interfaces import TargetInfo
from mmspec.resolve import MAX_CACHED_DRAFTERS


def new_drafter(target: FakeTarget, visual_mode: str = "decoupled", **more: Any) -> EagleDrafter:
    return EagleDrafter(target.head, visual_mode, num_layers=NUM_LAYERS, **{"max_depth": 3, "top_k": 3, **more})


def test_nodes_are_sorted_and_complete(target: FakeTarget) -> None:
    drafter = new_drafter(target)
    tree = drafter.propose(begin_decoding(target, drafter, build_prompt(target, 11)), 32, [True, True])
    assert tree.scores is not None
    for row in range(2):
        assert (tree.scores[row].diff() <= 0).all()
    small = drafter.propose(begin_decoding(target, drafter, build_prompt(target, 11)), 8, [True, True])
    for row in range(2):
        assert list(scores_by_path(small, row)) == list(scores_by_path(tree, row))[:7]


def test_finished_rows_are_not_drafted(target: FakeTarget) -> None:
    drafter = new_drafter(target)
    state = begin_decoding(target, drafter, build_prompt(target, 9))
    taps = {NUM_LAYERS: torch.randn(2, 1, 32)}
    drafter.observe(state, build_result(root_only(2), [[0], []], [[7], []]), taps)
    tree = drafter.propose(state, 8, [True, False])
    assert tree.node_mask[0].sum() == 8 and tree.node_mask[1].sum() == 0 and torch.isfinite(state.last_hidden).all()
    assert drafter.propose(state, 8, [False, False]).num_nodes == drafter.propose(state, 1, [True, True]).num_nodes == 1


# --- visual input modes -----------------------------------------------------------------------------------------------


def test_inputs_of_each_visual_mode(target: FakeTarget) -> None:
    """In MSD (section 3) a patch enters alone, one input early, and the text after it with the last patch's state."""
    prompt = build_prompt(target, 8)
    next_embeds, states = prompt.hidden_states[0].roll(-1, 1), prompt.hidden_states[NUM_LAYERS]
    aligned = DraftInputs(
        next_embeds,
        states,
        prompt.visual_mask.roll(-1, 1),
        target.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)),
    )
    fuse = target.head.fuse
    inputs, keep = VISUAL_MODES["decoupled"](target.head, aligned)
    assert keep is None
    for k in range(3):  # the patches are at positions 2, 3, 4
        assert torch.equal(inputs[:, 1 + k], prompt.hidden_states[0][:, 2 + k])
    assert torch.allclose(inputs[:, 4], fuse(prompt.hidden_states[0][:, 5], states[:, 4]), atol=1e-6)
    inputs, keep = VISUAL_MODES["coupled"](target.head, aligned)
    assert keep is None and torch.allclose(inputs[:, 1], fuse(prompt.hidden_states[0][:, 2], states[:, 1]), atol=1e-6)
    inputs, keep = VISUAL_MODES["placeholder"](target.head, aligned)
    assert torch.allclose(inputs[:, 1], fuse(aligned.placeholder_embed.expand(2, -1), states[:, 1]), atol=1e-6)
    inputs, keep = VISUAL_MODES["text_only"](target.head, aligned)
    assert keep is not None and keep[0].tolist() == [True, False, False, False, True, True, True, True]


def test_left_pack() -> None:
    keep = torch.tensor([[False, True, True, False], [True, False, False, True]])
    counts, moved, index = left_pack(keep, torch.arange(16).view(2, 4, 2), torch.arange(4).expand(2, 4))
    assert counts.tolist() == [2, 2] and index[:, :2].tolist() == [[1, 2], [0, 3]]
    assert moved[:, :2].tolist() == [[[2, 3], [4, 5]], [[8, 9], [14, 15]]]


# --- training ---------------------------------------------------------------------------------------------------------


def build_trainer(target: FakeTarget, folder: Path, steps: int = 6, **more: Any) -> Trainer:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        heads = {"a": EagleHead(HEAD_CONFIG), "b": EagleHead(HEAD_CONFIG)}
    draft_models = {"a": DraftModel(heads["a"], "decoupled"), "b": DraftModel(heads["b"], "text_only")}
    return new_trainer(target, folder, draft_models, max_steps=steps, **more)


def test_heads_learn_and_an_interrupted_run_resumes(target: FakeTarget, tmp_path: Path) -> None:
    metrics: list[dict[str, float]] = []
    whole = build_trainer(target, tmp_path / "whole", steps=40)
    assert whole.run(on_step=metrics.append)
    assert metrics[-1]["a/loss"] < 0.6 * metrics[0]["a/loss"] and metrics[-1]["b/loss"] < 0.6 * metrics[0]["b/loss"]
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [10, 20, 30, 40]
    short = build_trainer(target, tmp_path / "short", steps=6)
    assert short.run()
    for _ in range(9):
        cut = build_trainer(target, tmp_path / "cut", steps=6)
        if cut.run(max_seconds=0.0):
            break
    assert cut.step == 6
    for name, value in short.draft_models["a"].head.state_dict().items():
        assert torch.allclose(value, cut.draft_models["a"].head.state_dict()[name], atol=1e-5), name


def test_other_settings_are_refused_and_a_full_disk_preserves_the_checkpoint(
    target: FakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_trainer(target, tmp_path, steps=4)
    run.run()
    with pytest.raises(SettingsError, match=r"other settings \(config\)"):
        build_trainer(target, tmp_path, steps=5)
    before = (tmp_path / "state.pt").read_bytes()

    def full(state: Any, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        run.save()
    assert (tmp_path / "state.pt").read_bytes() == before and len(list(tmp_path.glob("*.part"))) == 0


# --- on disk ----------------------------------------------------------------------------------------------------------


def build_metadata(**more: Any) -> HeadMetadata:
    return HeadMetadata(HEAD_CONFIG, "decoupled", NUM_LAYERS, "llava", "abc", **more)


def test_tensors_have_the_published_names(target: FakeTarget, tmp_path: Path) -> None:
    save_head(tmp_path, target.head, build_metadata(draft_ids=torch.tensor([1, 5, 7])), dtype=torch.float32)
    head, metadata = load_head(tmp_path)
    assert metadata.visual_mode == "decoupled" and metadata.num_layers == NUM_LAYERS and metadata.draft_ids is not None
    assert metadata.draft_ids.tolist() == [1, 5, 7] and metadata.config == HEAD_CONFIG
    assert all(
        torch.equal(a, b) for a, b in zip(head.state_dict().values(), target.head.state_dict().values(), strict=True)
    )
    names = set(load_file(tmp_path / "model.safetensors")) - {"draft_ids"}
    assert names == {
        "fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.k_proj.bias", "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.v_proj.bias", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight", "layers.0.post_attention_layernorm.weight",
    }  # fmt: skip
    assert to_stored(target.head)["layers.0.self_attn.k_proj.weight"].shape == (16, 32)


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.bias"), "lacks fc.bias"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected tensors extra"),
        (lambda w: w.update({"fc.weight": torch.zeros(2, 2)}), r"fc.weight must be \[32, 64\].*got \[2, 2\]"),
        (lambda w: w["fc.weight"].fill_(float("nan")), "fc.weight holds values that are not finite"),
        (lambda w: w.update(draft_ids=torch.tensor([5, 1])), "increasing ids below 40"),
        (lambda w: w.update(draft_ids=torch.tensor([5, 99])), "increasing ids below 40"),
    ],
)
def test_damaged_weights_are_named(target: FakeTarget, tmp_path: Path, change: Change, message: str) -> None:
    save_head(tmp_path, target.head, build_metadata())
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as failed:
        load_head(tmp_path)
    assert str(tmp_path) in str(failed.value)


def test_invalid_files_are_refused(target: FakeTarget, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_head(tmp_path)
    save_head(tmp_path, target.head, build_metadata())
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_head(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        load_head(tmp_path)
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "not a JSON object"),
        ('{"model_type": "llava"}', "has model_type 'llava'"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": checkpoint.MODEL_TYPE, "visual_mode": "magic"}))
    with pytest.raises(ValueError, match="visual_mode must be one of decoupled"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"block_size": "many"},
            "config.json of a drafter: block_size must be an integer from 1 to 16777216; got 'many'",
        ),
        ({"hidden_size": True}, "hidden_size must be an integer from 1 to 16777216; got True"),
        ({"bias": 1}, "bias must be true or false; got 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number from 0 to 1; got 'small'"),
        ({"vocab_size": None}, "is incomplete: .*vocab_size"),
        ({"block_size": 99}, "block_size must be 1 to 16 tokens per forward; got 99"),
    ],
)
def test_invalid_configs_are_refused(
    target: FakeTarget, tmp_path: Path, caplog: Any, monkeypatch: Any, change: dict[str, Any], message: str
) -> None:
    save_head(tmp_path / "own", target.head, build_metadata())
    file = tmp_path / "own" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path / "own")
    monkeypatch.setattr(registry, "WEIGHTS_DIR", tmp_path)
    assert (
        build_drafter("auto", TargetInfo("llava", 32, 40, NUM_LAYERS)).name == "arbitrated"
        and "own cannot be read" in caplog.text
    )


def test_shapes_of_the_published_checkpoint_of_llava_7b() -> None:
    """msd.md, section 2: names and shapes."""
    config = EagleConfig(4096, 11008, 32, 32, 32000)
    with torch.device("meta"):
        head = EagleHead(config)
        shapes = {name: tuple(value.shape) for name, value in to_stored(head).items()}
    assert shapes["fc.weight"] == (4096, 8192) and shapes["fc.bias"] == (4096,)
    assert shapes["layers.0.mlp.down_proj.weight"] == (4096, 11008) and len(shapes) == 10
    assert shapes["layers.0.self_attn.q_proj.weight"] == (4096, 4096)


# --- behind the loop --------------------------------------------------------------------------------------------------


def tiny_head(seed: int = 0) -> EagleHead:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return EagleHead(EagleConfig(64, 128, 4, 2, 384))


def test_a_folder_is_a_drafter_and_is_checked(tiny: Captioner, tmp_path: Path) -> None:
    from mmspec.drafters.checkpoints.format import tokenizer_fingerprint

    metadata = HeadMetadata(
        tiny_head().config, "text_only", 2, "llava", tokenizer_fingerprint(tiny.processor.tokenizer)
    )
    save_head(tmp_path / "own", tiny_head(), metadata)
    with patch_model(tiny.model, str(tmp_path / "own"), processor=tiny.processor):
        assert "own" in repr(tiny.model.__dict__["_mmspec"].config.drafter.name)
    for change, message in (({"num_layers": 5}, "num_layers 5"), ({"tokenizer": "other"}, "tokenizer other")):
        save_head(tmp_path / "other", tiny_head(), replace(metadata, **change))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"another target: {message}"):
            mmspec.patch(tiny.model, str(tmp_path / "other"), processor=tiny.processor)
    facts = TargetInfo("llava", 32, 384, 2)
    with pytest.raises(ValueError, match=r"hidden_size 64 \(the target: 32\)"):
        build_drafter(str(tmp_path / "own"), facts)


def test_auto_skips_other_targets_and_warns_of_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mmspec.drafters import registry

    monkeypatch.setattr(registry, "WEIGHTS_DIR", tmp_path)
    own, other = TargetInfo("llava", 64, 384, 2), TargetInfo("llava", 32, 384, 2)
    save_head(tmp_path / "own", tiny_head(), HeadMetadata(tiny_head().config, "text_only", 2, "llava"))
    assert (
        build_drafter("auto", own).name == "own"
        and build_drafter("auto", other).name == "arbitrated"
        and not caplog.records
    )
    file = tmp_path / "own" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert build_drafter("auto", other).name == "arbitrated" and not caplog.records, (
        "no weights of other targets' drafters are read"
    )
    assert build_drafter("auto", own).name == "arbitrated"
    assert "own cannot be read" in caplog.text and "damaged" in caplog.text and "\n" not in caplog.messages[0]


def test_a_folder_named_per_call_is_loaded_once(
    tiny: Captioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmspec.drafters.checkpoints import load as trained
    from mmspec.drafters.checkpoints.format import tokenizer_fingerprint

    metadata = HeadMetadata(
        tiny_head().config, "text_only", 2, "llava", tokenizer_fingerprint(tiny.processor.tokenizer)
    )
    folder, read, original = tmp_path / "own", [], trained.load_trained
    save_head(folder, tiny_head(), metadata)
    monkeypatch.setattr(trained, "load_trained", lambda *given: read.append(given[0]) or original(*given))  # type: ignore[func-returns-value]
    inputs = tiny.build_inputs([render_scene(generate_scene(0))], ["a"])

    def call(name: object = str(folder)) -> None:
        tiny.model.generate(**inputs, max_new_tokens=3, do_sample=False, mmspec={"drafter": name})

    with patch_model(tiny.model, "none", processor=tiny.processor):
        call()
        call()
        assert len(read) == 1
        save_head(folder, tiny_head(1), replace(metadata, visual_mode="coupled"))  # another, under the same name
        call()
        assert len(read) == 2
        for other in range(6):  # the cache is bounded
            save_head(tmp_path / str(other), tiny_head(other), metadata)
            call(str(tmp_path / str(other)))
        assert len(tiny.model.__dict__["_mmspec"].drafter_cache._drafters) == MAX_CACHED_DRAFTERS


def test_an_unknown_visual_mode_is_refused(target: FakeTarget) -> None:
    with pytest.raises(ValueError, match="visual_mode must be one of"):
        EagleDrafter(target.head, "magic", num_layers=3)


def test_the_prompt_runs_at_the_first_draft(target: FakeTarget) -> None:
    drafter = new_drafter(target)
    prompt = build_prompt(target, 11)
    state = drafter.begin(prompt)
    drafter.observe(state, build_first_result([1, 2]), {})
    assert not any(state.kv_cache.seq_lens), "no draft was requested yet"
    assert drafter.propose(state, 1, [True, True]).num_nodes == 1 and not any(state.kv_cache.seq_lens)
    drafter.propose(state, 8, [True, True])
    assert all(state.kv_cache.seq_lens) and state.prompt is None


def test_static_shapes_ignore_timing(target: FakeTarget) -> None:
    drafter = new_drafter(target)
    choosers = [Chooser(Economy(), 2, sources=[], fixed_tree_size=size) for size in (16, None)]
    states = [begin_decoding(target, drafter, build_prompt(target, 11, chooser=chooser)) for chooser in choosers]
    for chooser in choosers:
        for _ in range(3):
            chooser.economy.rounds_s.add("score", 2, 1, 1.0)
            chooser.economy.drafts_s.add(drafter.name, 2, 1, 0.1)
            chooser.economy.drafts_s.add(drafter.name, 2, 3, 30.0)
        chooser.plan()
    fixed, free = (drafter.propose(state, 16, [True, True]) for state in states)
    assert max(map(len, scores_by_path(fixed, 0))) == 3 and max(map(len, scores_by_path(free, 0))) == 1


@pytest.mark.parametrize(
    "shape", [{}, {"num_key_value_heads": 2, "qkv_bias": True}, {"input_norm": True}, {"norm_before_residual": True}]
)
def test_query_index_gives_the_same_outputs(shape: dict[str, Any]) -> None:
    """Keys and values of all positions and outputs of some are those of a forward over all of them."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    is_eagle3 = "norm_before_residual" in shape
    config = (Eagle3Config if is_eagle3 else EagleConfig)(**{**sizes, "vocab_size": 64, **shape})
    torch.manual_seed(3)
    layer: DecoderLayer = Eagle3Layer(config) if isinstance(config, Eagle3Config) else DecoderLayer(config)
    layer, head = layer.eval(), EagleHead(config)
    rows = torch.randn(2, 7, 64 if is_eagle3 else 32)
    cos, sin = (part[None, None] for part in head.rotary_embedding(torch.arange(7), torch.float32))
    num_accepted: list[tuple[Tensor, Tensor]] = []

    def attend(mask: Tensor) -> Any:
        def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            num_accepted.append((keys, values))
            return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)

        return attention

    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    query_index = torch.tensor([[6, 2], [4, 0]])
    with torch.no_grad():
        whole = layer(rows, cos, sin, attend(causal))
        some = layer(rows, cos, sin, attend(causal[query_index][:, None]), query_index)
    assert torch.allclose(some, whole[torch.arange(2)[:, None], query_index], atol=1e-5)
    for one, other in zip(*num_accepted, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
