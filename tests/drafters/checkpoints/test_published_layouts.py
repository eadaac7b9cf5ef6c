"""Every published layout drafts as its own code does: chains and logits of whole calls beside a slow reader of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fuzz
import pytest
import tiny_models as tiny
import torch
from draft_rounds import DraftedCall, read_text, run_call
from parity import generate_plain, get_model
from published_heads import write_head
from published_layouts import LAYOUTS
from recorded_rounds import recording
from recorders import record_nothing
from slow_blocks import SlowBlock, SlowDflash2, SlowDomino, SlowLilicorr
from slow_heads import SlowEagle, SlowEagle3Head, SlowHead, SlowVispec
from transformers import PreTrainedModel

import mmspec
from mmspec.app.cli.env import describe_drafter
from mmspec.cpu.c_kernel import load_kernel
from mmspec.drafters.checkpoints.export import export_head
from mmspec.drafters.checkpoints.published import load_published
from mmspec.resolve import target_info
from mmspec.targets.registry import find_adapter

READERS: dict[str, Callable[..., SlowHead]] = {
    "block": SlowBlock,
    "dflash2": SlowDflash2,
    "domino": SlowDomino,
    "lilicorr": SlowLilicorr,
    "eagle": SlowEagle,
    "msd": SlowEagle,
    "vispec": SlowVispec,
    "eagle3": SlowEagle3Head,
}


def build_target(family: str) -> PreTrainedModel:
    """A target of eight layers, so that the three hidden states of EAGLE-3 differ."""
    return get_model(family, layers=8)


def assert_drafts_as_read(call: DraftedCall, reader: SlowHead, row: int = 0) -> None:
    """Whole chains in every round, and logits where the head ran in its own forward."""
    rounds = call.rows[row]
    for drafted in rounds:
        is_known = len(drafted.logits) > 0
        allowed = drafted.logits[0].isfinite() if is_known else torch.ones(len(reader.token_ids()), dtype=torch.bool)
        tokens, logits = reader.chain(drafted.num_known, len(drafted.tokens), allowed)
        if isinstance(reader, SlowBlock) and not reader.has_bias:  # a tree of the likeliest products, not a chain
            assert tokens[0] == drafted.tokens[0], f"with {drafted.num_known} tokens known"
        else:
            assert tokens == drafted.tokens, f"with {drafted.num_known} tokens known"
        if is_known:
            assert int(allowed.sum()) > 0.75 * len(allowed)
            difference = (logits - drafted.logits)[:, allowed].abs().max()
            assert float(difference) < 1e-4, f"with {drafted.num_known} tokens known"


@pytest.mark.parametrize("num_tokens", [16, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_of_a_call_equal_the_slow_reader(name: str, num_tokens: int, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    model, folder = build_target(layout.family), write_head(tmp_path, layout)
    inputs = tiny.build_inputs(model, 5, images=[2], num_text_tokens=(9, 12))
    call = run_call(model, folder, inputs, num_tokens=num_tokens, in_c=False)
    assert len(call.rows[0]) >= num_tokens - 10
    reader = READERS[layout.kind](folder, read_text(model, inputs, call), **layout.options.get("reader", {}))
    assert_drafts_as_read(call, reader)


AXES_AND_LAYERS = (
    "EAGLE-3, SpecForge, M-RoPE",
    "EAGLE-3, AngelSlim, M-RoPE",
    "EAGLE-3, speculators 0.7",
    "DFlash 2, NeMo Automodel",
    "Domino, SpecForge",
    "LiLiCorr, Model-Optimizer",
    "LiLiCorr, Model-Optimizer, with convolution",
)


@pytest.mark.parametrize("name", AXES_AND_LAYERS)
def test_axes_and_layers_of_compiled_and_recorded_drafts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the prompt positions are on one axis, so that both draft the same; several layers run in torch."""
    model, folder = build_target(LAYOUTS[name].family), write_head(tmp_path, LAYOUTS[name])
    inputs = tiny.build_inputs(model, 5, images=[2], num_text_tokens=(9, 12))
    expected = [one.tokens for one in run_call(model, folder, inputs, num_tokens=20, in_c=False).rows[0]]
    if load_kernel() is not None:
        compiled = run_call(model, folder, inputs, num_tokens=20, in_c=True)
        assert compiled.num_c == ("0.7" not in name) and [one.tokens for one in compiled.rows[0]] == expected
    monkeypatch.setattr("mmspec.engine.loop.can_record_rounds", lambda *args: False)
    with recording(record_nothing) as recorder:
        recorded = run_call(model, folder, inputs, num_tokens=20, in_c=False)
    assert recorder.draft_replays > 10 and [one.tokens for one in recorded.rows[0]] == expected


