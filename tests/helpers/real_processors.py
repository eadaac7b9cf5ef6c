"""Small random models of families whose own processors need torchvision, each saved with that processor as a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ["describe the image in detail user assistant system a red ball on the green field " * 5]
TURNS = (
    "{% for m in messages %}START{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}IMAGE{% elif c.type == 'video' %}VIDEO{% elif c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}END\n{% endfor %}{% if add_generation_prompt %}ANSWER{% endif %}"
)
QWEN_PARTS = {
    "START": "<|im_start|>{{ m.role }}\n",
    "IMAGE": "<|vision_start|><|image_pad|><|vision_end|>",
    "VIDEO": "<|vision_start|><|video_pad|><|vision_end|>",
    "END": "<|im_end|>",
    "ANSWER": "<|im_start|>assistant\n",
}
SMOL_PARTS = {
    "START": "<|im_start|>{{ m.role | capitalize }}:",
    "IMAGE": "<image>",
    "VIDEO": "<video>",
    "END": "<end_of_utterance>",
    "ANSWER": "Assistant:",
}


def template(parts: dict[str, str]) -> str:
    """The chat template with a family's own marks."""
    text = TURNS
    for name, mark in parts.items():
        text = text.replace(name, mark)
    return text


def build_tokenizer(special: Sequence[str], eos: str, chat_template: str) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer of 400 ids that knows the special tokens; it pads on the left with the first of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    options = {"eos_token": eos, "pad_token": special[0], "padding_side": "left", "chat_template": chat_template}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def build_qwen(kind: str) -> tuple[Any, Any]:
    """A Qwen2.5-VL or Qwen3-VL of three layers."""
    is_third = kind == "qwen3_vl"
    prefix = "Qwen3VL" if is_third else "Qwen2_5_VL"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|image_pad|>", "<|video_pad|>"]
    chat_template = template(QWEN_PARTS)
    tokenizer = build_tokenizer(special, "<|im_end|>", chat_template)
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    text |= {"rope_parameters": rope | ({"mrope_interleaved": True} if is_third else {})}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 16 if is_third else 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    text |= {"head_dim": 16} if is_third else {}
    vision |= {"deepstack_visual_indexes": [0]} if is_third else {"fullatt_block_indexes": [1]}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    sizes = {"patch_size": vision["patch_size"], "merge_size": 2}
    pixels = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 64}
    videos = transformers.Qwen3VLVideoProcessor if is_third else transformers.Qwen2VLVideoProcessor
    processor = getattr(transformers, f"{prefix}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes, **pixels),
        tokenizer=tokenizer,
        video_processor=videos(**sizes),
        chat_template=chat_template,
    )
    return model, processor


def build_smolvlm() -> tuple[Any, Any]:
    """A SmolVLM of three layers; its processor needs num2words as well."""
    special = ["<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>"]
    special += ["<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
    chat_template = template(SMOL_PARTS)
    tokenizer = build_tokenizer(special, "<end_of_utterance>", chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": special[2:6]})
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 64, "patch_size": 8}
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.SmolVLMConfig(
        text_config=text, vision_config=vision, image_token_id=image, scale_factor=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.SmolVLMForConditionalGeneration(config).eval()
    edge = {"max_image_size": {"longest_edge": 64}}
    processor = transformers.SmolVLMProcessor(
        image_processor=transformers.SmolVLMImageProcessor(size={"longest_edge": 128}, **edge),
        tokenizer=tokenizer,
        video_processor=transformers.SmolVLMVideoProcessor(size={"longest_edge": 64}, **edge),
        image_seq_len=16,
        chat_template=chat_template,
    )
    return model, processor


BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_5_vl": lambda: build_qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: build_qwen("qwen3_vl"),
    "smolvlm": build_smolvlm,
}


def save_model(kind: str, folder: Path) -> Path:
    """Build a model and its processor and save both in `folder`."""
    model, processor = BUILDERS[kind]()
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
