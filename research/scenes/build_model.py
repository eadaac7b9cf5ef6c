"""The untrained scenes model: stock LLaVA classes of transformers, processor, chat template and fast tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mmspec.app.scenes.world import SCENE_IMAGE_SIZE

if TYPE_CHECKING:
    from transformers import (
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
    )

PATCH_SIZE = 16
"""Edge of a vision patch in pixels."""
GRID_SIZE = SCENE_IMAGE_SIZE // PATCH_SIZE
NUM_VISUAL_TOKENS = GRID_SIZE * GRID_SIZE
"""Visual tokens of one image."""
VOCAB_SIZE = 1536
NUM_LOWER_LAYERS = 5
"""Text layers in use in the early stages; the layers above start as identity."""
SCENES_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID, _UNK, IMAGE_TOKEN_ID = range(len(SCENES_SPECIAL_TOKENS))
SCENES_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ 'USER: ' if message['role'] == 'user' else 'ASSISTANT:' }}"
    "{% if message['content'] is string %}{{ ' ' if message['role'] != 'user' else '' }}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ ' ' if message['role'] != 'user' else '' }}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ eos_token if message['role'] != 'user' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
CHARACTER_SPLIT_PATTERN = "[A-Z0-9](?=[A-Z0-9])|(?<=[A-Z0-9])[A-Z0-9]"
"""Splits capitals and digits into single-character tokens, so that the model spells a sign instead of recalling it."""


def format_prompt(question: str, num_images: int = 1) -> str:
    """Return one question as `SCENES_CHAT_TEMPLATE` formats it, without the BOS token."""
    return f"USER: {'<image>' * num_images}{question} ASSISTANT:"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `VOCAB_SIZE` tokens; padding is on the left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CHARACTER_SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SCENES_SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        model_max_length=4096,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_scenes_processor(tokenizer: PreTrainedTokenizerBase) -> LlavaProcessor:
    """Return the LLaVA processor; images of any size and mode are converted to RGB and stretched to a square."""
    from transformers import LlavaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil(size={"height": SCENE_IMAGE_SIZE, "width": SCENE_IMAGE_SIZE}, do_convert_rgb=True)
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=SCENES_CHAT_TEMPLATE,
    )


def build_scenes_config() -> LlavaConfig:
    """Return the LLaVA config: about 2.4 M parameters of vision tower, 18.5 M of text model."""
    from transformers import LlamaConfig, LlavaConfig, SiglipVisionConfig

    vision = SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=6,
        image_size=SCENE_IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=PAD_TOKEN_ID,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN_ID,
        image_seq_length=NUM_VISUAL_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


def init_scenes_model(seed: int = 0) -> LlavaForConditionalGeneration:
    """Return the model with random weights; torch's global generators are unchanged.

    Args:
        seed: Seed of the weights.
    """
    import torch
    from transformers import LlavaForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = LlavaForConditionalGeneration(build_scenes_config())
    with torch.no_grad():  # the upper layers start as identity
        for layer in model.model.language_model.layers[NUM_LOWER_LAYERS:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    model.generation_config.bos_token_id = BOS_TOKEN_ID
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    return model
