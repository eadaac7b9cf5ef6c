"""An engine in a process of its own, fed over a pipe: `PYTHON worker.py ENGINE`. Imports nothing of mmspec.

One JSON object per line on standard input, one per line back on standard output:

    {"op": "load", "model": PATH, "threads": 2, "context": 1024, "lookup": 0}   ->  {"engine": "llama.cpp 0.3.36"}
    {"op": "generate", "tokens": [1, 5], "embeddings": null, "max_new_tokens": 64, "eos": [2]}
        ->  {"tokens": [...], "first_tokens": 1, "ttft_s": 0.01, "total_s": 0.5}
    {"op": "steps", "context": 1200, "count": 12}   ->  {"seconds": [0.02, ...]}, steps of one token behind a context
    anything that fails  ->  {"error": "one line"}

`tokens` of an answer end with the end token, if the engine stopped there. Decoding is greedy. `lookup` is the number of
tokens drafted by n-gram matches in the prompt and the output; 0 drafts nothing. `embeddings` is the prompt as little
endian float32 in base64, [len(tokens), D]; `tokens` are then only searched for n-grams.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from typing import Any, TextIO

MAX_NGRAM = 3
"""Longest n-gram of the engines' own prompt lookup."""


class LlamaCpp:
    """llama.cpp through the C functions of llama-cpp-python: batches of ids or of embeddings, greedy.

    Keys and values are float32, like those of transformers, or float16 if `half` asks for it. Prompt lookup:
    `LlamaPromptLookupDecoding` of llama-cpp-python drafts, one forward verifies.
    """

    def __init__(self, model: str, threads: int, context: int, lookup: int, half: bool = False) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.lib, self.num_draft = llama_cpp, lookup
        self.llama = llama_cpp.Llama(
            model,
            n_ctx=context,
            n_batch=context,
            n_ubatch=context,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=llama_cpp.GGML_TYPE_F16 if half else llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F16 if half else llama_cpp.GGML_TYPE_F32,
            verbose=False,
        )
        self.drafter = LlamaPromptLookupDecoding(num_pred_tokens=lookup, max_ngram_size=MAX_NGRAM) if lookup else None
        self.context, self.vocab, self.width = self.llama.ctx, self.llama.n_vocab(), self.llama.n_embd()
        self.version = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
        self.filled = 0  # positions in the cache, of `time_steps`

    def generate(self, tokens: list[int], embeddings: Any, max_new_tokens: int, eos: list[int]) -> dict[str, Any]:
        """Prefill, then one forward per round over the last token and its draft."""
        import numpy as np

        start = time.perf_counter()
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        logits = self._forward(tokens, embeddings, 0, 1)
        output = [int(logits[-1].argmax())]
        first = time.perf_counter()
        while output[-1] not in eos and len(output) < max_new_tokens:
            length = len(tokens) + len(output) - 1
            draft: list[int] = []
            if self.drafter is not None:
                draft = self.drafter(np.array(tokens + output, dtype=np.intc)).tolist()
                draft = draft[: max_new_tokens - len(output) - 1]
            sampled = self._forward([output[-1], *draft], None, length, 1 + len(draft)).argmax(1).tolist()
            accepted = 0
            while accepted < len(draft) and draft[accepted] == sampled[accepted] and sampled[accepted] not in eos:
                accepted += 1
            output += sampled[: accepted + 1]
            self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context), 0, length + accepted + 1, -1)
        end = time.perf_counter()
        return {"tokens": output, "first_tokens": 1, "ttft_s": first - start, "total_s": end - start}

    def time_steps(self, context: int, count: int) -> list[float]:
        """Seconds of `count` forwards of one token each behind `context` positions of the same token."""
        memory = self.lib.llama_get_memory(self.context)
        if context < self.filled and not self.lib.llama_memory_seq_rm(memory, 0, context, -1):
            self.lib.llama_memory_clear(memory, True)  # recurrent states go nowhere else
            self.filled = 0
        if context > self.filled:
            self._forward([1] * (context - self.filled), None, self.filled, 1)
        seconds = []
        for index in range(count):
            start = time.perf_counter()
            self._forward([2], None, context + index, 1).argmax()
            seconds.append(time.perf_counter() - start)
        self.filled = context + count
        return seconds

    def _forward(self, tokens: list[int], embeddings: Any, position: int, num_logits: int) -> Any:
        """Logits [num_logits, V] of the last positions of a batch that starts at `position`."""
        import ctypes

        import numpy as np

        count = len(tokens)
        batch = self.lib.llama_batch_init(count, 0 if embeddings is None else self.width, 1)
        try:
            if embeddings is None:
                for index, token in enumerate(tokens):
                    batch.token[index] = token
            else:
                ctypes.memmove(batch.embd, embeddings.ctypes.data, embeddings.nbytes)
            for index in range(count):
                batch.pos[index] = position + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = index >= count - num_logits
            batch.n_tokens = count
            code = self.lib.llama_decode(self.context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            pointer = self.lib.llama_get_logits(self.context)
            return np.ctypeslib.as_array(pointer, (num_logits, self.vocab))
        finally:
            self.lib.llama_batch_free(batch)


class OpenVino:
    """OpenVINO GenAI's `LLMPipeline` in float32, prompt lookup by its own option."""

    def __init__(self, model: str, threads: int, context: int, lookup: int) -> None:
        import openvino_genai

        self.lib, self.num_draft = openvino_genai, lookup
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        options["KV_CACHE_PRECISION"] = "f32"
        if lookup:
            options["prompt_lookup"] = True
        self.pipeline = openvino_genai.LLMPipeline(model, "CPU", **options)
        self.version = f"OpenVINO GenAI {openvino_genai.__version__}"

    def generate(self, tokens: list[int], embeddings: Any, max_new_tokens: int, eos: list[int]) -> dict[str, Any]:
        """One call of the pipeline; a streamer records the times."""
        import numpy as np
        import openvino

        if embeddings is not None:
            raise ValueError("this engine reads token ids")
        times: list[float] = []
        sizes: list[int] = []
        running = self.lib.StreamingStatus.RUNNING

        class Clock(self.lib.StreamerBase):  # type: ignore[name-defined]
            def write(self, token: Any) -> Any:
                times.append(time.perf_counter())
                sizes.append(len(token) if isinstance(token, list) else 1)
                return running

            def end(self) -> None:
                """Nothing to flush."""

        config = self.lib.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = max_new_tokens, False, False
        config.ignore_eos = not eos
        if eos:
            config.eos_token_id, config.stop_token_ids = eos[0], set(eos)
        if self.num_draft:
            config.num_assistant_tokens, config.max_ngram_size = self.num_draft, MAX_NGRAM
        start = time.perf_counter()
        result = self.pipeline.generate(openvino.Tensor(np.array([tokens], dtype=np.int64)), config, Clock())
        end = time.perf_counter()
        output = list(result.tokens[0])
        if eos and output[-1] not in eos and len(output) < max_new_tokens:
            output.append(eos[0])  # dropped by the pipeline, though a forward computed it
        first = times[0] if times else end
        return {
            "tokens": output,
            "first_tokens": sizes[0] if sizes else 1,
            "ttft_s": first - start,
            "total_s": (times[-1] if times else end) - start,
        }


class Vllm:
    """vLLM's `LLM` in float32, n-gram drafts by its own option; the first token is timed by a call of its own."""

    def __init__(self, model: str, threads: int, context: int, lookup: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm

        self.lib = vllm
        options: dict[str, Any] = {}
        if lookup:
            ngram = {"prompt_lookup_max": MAX_NGRAM, "prompt_lookup_min": 1}
            options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": lookup, **ngram}
        self.engine = vllm.LLM(
            model,
            dtype="float32",
            max_model_len=context,
            max_num_seqs=1,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            **options,
        )
        self.version = f"vLLM {vllm.__version__}"

    def generate(self, tokens: list[int], embeddings: Any, max_new_tokens: int, eos: list[int]) -> dict[str, Any]:
        """Two calls: one token for the time to the first, then all."""
        if embeddings is not None:
            raise ValueError("this engine reads token ids")
        _, ttft_s = self._call(tokens, 1, eos)
        output, total_s = self._call(tokens, max_new_tokens, eos)
        return {"tokens": output, "first_tokens": 1, "ttft_s": ttft_s, "total_s": total_s}

    def _call(self, tokens: list[int], limit: int, eos: list[int]) -> tuple[list[int], float]:
        options = self.lib.SamplingParams(
            temperature=0, max_tokens=limit, stop_token_ids=eos, ignore_eos=not eos, detokenize=False
        )
        start = time.perf_counter()
        [result] = self.engine.generate([{"prompt_token_ids": tokens}], options, use_tqdm=False)
        return list(result.outputs[0].token_ids), time.perf_counter() - start


WORKER_ENGINES = {"llama.cpp": LlamaCpp, "openvino": OpenVino, "vllm": Vllm}


def _embeddings(text: str | None, rows: int) -> Any:
    if text is None:
        return None
    import numpy as np

    return np.frombuffer(base64.b64decode(text), dtype="<f4").reshape(rows, -1).copy()


def _answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    if "count" in request:
        return {"seconds": engine.time_steps(**request)}
    tokens = request["tokens"]
    embeddings = _embeddings(request.get("embeddings"), len(tokens))
    answer: dict[str, Any] = engine.generate(tokens, embeddings, request["max_new_tokens"], request["eos"])
    return answer


def serve_engine(name: str, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until the pipe is closed."""
    engine: Any = None
    for line in requests:
        try:
            request = json.loads(line)
            if request.pop("op") == "load":
                engine = WORKER_ENGINES[name](**request)
                reply = {"engine": engine.version}
            else:
                reply = _answer(engine, request)
        except Exception as error:  # the other side reports it and goes on
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    """Serve the engine that the command line names; what engines print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve_engine(sys.argv[1], sys.stdin, replies)


if __name__ == "__main__":
    main()
