"""Peers of `research.bench`: in this process, in a process of their own, and their weights in other formats."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mmspec.app.modeling.captioner import Captioner
from research.bench.bandwidth import text_weight_bytes
from research.bench.peers import process, worker
from research.bench.peers.base import EMBEDDINGS, PeerError, PeerPrompt
from research.bench.peers.export import Exports, prompt_embeddings, save_text_model
from research.bench.peers.in_process import cut_rows
from research.bench.peers.process import Engine, WorkerPeer, find_python, peer_pythons
from research.bench.peers.registry import PEER_NAMES, baseline_peer, build_patched_peers, build_peers
from research.bench.peers.write_gguf import gguf_name, interleave_rotary, read_safetensors
from research.bench.requests import build_requests, synthetic_images

pytestmark = pytest.mark.research

FAKE_WORKER = """
import json, os, signal, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "load":
        reply = {"engine": "fake 1"}
    elif request["max_new_tokens"] == 13:
        reply = {"error": "ValueError: thirteen"}
    elif request["max_new_tokens"] == 77:
        time.sleep(60)
    elif request["max_new_tokens"] == 88:
        os.kill(os.getpid(), signal.SIGILL)
    elif request["max_new_tokens"] == 99:
        sys.exit("the engine has crashed")
    else:
        reply = {"tokens": request["tokens"][:3], "first_tokens": 1, "ttft_s": 0.5, "total_s": 2.5}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture(scope="module")
def inputs(tiny: Captioner) -> dict[str, Any]:
    return build_requests(tiny, synthetic_images(1, 0), "a dog", 1, 0, 1, 0)[0]


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "fake.py").write_text(FAKE_WORKER)
    monkeypatch.setattr(process, "WORKER", tmp_path / "fake.py")
    engine = Engine("fake", "json", "json", "gguf", EMBEDDINGS)
    one = WorkerPeer("fake", engine, lambda python: tmp_path / "model", [sys.executable], context=150)
    assert one.unavailable_reason() is None
    one.start()
    yield one
    one.close()
    one.close()


def test_a_worker_is_fed_over_a_pipe(peer: WorkerPeer) -> None:
    prompt = PeerPrompt(
        {"input_ids": torch.tensor([[0, 5, 6, 7, 8]]), "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, (2,)
    )
    run = peer.generate(prompt, 4)
    assert peer.version == "fake 1" and run.output_ids == [[5, 6, 7]] and run.num_decoded == 2
    assert run.ms_per_token == pytest.approx(1000) and not run.without_media
    with pytest.raises(PeerError, match="thirteen"):
        peer.generate(prompt, 13)
    assert peer.generate(prompt, 4).output_ids == [[5, 6, 7]]  # an error of the engine does not end it
    with pytest.raises(PeerError, match="no embeddings"):
        peer.generate(PeerPrompt(prompt.inputs, (2,), has_media=True), 4)
    with pytest.raises(PeerError, match="context of the peer is 150"):
        peer.generate(prompt, 200)
    with pytest.raises(PeerError, match="has ended: the engine has crashed"):
        peer.generate(prompt, 99)


def test_a_worker_that_crashes_is_a_failed_call(peer: WorkerPeer) -> None:
    prompt = PeerPrompt({"input_ids": torch.tensor([[5]])}, ())
    for new_tokens in (88, 4):
        with pytest.raises(PeerError, match=r"^failed: signal 4$"):
            peer.generate(prompt, new_tokens)


def test_a_worker_that_does_not_answer_is_given_up(peer: WorkerPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "REPLY_TIMEOUT_S", 0.1)
    with pytest.raises(PeerError, match="no answer within"):
        peer.generate(PeerPrompt({"input_ids": torch.tensor([[5]])}, ()), 77)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("none", "no_such_engine", "no-such-engine", "gguf", EMBEDDINGS)
    one = WorkerPeer("none", engine, lambda python: Path(), ["/no/such/python", sys.executable])
    assert "pip install no-such-engine" in str(one.unavailable_reason())
    assert find_python("json", ["/no/such/python", sys.executable]) == sys.executable
    monkeypatch.setenv("MMSPEC_PEER_PYTHON", "/a/python:/b/python")
    assert peer_pythons([]) == ["/a/python", "/b/python", sys.executable] and peer_pythons(["/c"])[0] == "/c"


class FakeEngine:
    """Answers with the tokens it got, and the sum of the embeddings."""

    version = "fake"

    def __init__(self, model: str, threads: int) -> None:
        assert (model, threads) == ("m", 2)

    def generate(self, tokens: list[int], embeddings: Any, max_new_tokens: int, eos: list[int]) -> dict[str, Any]:
        return {"tokens": tokens, "sum": None if embeddings is None else embeddings.sum(1).tolist()}


def test_the_protocol_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(worker.WORKER_ENGINES, "fake", FakeEngine)
    rows = base64.b64encode(np.array([[1, 2], [3, 4]], "<f4").tobytes()).decode()
    common = {"op": "generate", "max_new_tokens": 3, "eos": []}
    requests = [
        {"op": "load", "model": "m", "threads": 2},
        common | {"tokens": [7, 8]},
        common | {"tokens": [7, 8], "embeddings": rows},
        {"op": "generate"},
    ]
    replies = io.StringIO()
    worker.serve_engine("fake", io.StringIO("\n".join(map(json.dumps, requests))), replies)
    load, text, media, error = (json.loads(line) for line in replies.getvalue().splitlines())
    assert load == {"engine": "fake"} and text == {"tokens": [7, 8], "sum": None} and media["sum"] == [3.0, 7.0]
    assert error["error"].startswith("KeyError")


def test_the_text_model_and_embeddings_give_the_same_tokens(
    tiny: Captioner, inputs: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_text_model(tiny.model, tiny.processor.tokenizer, tmp_path / "text")
    text = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = tiny.model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    embeddings = prompt_embeddings(tiny.model, inputs)
    assert embeddings.shape == (inputs["input_ids"].shape[1], 64)
    assert torch.equal(text.generate(inputs_embeds=embeddings[None], max_new_tokens=6, do_sample=False)[0], expected)
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 10000.0
    weights = read_safetensors(folder / "model.safetensors")
    assert {gguf_name(name) for name in weights} >= {"token_embd.weight", "blk.1.attn_q.weight", "output_norm.weight"}
    assert sum(a.nbytes for n, a in weights.items() if "embed_tokens" not in n) == text_weight_bytes(tiny.model)


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("qwen2", "self_attn.q_proj.bias", "attn_q.bias"),
        ("gemma3", "pre_feedforward_layernorm.weight", "ffn_norm.weight"),
        ("gemma3", "post_attention_layernorm.weight", "post_attention_norm.weight"),
        ("llama", "post_attention_layernorm.weight", "ffn_norm.weight"),
        ("llama", "self_attn.q_proj.bias", None),
        ("qwen2", "self_attn.o_proj.bias", None),
        ("qwen2", "self_attn.q_norm.weight", None),
    ],
)
def test_names_of_tensors_in_gguf(architecture: str, name: str, expected: str | None) -> None:
    """As llama.cpp reads them; with the real Gemma 3 270M it answers as transformers does."""
    if expected is not None:
        assert gguf_name(f"model.layers.3.{name}", architecture) == f"blk.3.{expected}"
        return
    with pytest.raises(ValueError, match=f"{architecture} has no tensor"):
        gguf_name(f"model.layers.3.{name}", architecture)


