"""Greedy decoding in vLLM with a draft head, run by a Python that has vLLM: one JSON object in, one out (last line).

    python tests/helpers/vllm_serve.py request.json

The request has `model` and `draft` (folders), `method`, `num_tokens` (drafts per round; 0 for none), `max_new_tokens`,
`eos_id`, and `prompts` (lists of token ids). The answer has `outputs`, `drafts` and `accepted`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Decode all prompts, one at a time."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if request["num_tokens"]:
        options["speculative_config"] = {
            "method": request["method"],
            "model": request["draft"],
            "num_speculative_tokens": request["num_tokens"],
        }
    llm = LLM(
        request["model"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **options,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=request["max_new_tokens"], stop_token_ids=[request["eos_id"]], detokenize=False
    )
    outputs = []
    for ids in request["prompts"]:
        (answer,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        outputs.append(list(answer.outputs[0].token_ids))
    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    drafts, accepted = (counts.get(f"vllm:spec_decode_num_{name}") for name in ("drafts", "accepted_tokens"))
    return {"outputs": outputs, "drafts": drafts, "accepted": accepted}


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    print(json.dumps(serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
