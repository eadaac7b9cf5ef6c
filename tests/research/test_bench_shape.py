"""`research.bench --shape`: a known continuation, the given acceptance."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz import patch_model
from recorded_rounds import recording
from recorders import record_nothing
from transformers import AutoConfig, AutoModelForCausalLM

import mmspec
from mmspec.app.errors import UsageError
from mmspec.app.modeling.load import clone
from mmspec.cpu.c_kernel import load_kernel
from mmspec.drafters.heads.base import c_draft
from mmspec.engine.rng import SamplingNoise
from research.bench import bandwidth
from research.bench.bandwidth import text_weight_bytes
from research.bench.command import main
from research.bench.peers import write_shape_gguf
from research.bench.peers.base import PeerError, PeerPrompt
from research.bench.peers.in_process import PatchedPeer
from research.bench.peers.process import WorkerPeer
from research.bench.peers.registry import baseline_peer
from research.bench.shape import contexts
from research.bench.shape.contexts import ContextBench, RoundTime, full_attention_layers
from research.bench.shape.models import (
    TEXT_SHAPES,
    build_shape_drafter,
    build_shape_model,
    config_fields,
    find_shape,
)
from research.bench.shape.notes import count_runtime_calls
from research.bench.shape.phases import PhaseTimer, check_notes, multinomial_is_reproduced
from research.bench.shape.simulated import Oracle, SimulatedAcceptance, acceptance_for_tau, draft_form

pytestmark = pytest.mark.research


def test_the_next_token_is_the_successor() -> None:
    shape = TEXT_SHAPES["tiny"]
    for dtype in (torch.float32, torch.bfloat16):
        model = build_shape_model(shape, dtype, torch.device("cpu"))
        ids = torch.randint(shape.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
        output = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[:, 20:]
        assert torch.equal(output, (ids[:, -1:] + 1 + torch.arange(12)) % shape.vocab_size)
        logits = model(ids).logits.float().topk(2).values
        assert (logits[..., 0] - logits[..., 1]).min() > 1  # far beyond rounding


@pytest.mark.parametrize(("tau", "depth"), [(1.0, 5), (2.6, 5), (3.5, 7), (6.0, 5)])
def test_acceptance_gives_the_wanted_tau(tau: float, depth: int) -> None:
    p = acceptance_for_tau(tau, depth)
    assert sum(p**i for i in range(depth + 1)) == pytest.approx(tau)
    draws = torch.rand(20000, depth, generator=torch.Generator().manual_seed(0))
    assert 1 + (draws < p).cumprod(1).sum(1).float().mean() == pytest.approx(tau, abs=0.05)


def test_the_form_is_a_chain_with_siblings() -> None:
    parents, depths = draft_form(7, 3, torch.device("cpu"))
    assert parents.tolist() == [-1, 0, 1, 2, 0, 1, 2] and depths.tolist() == [0, 1, 2, 3, 1, 2, 3]
    assert draft_form(3, 5, torch.device("cpu"))[0].tolist() == [-1, 0, 1]


def simulated(name: str) -> tuple[Any, SimulatedAcceptance, torch.Tensor, torch.Tensor]:
    """A model, a drafter of a tau of 2.5, prompts, and what the model alone generates."""
    shape, device = TEXT_SHAPES["tiny"], torch.device("cpu")
    model = build_shape_model(shape, torch.float32, device)
    inner = Oracle(8) if name == "oracle" else build_shape_drafter(name, shape, torch.float32, device, 8)
    drafter = SimulatedAcceptance(name, inner, 2.5, 5, shape.vocab_size, torch.Generator().manual_seed(0))
    ids = torch.randint(shape.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    return model, drafter, ids, model.generate(input_ids=ids, max_new_tokens=150, do_sample=False)


@pytest.mark.parametrize("name", ["oracle", "msd", "flash"])
def test_the_target_accepts_what_is_given(name: str) -> None:
    model, drafter, ids, expected = simulated(name)
    mmspec.patch(model, drafter, tree_size=8)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=150, do_sample=False), expected)
    assert mmspec.stats(model).tau == pytest.approx(2.5, abs=0.35) and drafter.name == f"{name}@tau2.5"


@pytest.mark.parametrize("name", ["msd", "flash"])
def test_whole_rounds_accept_what_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: draft, forward and acceptance in one recorded function, which `whole` times."""
    monkeypatch.setattr(c_draft, "active_kernel", lambda: None)
    model, drafter, ids, expected = simulated(name)
    timer = PhaseTimer(torch.device("cpu"))
    with recording(record_nothing) as counting, patch_model(model, drafter, tree_size=8), timer.measuring():
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=150, do_sample=False), expected)
        assert mmspec.stats(model).tau == pytest.approx(2.5, abs=0.35)
    assert counting.whole_replays > 20
    assert timer.milliseconds()["whole"] > 0 and len(timer.spans["propose"]) < 5