def test_rotary_halves_become_pairs() -> None:
    weight = np.arange(8)[:, None]
    assert interleave_rotary(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_conversion_that_fails_is_one_line(tiny: Captioner) -> None:
    exports = Exports(tiny.model, tiny.processor.tokenizer)
    try:
        with pytest.raises(PeerError, match="cannot be converted"):
            exports.get("gguf", "/no/such/python")
    finally:
        exports.close()


def test_peers_in_this_process_give_the_same_tokens(tiny: Captioner, inputs: dict[str, Any]) -> None:
    exports = Exports(tiny.model, tiny.processor.tokenizer)
    named = build_peers(["hf", "hf-static", "hf-assisted", "llama.cpp"], tiny.model, exports)
    assert [one.name for one in named] == ["hf-static", "hf-assisted", "llama.cpp"] and len(PEER_NAMES) == 11
    assert "--assistant" in str(named[1].unavailable_reason())
    prompt = PeerPrompt(inputs, (), has_media=True)
    expected = baseline_peer(tiny.model).generate(prompt, 7)
    assert len(expected.output_ids[0]) == 7 and expected.num_decoded == 6
    for one in (named[0], *build_patched_peers(["hybrid"], tiny.model, tiny.processor)):
        run = one.generate(prompt, 7)
        assert run.output_ids == expected.output_ids and run.num_decoded == 6
        assert 0 < run.ttft_s < run.total_s and run.decode_s > 0
    exports.close()


def test_rows_end_at_the_end_token() -> None:
    assert cut_rows(torch.tensor([[4, 2, 0], [4, 5, 6]]), (2,)) == [[4, 2], [4, 5, 6]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama.cpp", "llama.cpp-lookup", "openvino", "openvino-lookup", "vllm", "vllm-lookup"]
)
def test_real_engines_give_the_same_tokens(name: str, tiny: Captioner, inputs: dict[str, Any]) -> None:
    exports = Exports(tiny.model, tiny.processor.tokenizer)
    [engine] = build_peers([name], tiny.model, exports)
    try:
        if (reason := engine.unavailable_reason()) is not None:
            pytest.skip(reason)
        engine.start()
        ids = torch.randint(5, 380, (1, 30), generator=torch.Generator().manual_seed(0))
        prompts = [PeerPrompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ())]
        if engine.reads == EMBEDDINGS:
            prompts.append(PeerPrompt(inputs, (), True, prompt_embeddings(tiny.model, inputs)))
        for prompt in prompts:
            expected = baseline_peer(tiny.model).generate(prompt, 30)
            ends = PeerPrompt(prompt.inputs, (expected.output_ids[0][-1],), prompt.has_media, prompt.embeddings)
            assert engine.generate(prompt, 30).output_ids == expected.output_ids
            assert engine.generate(ends, 30).output_ids == baseline_peer(tiny.model).generate(ends, 30).output_ids
    finally:
        engine.close()
        exports.close()
