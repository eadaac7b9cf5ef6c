"""The text weights of a model in the formats of other engines: transformers, OpenVINO (both float32), GGUF.

The text model of a vision-language model is saved as a model of its own. Conversions run in the environment of the
engine, once for each format.
"""

from __future__ import annotations

import copy
import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from research.bench.peers.base import PeerError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GGUF_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types of GGUF files by dtype of the model; F32 else."""
GGUF_WRITER = Path(__file__).with_name("write_gguf.py")
CONVERSION_TIMEOUT_S = 600.0


def text_backbone(model: PreTrainedModel) -> torch.nn.Module:
    """The decoder layers with embeddings and final norm: the language model of a vision-language model, or the base."""
    base = model.base_model
    return getattr(base, "language_model", base)


def save_text_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Save the text model, in float32, with its tokenizer; returns the folder.

    Raises:
        PeerError: transformers has no causal language model for the text config.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    if hasattr(config, "quantization_config"):  # of a GGUF file, whose weights are floats by now
        del config.quantization_config
    head = model.get_output_embeddings().weight
    config.tie_word_embeddings = head is model.get_input_embeddings().weight
    try:
        with torch.device("meta"):
            text: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise PeerError(f"no causal language model for the text model {config.model_type!r}") from error
    prefix = text.base_model_prefix
    weights = {f"{prefix}.{name}": weight for name, weight in text_backbone(model).state_dict().items()}
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = head
    text.load_state_dict({name: weight.detach().float() for name, weight in weights.items()}, strict=False, assign=True)
    if config.tie_word_embeddings:
        text.tie_weights()
    missing = [name for name, weight in text.named_parameters() if weight.is_meta]
    if missing:
        raise PeerError(f"the text model has no weights for {missing[0]}")
    text.generation_config = copy.deepcopy(model.generation_config)
    text.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_rope_theta(folder / "config.json")
    return folder


def _write_rope_theta(file: Path) -> None:
    """Repeat the rotary base where versions of transformers before 5 read it; environments of peers may have one."""
    config = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(rope := config.get("rope_parameters"), dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def prompt_embeddings(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """[L, D]: what the text model reads of a prompt of one row, its images encoded.

    Runs the prompt once and records the argument of the text model.
    """
    found: list[Tensor] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(kwargs["inputs_embeds"][0].detach().clone())

    handle = text_backbone(model).register_forward_pre_hook(record, with_kwargs=True)
    try:
        model(**inputs, use_cache=False)
    finally:
        handle.remove()
    return found[0]


class Exports:
    """Converted weights in a temporary folder; each format is written when it is first needed."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._folder = tempfile.TemporaryDirectory(prefix="mmspec-bench-")
        self._done: dict[str, Path] = {}

    def get(self, model_format: str, python: str) -> Path:
        """Path of the weights in a format: "transformers", "gguf" or "openvino".

        Args:
            python: interpreter of the environment that converts.

        Raises:
            PeerError: the conversion fails.
        """
        if model_format not in self._done:
            root = Path(self._folder.name)
            if model_format == "transformers":
                self._done[model_format] = save_text_model(self._model, self._tokenizer, root / "text")
            else:
                source = self.get("transformers", python)
                target = root / ("text.gguf" if model_format == "gguf" else "openvino")
                _convert(_conversion_command(model_format, python, source, target, self._model.dtype))
                self._done[model_format] = target
        return self._done[model_format]

    def close(self) -> None:
        """Delete the files."""
        self._folder.cleanup()


def _conversion_command(model_format: str, python: str, source: Path, target: Path, dtype: torch.dtype) -> list[str]:
    if model_format == "gguf":
        return [python, str(GGUF_WRITER), str(source), str(target), GGUF_TYPES.get(dtype, "F32")]
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    return [
        python,
        "-m",
        "optimum.commands.optimum_cli",
        "export",
        "openvino",
        "--model",
        str(source),
        *options,
        str(target),
    ]


def _convert(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"the weights cannot be converted: {type(error).__name__}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise PeerError(
            f"the weights cannot be converted: {lines[-1][:250] if lines else f'exit code {done.returncode}'}"
        )