def test_the_instrument_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 2**20)
    args = ["--shape", "tiny", "--prompt-tokens", "20,30", "--repeats", "1", "--nodes", "6", "--tau", "2.6"]
    args += ["--new-tokens", "16", "--drafters", "oracle", "--device", "cpu", "--json", str(tmp_path / "s.json")]
    assert main([*args]) == 0
    printed = capsys.readouterr().out
    assert "simulated acceptance, random weights" in printed and "oracle@tau2.6, batch 1: measured tau" in printed
    assert "share of the measured bandwidth" in printed and "ms a round: score" in printed
    assert "ms a round: read" in printed and "torch.multinomial on cpu" in printed
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    overall = {row["peer"]: row for row in rows if row["category"] == "all"}
    assert list(overall) == ["hf", "hf-again", "hf-static", "none", "oracle@tau2.6"]
    assert all(row["same"] == row["calls"] == 2 for row in overall.values())


def test_the_instrument_reports_phases_logits_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, device = TEXT_SHAPES["tiny"], torch.device("cpu")
    model = build_shape_model(shape, torch.float32, device)
    ids = torch.randint(shape.vocab_size, (1, 20), generator=torch.Generator().manual_seed(0))
    prompt = PeerPrompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ())
    inner = build_shape_drafter("msd", shape, torch.float32, device, 6)
    drafter = SimulatedAcceptance("msd", inner, 2.5, 3, shape.vocab_size, torch.Generator().manual_seed(0))
    peer = PatchedPeer("msd", mmspec.patch(clone(model), drafter, tree_size=6))
    timer = PhaseTimer(device)
    with timer.measuring():
        peer.generate(prompt, 16)
    stats, phases = mmspec.stats(peer.model, last=True), timer.milliseconds()
    assert len(timer.spans["round"]) == len(timer.spans["commit"]) == stats.rounds
    assert all(phases[name] > 0 for name in ("read", "levels", "score", "verify", "commit"))
    round_s = sum(end - start for start, end in timer.spans["round"]) / stats.rounds
    assert sum(phases.values()) <= 1e3 * round_s + 1e-6  # parts of the rounds, which do not overlap
    peer.generate(prompt, 16)
    assert len(timer.spans["round"]) == stats.rounds  # nothing is timed any more

    notes = check_notes(model, [peer], prompt, 12)
    assert "of 12 steps' logits" in notes[2] and "(same text)" in notes[2] and "noise gives" in notes[3]
    assert multinomial_is_reproduced(device, 50)
    monkeypatch.setattr(SamplingNoise, "ahead", lambda self, steps, *args: self.tensors[0][steps[0] - 1][:, None])
    assert not multinomial_is_reproduced(device, 50)


def test_calls_of_the_runtime_are_counted() -> None:
    model = build_shape_model(TEXT_SHAPES["tiny"], torch.float32, torch.device("cpu"))
    ids = torch.zeros(1, 5, dtype=torch.long)
    prompt = PeerPrompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ())
    assert count_runtime_calls(baseline_peer(model), prompt, 3) == {"launches": 0.0, "waits": 0.0}  # no CUDA here


def test_bad_shapes_and_taus_are_refused(capsys: Any) -> None:
    with pytest.raises(UsageError, match="--shape is one of tiny, smollm2-135m"):
        find_shape("huge")
    with pytest.raises(ValueError, match="tau is 1 to 6"):
        acceptance_for_tau(7.0, 5)
    assert find_shape("LLaVA-1.5-7B").num_hidden_layers == 32
    assert main(["--shape", "tiny", "--drafters", "hybrid"]) == 2
    assert "none, oracle, msd and flash" in capsys.readouterr().err


