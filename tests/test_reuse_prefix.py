"""`reuse_prefix`: a call that begins like an earlier one computes the rest of its prompt; the tokens are the same."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import tiny_models as tiny
import torch
import zoo
from parity import get_model, speculate
from recorded_rounds import recording
from recorders import record_nothing
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import mmspec
from mmspec.engine.prefix import Prefix, PrefixStore, PromptRows
from mmspec.targets.prompt_rows import media_digests

Inputs = dict[str, Any]
FEW = (
    "llava",
    "llava_next",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3",
    "gemma4",
    "idefics3",
    "mistral3",
    "llama",
)
WHOLE = {"paligemma", "ovis2"}
"""Model types that a forward behind a prefix does not serve: the one reads its prompt whole, the other its pictures."""


def ask(model: PreTrainedModel, inputs: Inputs, **kwargs: Any) -> Tensor:
    """Tokens of a greedy call of fixed length."""
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None} | kwargs
    torch.manual_seed(3)
    return model.generate(**inputs, **options)


def ask_plain(model: PreTrainedModel, inputs: Inputs, **kwargs: Any) -> Tensor:
    """The same, of the model itself."""
    with mmspec.disabled(model):
        return ask(model, inputs, **kwargs)


def prompts(model: PreTrainedModel, batch: int = 1, count: int = 4, images: int = 1, ends: int = 4) -> list[Inputs]:
    """Prompts that differ in their last tokens only."""
    has_images = tiny.special_ids(model.tiny_spec).image is not None
    counts = [images] * batch if has_images else None
    first = tiny.build_inputs(model, 5, batch, images=counts, num_text_tokens=(40, 60))
    text = tiny.special_ids(model.tiny_spec).text
    found = []
    for number in range(count):
        inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in first.items()}
        inputs["input_ids"][:, -ends:] = torch.tensor([text[(number * 7 + step) % 30] for step in range(ends)])
        found.append(inputs)
    return found


def media_ids(model: PreTrainedModel) -> list[int]:
    """Placeholders of pictures and clips."""
    from mmspec.targets.registry import find_adapter

    return list(find_adapter(model).media_token_ids)


def reused(model: PreTrainedModel) -> int:
    """Positions that the last call took from earlier ones."""
    return mmspec.stats(model, last=True).reused_positions


def check_family(family: str) -> None:
    """Three questions about one picture: computed, compared, reused."""
    model = get_model(family)
    questions = prompts(model, 1)
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        counts = []
        for inputs in questions:
            assert torch.equal(ask(model, inputs), ask_plain(model, inputs)), family
            if mmspec.stats(model, last=True).fallback_reason is not None:
                return  # transformers alone decodes such a model
            counts.append(reused(model))
    is_served = family not in WHOLE and not zoo_is_recurrent(model)  # whose prompts serve as a whole
    assert counts[:2] == [0, 0] and (min(counts[2:]) > 0) is is_served, (family, counts)


def zoo_is_recurrent(model: PreTrainedModel) -> bool:
    """Whether layers of the model keep a state in place of keys and values."""
    from mmspec.targets.hf import HFTarget
    from mmspec.targets.recurrent import target_class
    from mmspec.targets.registry import find_adapter

    return target_class(find_adapter(model)) is not HFTarget


@pytest.mark.parametrize("family", FEW)
def test_another_question_about_a_picture(family: str) -> None:
    check_family(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in zoo.ROWS if name not in FEW])
def test_another_question_in_every_family(family: str) -> None:
    check_family(family)


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_padded_batches(family: str, repeats: int) -> None:
    model = get_model(family)
    options: Inputs = {"num_return_sequences": repeats, "do_sample": repeats > 1}
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        for number, inputs in enumerate(prompts(model, 3)):
            assert torch.equal(ask(model, inputs, **options), ask_plain(model, inputs, **options))
            assert (reused(model) > 0) is (number >= 2)


@pytest.mark.every(2)
@pytest.mark.parametrize("backend", ["torch", "c", "auto"])
@pytest.mark.parametrize("drafter", ["none", "hybrid", "self"])
def test_drafters_and_backends(drafter: str, backend: str) -> None:
    model = get_model("llava")
    with speculate(model, drafter, tree_size=None, reuse_prefix=True, backend=backend):
        for number, inputs in enumerate(prompts(model)):
            assert torch.equal(ask(model, inputs, max_new_tokens=20), ask_plain(model, inputs, max_new_tokens=20))
            assert (reused(model) > 0) is (number >= 2)


def test_a_draft_head_gets_all_hidden_states() -> None:
    from PIL import Image

    from mmspec.app.scenes import examples, load_scenes_model

    model, processor = load_scenes_model()
    image = Image.open(next(file for file in examples.list_example_files() if file.suffix == ".png"))
    prompts_of: dict[str, Inputs] = {}
    for question in ("Describe the image.", "How many things are there?"):
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        prompts_of[question] = processor(images=image, text=text, return_tensors="pt")
    plain = {question: ask(model, inputs, max_new_tokens=30) for question, inputs in prompts_of.items()}
    taus: list[list[float]] = []
    for reuse in (False, True):
        mmspec.patch(model, "msd", processor=processor, reuse_prefix=reuse, tree_size=8)
        taus.append([])
        for question in ("Describe the image.", "How many things are there?", "Describe the image."):
            assert torch.equal(ask(model, prompts_of[question], max_new_tokens=30), plain[question])
            taus[-1].append(mmspec.stats(model, last=True).tau)
        assert (reused(model) > 100) is reuse
        mmspec.unpatch(model)
    assert taus[0] == taus[1]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_the_next_turn_of_a_chat(family: str) -> None:
    """The picture is given again, as a chat template does; the answer is part of the prompt."""
    model = get_model(family)
    no_picture: Inputs = {"suppress_tokens": media_ids(model)}  # which would begin another
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        first, second, *_ = prompts(model)
        for inputs in (first, second):
            ask(model, inputs)  # the comparison is done
        inputs, lengths = second, []
        for turn in range(3):
            answer = ask(model, inputs, **no_picture)
            assert torch.equal(answer, ask_plain(model, inputs, **no_picture))
            lengths.append(reused(model))
            inputs = longer(model, inputs, answer, turn)
        assert lengths[0] < lengths[1] < lengths[2]


def longer(model: PreTrainedModel, inputs: Inputs, answer: Tensor, turn: int) -> Inputs:
    """The prompt of the next turn: the last one, the answer and a few tokens."""
    text = torch.tensor([tiny.special_ids(model.tiny_spec).text[turn : turn + 5]]).expand(len(answer), -1)
    ids = torch.cat([answer, text], 1)
    return {
        **inputs,
        "input_ids": ids,
        **{
            name: torch.cat([old, old.new_full((len(ids), ids.shape[1] - old.shape[1]), name == "attention_mask")], 1)
            for name in ("attention_mask", "mm_token_type_ids")
            if (old := inputs.get(name)) is not None
        },
    }


@pytest.mark.every(2)
@pytest.mark.parametrize(("batch", "recorded"), [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("family", [name for name in ("qwen3_5", "lfm2_vl") if name in zoo.ROWS])
def test_the_next_turn_with_recurrent_layers(family: str, batch: int, recorded: bool) -> None:
    """The states behind a prompt serve prompts that go on there, also of rows of different length, and no others."""
    model = get_model(family)
    no_picture: Inputs = {"suppress_tokens": media_ids(model)}
    first, other, *_ = prompts(model, batch)
    inputs, lengths = first, []
    records = recording(record_nothing) if recorded else nullcontext()
    with records, speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        for turn in range(4):
            answer = ask(model, inputs, **no_picture)
            assert torch.equal(answer, ask_plain(model, inputs, **no_picture))
            lengths.append(reused(model))
            inputs = longer(model, inputs, answer, turn)
        ask(model, other, **no_picture)
        assert lengths[:2] == [0, 0] and 0 < lengths[2] < lengths[3] and reused(model) == 0


def scale(tensor: Tensor) -> None:
    """Change numbers, but not their place or version counter."""
    tensor.data.mul_(1.5)


def flip(tensor: Tensor) -> None:
    """Change the order of numbers, and nothing that a sum or a counter tells."""
    tensor.data.copy_(torch.arange(len(tensor)) + 1.0)
    tensor.data.copy_(tensor.data.flip(0))


CHANGES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "a weight, in place": lambda model: scale(model.get_output_embeddings().weight),
    "a weight of the vision tower": lambda model: scale(next(model.model.vision_tower.parameters())),
    "a module": lambda model: setattr(model, "lm_head", copy.deepcopy(model.lm_head)),
    "the order of a vector": lambda model: flip(model.model.language_model.norm.weight),
    "a config": lambda model: setattr(model.config.text_config, "unknown", 1),
    "a number in a table": lambda model: model.config.text_config.rope_parameters.update(rope_theta=50.0),
    "a number": lambda model: setattr(model.model.language_model.layers[0].self_attn, "scaling", 0.01),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_computes_anew(change: str) -> None:
    model = copy.deepcopy(get_model("llava"))
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        questions = prompts(model)
        for inputs in questions:
            ask(model, inputs)
        assert reused(model) > 0
        CHANGES[change](model)
        assert torch.equal(ask(model, questions[0]), ask_plain(model, questions[0])) and reused(model) == 0


@pytest.mark.parametrize("family", ["llama", "llava"])
def test_a_mask_that_is_inferred_shares_nothing(family: str) -> None:
    """Without one transformers masks padding ids within the text, which a mask of ones does not."""
    model = get_model(family)
    inputs = prompts(model, count=1)[0]
    inputs["input_ids"][0, -20:-16] = tiny.special_ids(model.tiny_spec).pad
    without = {name: value for name, value in inputs.items() if name != "attention_mask"}
    whole = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        for given in (without, without, without, whole, whole, whole, without):
            assert torch.equal(ask(model, given), ask_plain(model, given))
            assert given is whole or reused(model) == 0
    assert not torch.equal(ask(model, without), ask(model, whole))


@pytest.mark.parametrize("factor", [2, 0.5, -1])
def test_a_mask_of_other_numbers_shares_nothing(factor: float) -> None:
    """Transformers sums the mask up to position ids."""
    model = get_model("llama")
    inputs = prompts(model, count=1)[0]
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        for mask in (1, 1, 1, factor, factor, 1):
            given = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"]) * mask}
            assert torch.equal(ask(model, given), ask_plain(model, given))
            assert mask == 1 or reused(model) == 0


def test_replaced_operators_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others than those of torch, as packages of attention kernels put them there."""
    model, original = get_model("llama"), torch.nn.functional.scaled_dot_product_attention
    inputs = prompts(model, count=1)[0]
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        for _ in range(3):
            ask(model, inputs)
        assert reused(model) > 0
        with monkeypatch.context() as patched:
            patched.setattr(
                torch.nn.functional,
                "scaled_dot_product_attention",
                lambda query, *args, **kwargs: original(9 * query, *args, **kwargs),
            )
            assert torch.equal(ask(model, inputs), ask_plain(model, inputs)) and reused(model) == 0
        assert torch.equal(ask(model, inputs), ask_plain(model, inputs)) and reused(model) > 0


