"""LLaVA models with random weights: for tests, for the demo, for trying a command before a download.

Their text is noise, everything else is real: a CLIP tower, a Llama with grouped-query attention, a processor and
a tokenizer that load with the Auto classes. The same size and seed give the same weights. Knows nothing of mmspec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'\"-()ĠĊ"  # Ġ and Ċ: space and line feed, as GPT-2 spells bytes
_WORDS = """user assistant describe the image this picture what is in it a an of on and with to one two
short long detailed caption write please answer question list count name colour color how many which who where why are
do you see there does man woman child dog cat car tree house street red green blue black white left right"""
WORDS = _WORDS.split()
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{{ '\n' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ ' ' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True)
class ModelSize:
    """Shape of a random model."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    image: int
    patch: int
    vision_hidden: int
    vision_layers: int
    positions: int = 4096


SIZES = {
    "tiny": ModelSize(384, 64, 2, 4, 2, 128, 32, 8, 32, 2),
    "mid": ModelSize(8192, 576, 12, 9, 3, 1536, 112, 14, 192, 4),
}


def _syllables() -> Iterator[str]:
    """Words of two or three random syllables: baba, babe, babi, ..."""
    parts = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    for first, second, third in product(["", *parts], parts, parts):
        yield first + second + third


def build_vocabulary(size: int) -> list[str]:
    """The tokens of a model with `size` ids: special ones, letters, some English words, then syllables."""
    tokens = [*SPECIAL, *LETTERS, *(f"Ġ{word}" for word in WORDS)]
    known = set(tokens)
    for word in _syllables():
        if len(tokens) == size:
            return tokens
        if f"Ġ{word}" not in known:
            tokens.append(f"Ġ{word}")
    raise ValueError(f"a random model has {len(known)} to {len(tokens)} tokens; got size {size}")


def _tokenizer(size: ModelSize) -> PreTrainedTokenizerFast:
    """A BPE tokenizer: whole words of the vocabulary are tokens, everything else is spelled in letters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {token: number for number, token in enumerate(build_vocabulary(size.vocab))}
    backend = Tokenizer(models.BPE(tokens, [], unk_token="<unk>", ignore_merges=True))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        padding_side="left",
        model_max_length=size.positions,
        model_input_names=["input_ids", "attention_mask"],
    )


def _processor(size: ModelSize) -> ProcessorMixin:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    edge = {"height": size.image, "width": size.image}
    images = CLIPImageProcessorPil(size={"shortest_edge": size.image}, crop_size=edge)
    return LlavaProcessor(
        images,
        _tokenizer(size),
        patch_size=size.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def _config(size: ModelSize) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=size.vision_hidden,
        intermediate_size=2 * size.vision_hidden,
        num_hidden_layers=size.vision_layers,
        num_attention_heads=4,
        image_size=size.image,
        patch_size=size.patch,
    )
    text = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    tokens = (size.image // size.patch) ** 2
    return LlavaConfig(vision_config=vision, text_config=text, image_token_index=4, image_seq_length=tokens)


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
    """The random model `size` ("tiny" or "mid") and its processor, in memory; torch's generators stay as they are."""
    import torch
    from transformers import LlavaForConditionalGeneration

    if size not in SIZES:
        raise ValueError(f"random models are {', '.join(SIZES)}; got {size!r}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not `torch.manual_seed`, which seeds GPUs as well
        model = LlavaForConditionalGeneration(_config(SIZES[size]))
    _init_weights(model, seed)
    ids = model.generation_config
    ids.pad_token_id, ids.bos_token_id, ids.eos_token_id = 0, 1, 2
    return model.eval(), _processor(SIZES[size])


def tiny_model(folder: str | Path, seed: int = 0) -> Path:
    """Save the tiny random model and its processor into `folder`, as from a download; returns the folder."""
    model, processor = random_model("tiny", seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Path(folder)
