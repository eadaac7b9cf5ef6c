"""LLaVA models with random weights: for tests, for the demo, for trying a command before a download.

Their text is noise, everything else is real: a CLIP tower, a Llama with grouped-query attention, a processor and
a tokenizer that load with the Auto classes. The same size and seed give the same weights. Knows nothing of mmspec.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

SIZES = ("tiny",)
"""Names of random models."""
FOLDER = Path(__file__).parent / "tiny"
"""Configuration, processor and tokenizer: letters, some English words and syllables; all else is spelled in letters."""


def _init_weights(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that the image and every earlier token change the next one."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.ndim < 2:
            continue
        gain = 2.0 if any(part in name for part in ("lm_head", "q_proj", "k_proj")) else 1.0
        scale = 1.0 if "embed_tokens" in name else gain / weight[0].numel() ** 0.5
        with torch.no_grad():
            weight.copy_(scale * torch.randn(weight.shape, generator=rng))


def random_model(size: str = "tiny", seed: int = 0) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The random model `size` ("tiny") and its processor, in memory; torch's generators stay as they are."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    if size not in SIZES:
        raise ValueError(f"random models are {', '.join(SIZES)}; got {size!r}")
    config = AutoConfig.from_pretrained(FOLDER)
    config._name_or_path = ""  # nobody needs to know the folder
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not `torch.manual_seed`, which seeds GPUs as well
        model = AutoModelForImageTextToText.from_config(config)
    _init_weights(model, seed)
    ids = model.generation_config
    ids.pad_token_id, ids.bos_token_id, ids.eos_token_id = 0, 1, 2
    return model.eval(), AutoProcessor.from_pretrained(FOLDER, local_files_only=True, backend="pil")