@pytest.mark.parametrize("name", AXES_AND_LAYERS)
def test_axes_and_layers_of_padded_rows(name: str, tmp_path: Path) -> None:
    """Each row counts on its own: one with images, one of text alone."""
    layout = LAYOUTS[name]
    model, folder = build_target(layout.family), write_head(tmp_path, layout)
    inputs = tiny.build_inputs(model, 5, batch=2, images=[2, 0], num_text_tokens=(6, 9))
    assert not inputs["attention_mask"].all()
    call = run_call(model, folder, inputs, num_tokens=8, in_c=False)
    for row in range(2):
        reader = READERS[layout.kind](folder, read_text(model, inputs, call, row), **layout.options.get("reader", {}))
        assert_drafts_as_read(call, reader, row)


@pytest.mark.parametrize("name", ["MSD, LLaVA-1.5", "ViSpec, LLaVA-NeXT", "EAGLE-3, EAGLE code"])
def test_padded_rows_that_begin_with_an_image(name: str, tmp_path: Path) -> None:
    """The shorter row wraps at its end, where no image is."""
    layout = LAYOUTS[name]
    model, folder = build_target(layout.family), write_head(tmp_path, layout)
    draws = (tiny.build_inputs(model, seed, batch=2, images=[1, 0], num_text_tokens=(6, 60)) for seed in range(20))
    inputs = next(given for given in draws if int(given["attention_mask"].sum(1).diff()) > 3)
    ids, is_known = inputs["input_ids"][0], inputs["attention_mask"][0].bool()
    is_image = ids == model.config.image_token_id
    ids[is_known] = torch.cat((ids[is_image], ids[is_known & ~is_image]))
    call = run_call(model, folder, inputs, num_tokens=8, in_c=False)
    for row in range(2):
        assert_drafts_as_read(call, READERS[layout.kind](folder, read_text(model, inputs, call, row)), row)


def test_what_is_assumed_of_a_missing_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line where the head's own code and the engines disagree; an exported head has the key."""
    for name, is_assumed in (("M-RoPE", False), ("M-RoPE without its key", True)):
        layout = LAYOUTS[f"EAGLE-3, AngelSlim, {name}"]
        info = target_info(find_adapter(build_target(layout.family)), None)
        caplog.clear()
        drafter = load_published(write_head(tmp_path / name, layout), info)
        assert ("mrope_interleaved is missing and taken as true" in caplog.text) is is_assumed
        export_head(folder := tmp_path / f"{name} vllm", drafter, info, "vllm")
        config = load_published(folder, info).head.config
        assert config.mrope_interleaved and config.mrope_section == drafter.head.config.mrope_section
        with pytest.raises(ValueError, match="speculators counts positions on one axis"):
            export_head(tmp_path / "speculators", drafter, info, "speculators")