@pytest.mark.parametrize(
    ("family", "attention"), [("llava", "sdpa"), ("gemma3", "sdpa"), ("exaone4_5", "sdpa"), ("gemma3", "eager")]
)
def test_returned_caches(family: str, attention: str) -> None:
    """Keys and values at the padding, too, and between paddings of different length. With eager attention those at the
    padding depend on the whole prompt, so that nothing is shared."""
    model = get_model(family, attention=attention)
    pad = tiny.special_ids(model.tiny_spec).pad
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        for number, inputs in enumerate(prompts(model, 1)):
            padded = {**inputs}
            width = (3, 3, 3, 1)[number]
            for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
                if name in inputs:
                    fill = pad if name == "input_ids" else 0
                    padded[name] = torch.nn.functional.pad(inputs[name], (width, 0), value=fill)
            found = [one(model, padded, return_dict_in_generate=True) for one in (ask_plain, ask)]
            assert torch.equal(found[0].sequences, found[1].sequences)
            for expected, seen in zip(*(one.past_key_values.layers for one in found), strict=True):
                torch.testing.assert_close(seen.keys, expected.keys, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(seen.values, expected.values, atol=1e-4, rtol=1e-4)
            assert (reused(model) > 0) is (number == 2 and attention == "sdpa")


def test_another_picture_shares_nothing() -> None:
    model = get_model("llava")
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        questions = prompts(model)
        for number in range(5):
            inputs = {**questions[number % 4], "pixel_values": questions[0]["pixel_values"] + number}
            assert torch.equal(ask(model, inputs), ask_plain(model, inputs))
            assert reused(model) == 0


def test_scopes_share_nothing() -> None:
    model = get_model("llava")
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        questions = prompts(model)
        for inputs in questions[:3]:
            ask(model, inputs, mmspec={"reuse_prefix": "one"})
        assert reused(model) > 0
        ask(model, questions[3], mmspec={"reuse_prefix": "two"})
        assert reused(model) == 0
        ask(model, questions[3])
        assert reused(model) == 0
        ask(model, questions[3], mmspec={"reuse_prefix": "one"})
        assert reused(model) > 0
        ask(model, questions[3], mmspec={"reuse_prefix": False})
        assert reused(model) == 0


class Kept(BaseStreamer):
    """Collects what it is given."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.values.append([])


@pytest.mark.parametrize("with_streamer", [False, True])
def test_a_call_that_transformers_must_decode_gets_its_pictures(with_streamer: bool) -> None:
    model = mmspec.patch(copy.deepcopy(get_model("llava")), "hybrid", reuse_prefix=True)
    questions = prompts(model)
    for inputs in questions[:3]:
        ask(model, inputs)
    streamers = [Kept(), Kept()] if with_streamer else [None, None]
    options: Inputs = {"cache_implementation": "static"}
    plain = ask_plain(model, questions[3], streamer=streamers[0], **options)
    assert torch.equal(ask(model, questions[3], streamer=streamers[1], **options), plain)
    assert mmspec.stats(model, last=True).fallback_reason
    if with_streamer:
        assert streamers[0].values == streamers[1].values  # type: ignore[union-attr]


def test_a_streamed_call_and_threads() -> None:
    model = get_model("llava")
    questions = prompts(model, count=6)
    plain = [ask(model, inputs) for inputs in questions]
    found: dict[int, Tensor] = {}
    with speculate(model, "hybrid", tree_size=None, reuse_prefix=True):
        ask(model, questions[0])

        def run(number: int) -> None:
            found[number] = ask(model, questions[number], streamer=Kept())

        threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[number], plain[number]) for number in range(6))


@pytest.mark.parametrize("value", [1, None, ["a"]])
def test_a_bad_value(value: Any) -> None:
    with pytest.raises(TypeError, match="reuse_prefix must be True, False or the name of a scope"):
        mmspec.patch(get_model("llava"), reuse_prefix=value)


# the store


def a_cache(rows: PromptRows, num_new: int = 0) -> Any:
    """Keys and values that say where they are."""
    from mmspec.engine.kv_cache import RaggedKVCache

    batch, length = rows.tokens.shape[:2]
    cache = RaggedKVCache(batch, 100)
    cache.begin_forward(length + num_new)
    keys = torch.arange(length + num_new).float()[None, None, :, None].expand(batch, 2, -1, 4).clone()
    cache.write(0, keys, -keys)
    cache.advance(length + num_new)
    return cache


def some_rows(tokens: list[list[int]], digests: list[bytes] | None = None) -> PromptRows:
    """Prompts with -1 for padding and 99 for pictures."""
    ids = torch.tensor(tokens)
    columns = torch.stack([ids, (ids >= 0).long()], -1)
    return PromptRows(columns, ids == 99, digests or [b""] * len(ids), torch.tensor([[0, 1]] * len(ids)))


def test_a_prefix_of_ragged_rows() -> None:
    """Rows serve those with the same padding, whose keys at the padding are the same, too."""
    store, text = PrefixStore(), list(range(30))
    for row in ([-1, *text], [50, *text]):
        rows = some_rows([row])
        store.add(rows, rows.tokens[..., 0], a_cache(rows), {})
    found = store.find(some_rows([[-1, *text[:25], 77, 78], [50, *text[:25], 79, 80]]))
    assert isinstance(found, Prefix) and found.length == 26
    keys, values = found.layers[0]
    assert keys.shape == (2, 2, 26, 4) and torch.equal(values, -keys)
    assert keys[0, 0, :, 0].tolist() == keys[1, 0, :, 0].tolist() == [*range(26)]
    assert store.find(some_rows([[*text[:25], 77, 78]])) is None


@pytest.mark.parametrize(("digest", "expected"), [(b"same", 29), (b"other", 0)])
def test_pictures_are_compared(digest: bytes, expected: int) -> None:
    store, row = PrefixStore(), [*range(20), 99, 99, *range(20, 30)]
    rows = some_rows([row], digests=[b"same"])
    store.add(rows, rows.tokens[..., 0], a_cache(rows), {})
    found = store.find(some_rows([[*row[:29], 7, 8, 9]], digests=[digest]))
    assert (0 if found is None else found.length) == expected
    assert store.find(some_rows([[*row[:29], 99, 8, 9]], digests=[b"same"])) is None, "more placeholders"


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    rows = [some_rows([[start, *range(40)]]) for start in range(5)]
    store = PrefixStore()
    store.add(rows[0], rows[0].tokens[..., 0], a_cache(rows[0]), {})
    store = PrefixStore(max_bytes=3 * store.nbytes)
    for number, one in enumerate(rows):
        store.add(one, one.tokens[..., 0], a_cache(one), {})
        assert store.nbytes <= store.max_bytes
        if number == 2:
            assert store.find(rows[0]) is not None
    assert store.find(rows[1]) is None and store.find(rows[0]) is not None


def test_a_longer_row_takes_the_place_of_its_beginning() -> None:
    store, rows = PrefixStore(), some_rows([list(range(30))])
    for num_new in (0, 4):
        sequences = torch.arange(30 + num_new)[None]
        store.add(rows, sequences, a_cache(rows, num_new), {})
    assert len(store.rows) == 1 and len(store.rows[0].tokens) == 34


def test_states_serve_what_goes_on_where_they_end() -> None:
    """Neither a part of the prompt nor the prompt itself, whose last token must be computed; their memory counts."""
    store, text, states = PrefixStore(), list(range(30)), {("layer", 0): torch.ones(1, 2, 3)}
    rows = some_rows([text])
    store.add(rows, torch.tensor([[*text, 40, 41]]), a_cache(rows, 2), {})
    (without,) = store.rows
    store.clear()
    for _ in range(2):
        store.add(rows, torch.tensor([[*text, 40, 41]]), a_cache(rows, 2), {}, recurrent=states)
    (row,) = store.rows
    assert len(row.tokens) == 30 and row.nbytes == without.nbytes * 30 // 32 + 24
    assert store.find(rows) is None and store.find(some_rows([[*text[:29], 77, 78]])) is None
    found = store.find(some_rows([[*text, 77]]))
    assert found is not None and found.length == 30 and torch.equal(found.recurrent["layer", 0], torch.ones(1, 2, 3))
    assert found.repeated(3).recurrent["layer", 0].shape == (3, 2, 3)
    longer_rows = some_rows([[*text, 77]])
    store.add(longer_rows, longer_rows.tokens[..., 0], a_cache(longer_rows), {}, recurrent=states)
    assert len(store.rows) == 2, "each has states that the other does not have"
    assert store.find(some_rows([[*text, 77, 70], [*text, 77, 71]])) is not None
    assert store.find(some_rows([[*text, 77, 70], [*text, 78, 70]])) is None, "rows that end at two columns"


def test_which_row_has_which_picture() -> None:
    is_media = torch.tensor([[True, False], [True, True]])
    pixels = torch.arange(8.0).view(2, 4)
    one, two = media_digests({"pixel_values": pixels}, is_media) or []
    assert one != two and media_digests({"pixel_values": pixels[1:]}, is_media[1:]) == [two]
    assert media_digests({"pixel_values": pixels[1:].view(1, 2, 2)}, is_media[1:]) != [two]  # shapes count
    assert media_digests({"pixel_values": torch.zeros(3, 4)}, is_media) is None
    assert media_digests({"pixel_values": pixels}, torch.tensor([[True, True], [False, False]])) is None
    patches, grid = torch.arange(10.0).view(10, 1), torch.tensor([[1, 2, 2], [1, 2, 3]])
    first, second = media_digests({"pixel_values": patches, "image_grid_thw": grid}, is_media) or []
    changed = patches.clone()
    changed[5] = 77
    again = media_digests({"pixel_values": changed, "image_grid_thw": grid}, is_media) or []
    assert again[0] == first and again[1] != second
    assert media_digests({}, is_media) == [b"", b""]
    encoded = [{"image": {"pooler_output": [pixels[:1]], "hidden_states": None}} for _ in range(2)]
    alone = [media_digests({"mm_encoder_outputs": one}, is_media[:1]) for one in (*encoded, {"image": [pixels[1:]]})]
    assert (
        alone[0] == alone[1] != alone[2] and media_digests({"mm_encoder_outputs": {"image": "?"}}, is_media[:1]) is None
    )
    assert media_digests({"mm_encoder_outputs": encoded[0]}, is_media) is None
