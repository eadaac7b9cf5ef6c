"""LLaVA models with random weights: for tests, for the demo, for trying a command before a download.

Their text is noise, everything else is real: a CLIP tower, a Llama with grouped-query attention, a processor and
a tokenizer that load with the Auto classes. The same size and seed give the same weights. Knows nothing of mmspec.
"""

from __future__ import annotations

from itertools import product
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


SIZES = ("tiny",)
"""Names of random models."""
VOCAB_SIZE, POSITIONS, IMAGE_SIZE, PATCH_SIZE = 384, 4096, 32, 8


def build_vocabulary() -> list[str]:
    """The tokens: special ones, letters, some English words, then syllables: ba, be, bi, ..."""
    syllables = ("".join(pair) for pair in product("bdfgklmnprstvz", "aeiou"))
    syllables = (first + second for first, second in product(list(syllables), repeat=2))
    words = dict.fromkeys([*SPECIAL, *LETTERS, *(f"Ġ{word}" for word in (*WORDS, *syllables))])
    return list(words)[:VOCAB_SIZE]


def _tokenizer() -> PreTrainedTokenizerFast:
    """A BPE tokenizer: whole words of the vocabulary are tokens, everything else is spelled in letters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {token: number for number, token in enumerate(build_vocabulary())}
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
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
    )


def _processor() -> ProcessorMixin:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    edge = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    images = CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=edge)
    return LlavaProcessor(
        images,
        _tokenizer(),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def _config() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    tokens = (IMAGE_SIZE // PATCH_SIZE) ** 2
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
    """The random model `size` ("tiny") and its processor, in memory; torch's generators stay as they are."""
    import torch
    from transformers import LlavaForConditionalGeneration

    if size not in SIZES:
        raise ValueError(f"random models are {', '.join(SIZES)}; got {size!r}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not `torch.manual_seed`, which seeds GPUs as well
        model = LlavaForConditionalGeneration(_config())
    _init_weights(model, seed)
    ids = model.generation_config
    ids.pad_token_id, ids.bos_token_id, ids.eos_token_id = 0, 1, 2
    return model.eval(), _processor()