def test_an_exported_dflash2_head_drafts_as_its_layout_says(tmp_path: Path) -> None:
    """With the mask embedding that was trained; read back with the same weights, drafting the same."""
    layout = LAYOUTS["DFlash 2, NeMo Automodel"]
    model = build_target(layout.family)
    adapter = find_adapter(model)
    info = replace(target_info(adapter, None), media_token_ids=(model.config.image_token_id,))
    drafter = load_published(write_head(tmp_path / "published", layout), info)
    drafter.head.mask_embedding.data.normal_(generator=torch.Generator().manual_seed(0))
    drafter.mask_token_id = None
    export_head(folder := tmp_path / "exported", drafter, info, "vllm", adapter.shared_embeddings)
    again = load_published(folder, info)
    assert again.head.config == drafter.head.config
    assert all(
        torch.allclose(value, again.head.state_dict()[name]) for name, value in drafter.head.state_dict().items()
    )
    inputs = tiny.build_inputs(model, 5, images=[2], num_text_tokens=(9, 12))
    call = run_call(model, folder, inputs, num_tokens=16, in_c=False)
    assert_drafts_as_read(call, SlowDflash2(folder, read_text(model, inputs, call), **layout.options["reader"]))
    for format_name in ("sglang", "speculators"):
        with pytest.raises(ValueError, match=f"--format {format_name} has no layout of DFlash 2 heads"):
            export_head(tmp_path, drafter, info, format_name, adapter.shared_embeddings)
    with pytest.raises(ValueError, match="name the target"):
        export_head(tmp_path, drafter, info, "vllm")


@pytest.mark.parametrize("name", ["EAGLE-3, SpecForge, M-RoPE", "EAGLE-3, AngelSlim, M-RoPE without its key"])
def test_axes_and_placeholders_of_videos(name: str, tmp_path: Path) -> None:
    """A video has a placeholder of its own, and positions in time."""
    model, folder = build_target(LAYOUTS[name].family), write_head(tmp_path, LAYOUTS[name])
    inputs = tiny.build_inputs(model, 4, images=[1], videos=[1], num_text_tokens=(9, 12))
    assert {model.config.image_token_id, model.config.video_token_id} <= set(inputs["input_ids"][0].tolist())
    call = run_call(model, folder, inputs, num_tokens=12, in_c=False)
    assert_drafts_as_read(call, SlowEagle3Head(folder, read_text(model, inputs, call)))


@pytest.mark.parametrize("compressor", ["pool:3", "stride:3"])
def test_axes_of_compressed_images(compressor: str, tmp_path: Path) -> None:
    """What a compressor keeps has a position of the prompt, hence its three axes."""
    layout = LAYOUTS["EAGLE-3, AngelSlim, M-RoPE"]
    model, folder = build_target(layout.family), write_head(tmp_path, layout)
    inputs = tiny.build_inputs(model, 5, images=[2], num_text_tokens=(6, 9))
    plain = generate_plain(model, inputs, max_new_tokens=8)
    with fuzz.patch_model(model, str(folder), tree_size=6, compressor=compressor):
        assert torch.equal(generate_plain(model, inputs, max_new_tokens=8), plain)
        stats = mmspec.stats(model)
    assert stats.num_draft_tokens and 0 < stats.num_compressed_tokens < stats.num_visual_tokens


@pytest.mark.parametrize(
    ("config", "mode"), [({}, "placeholder"), *(({"visual_mode": mode}, mode) for mode in ("coupled", "text_only"))]
)
def test_image_positions_and_their_name(config: dict[str, str], mode: str, tmp_path: Path) -> None:
    """The placeholder's embedding unless the head says otherwise, and which of both in `stats` and `mmspec env`."""
    layout = LAYOUTS["EAGLE-3, EAGLE code"]
    model, folder = build_target(layout.family), write_head(tmp_path / "head", layout, **config)
    inputs = tiny.build_inputs(model, 5, images=[2], num_text_tokens=(9, 12))
    call = run_call(model, folder, inputs, num_tokens=8, in_c=False)
    assert call.stats.drafter == f"head ({mode})"
    assert_drafts_as_read(call, SlowEagle3Head(folder, read_text(model, inputs, call)))
    described = dict(describe_drafter(str(folder), find_adapter(model), None))
    assert described["drafter"] == f"head ({mode})" and described["image positions"].startswith(mode)
    assert "unknown drafter" in dict(describe_drafter("no-such", find_adapter(model), None))["drafter"]