@pytest.mark.parametrize("name", TEXT_SHAPES)
def test_sizes_of_the_layers_that_read_all_positions_are_known(name: str) -> None:
    shape = TEXT_SHAPES[name]
    layers = full_attention_layers(AutoConfig.for_model(shape.model_type, **config_fields(shape)))
    assert layers and all(layer.num_key_value_heads and layer.num_attention_heads for layer in layers)
    sizes = {getattr(layer, "head_dim", None) or shape.hidden_size // shape.num_attention_heads for layer in layers}
    assert sizes == {
        shape.config.get("global_head_dim") or shape.head_dim or shape.hidden_size // shape.num_attention_heads
    }


def test_rounds_behind_contexts(tmp_path: Path, capsys: Any) -> None:
    """Every way at every context, with the share of the roof; no prompt is computed."""
    file = tmp_path / "contexts.json"
    options = ["--shape", "tiny,tiny", "--contexts", "40,70", "--repeats", "1", "--json", str(file), "--no-progress"]
    assert main([*options]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "| none | 2 nodes | 4 nodes | 8 nodes | 16 nodes | 32 nodes |" in lines[0]
    assert len(lines) == 2 * (4 if load_kernel() is None else 8), "and what a 4-bit copy would bring"
    first, second = json.loads(file.read_text())
    assert first["shape"] == second["shape"] == "tiny"
    rows = first["rows"]
    assert {row["context"] for row in rows} == {40, 70} and all(row["ms"] > 0 for row in rows)
    assert main([*options, "--device", "meta"]) == 2
    assert main(["--shape", "tiny,other", "--contexts", "40"]) == 2


def test_an_engine_that_crashes_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some end with a signal when they load a model on a new processor."""

    def crash(peer: WorkerPeer) -> None:
        raise PeerError("failed: signal 11")

    monkeypatch.setattr(contexts, "find_python", lambda *args: sys.executable)
    monkeypatch.setattr(contexts.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=0))
    monkeypatch.setattr(WorkerPeer, "start", crash)
    model = build_shape_model(TEXT_SHAPES["tiny"], torch.float32, torch.device("cpu"))
    bench = ContextBench(model, TEXT_SHAPES["tiny"], [])
    assert bench.notes[-1] == "llama.cpp f32: failed: signal 11" and "none" in bench.ways and not bench.engines
    bench.close()


def test_the_roof_of_rounds_counts_weights_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once, and multiplied with each node: the weights, and every position with the queries of all heads."""
    shape = TEXT_SHAPES["tiny"]
    model = build_shape_model(shape, torch.bfloat16, torch.device("cpu"))
    bench = ContextBench.__new__(ContextBench)
    bench.model, bench.shape = model, shape
    peak = 1e20
    monkeypatch.setattr(contexts, "measure_peak", lambda *args: peak)
    weights, keys, attention = text_weight_bytes(model), 2 * 2 * 2 * 16, 2 * 2 * 4 * 16
    rows = [RoundTime(1000, "none", 1.0, 1.0, 1.0), RoundTime(1000, "8 nodes", 1.0, 1.0, 1.0)]
    for row in bench.roofs(rows, 1e9):
        assert row.roof_ms == pytest.approx(1e3 * (weights + 1000 * keys * 2) / 1e9)
    peak = 1.0
    for row, nodes in zip(bench.roofs(rows, 1e9), (1, 8), strict=True):
        assert row.roof_ms == pytest.approx(1e3 * nodes * (weights / 2 + (1000 + nodes) * attention))


GGUF_SHAPES = ("tiny", "smollm2-135m", "llava-onevision-0.5b", "qwen3-vl-2b", "qwen3.5-0.8b", "lfm2-1.2b", "gemma4-e2b")


@pytest.mark.parametrize("name", GGUF_SHAPES)
def test_a_gguf_of_a_shape_has_the_tensors_of_the_model(name: str) -> None:
    """As many numbers as the model of transformers, the head of a tied model apart."""
    shape = TEXT_SHAPES[name]
    sizes = [math.prod(size) for tensor, size in write_shape_gguf.tensors(asdict(shape)) if "rope" not in tensor]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.model_type, **config_fields(shape)))
    scales = [one for layer, one in model.named_buffers() if "layer_scalar" in layer]
    assert sum(sizes) == sum(weight.numel() for weight in [*model.parameters(), *scales])
