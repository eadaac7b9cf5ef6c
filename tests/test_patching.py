"""Public behaviour of `patch` and `unpatch`: refused arguments, unchanged state, and sharing a model."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import adversarial as adversarial
import numpy as np
import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from PIL import Image
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import mmspec
from mmspec.app.modeling.random_models import random_model
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.interfaces import DrafterRequirements
from mmspec.metrics.stats import Stats
from mmspec.targets.hf import HFTarget

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 10}
FAMILIES = pytest.mark.parametrize("family", tiny.FAMILIES)


@lru_cache
def shared(family: str = "llava") -> PreTrainedModel:
    """A model that tests share."""
    return tiny.build_model(tiny.ModelSpec(family, seed=6))


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """A plain model, unpatched after the test."""
    model = shared()
    yield model
    mmspec.unpatch(model)


def picture(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that `patch` might leave on a model, in a form that can be compared."""
    own = {name: id(value) for name, value in model.__dict__.items()}
    config, options = model.config.to_dict(), model.generation_config.to_dict()
    kernels = {name: getattr(model.config, name)._attn_implementation for name in ("text_config", "vision_config")}
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    return {"own": own, "config": config, "options": options, "kernels": kernels, "hooks": hooks}


# --- patch, unpatch, is_patched ---------------------------------------------------------------------------------------


@FAMILIES
def test_patch_and_unpatch(family: str) -> None:
    model = shared(family)
    given = tiny.build_inputs(model, 1, 2)
    plain = model.generate(**given, **GREEDY)
    before = picture(model)  # behind a call, since transformers hangs its own hooks on in the first one
    assert not mmspec.is_patched(model)
    assert mmspec.patch(model, tree_size=8) is model and mmspec.is_patched(model)
    for _ in range(2):
        assert torch.equal(model.generate(**given, **GREEDY), plain)
    assert mmspec.unpatch(model) is model and not mmspec.is_patched(model)
    assert picture(model) == before
    assert mmspec.unpatch(model) is model and picture(model) == before, "a second unpatch does nothing"
    assert torch.equal(model.generate(**given, **GREEDY), plain)


def test_only_the_instance_is_touched(model: PreTrainedModel) -> None:
    other, own = tiny.build_model(tiny.ModelSpec("llava")), type(model).generate
    mmspec.patch(model)
    assert not mmspec.is_patched(other) and type(other).generate is own
    assert isinstance(model, type(other)) and (type(model).__name__, repr(model)) == (type(other).__name__, repr(other))
    assert set(model.state_dict()) == set(other.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in other.named_modules()]


def test_what_is_not_patched() -> None:
    for thing in (None, "model", 3, object(), nn.Linear(2, 2), shared()):
        assert not mmspec.is_patched(thing) and mmspec.unpatch(thing) is thing


def test_the_same_settings_again_do_nothing(model: PreTrainedModel) -> None:
    drafter = adversarial.BranchingDrafter(1)
    many: list[dict[str, Any]] = [{}, {"drafter": "lookup", "tree_size": 4}]
    for options in (*many, {"drafter": drafter, "reference_ids": [[5, 6, 7]]}):
        mmspec.patch(model, **options)
        model.generate(**tiny.build_inputs(model, 1, 1), **GREEDY)
        before = picture(model)
        assert mmspec.patch(model, **options) is model
        assert picture(model) == before and mmspec.stats(model).calls == 1
        mmspec.unpatch(model)


@pytest.mark.parametrize(
    "other",
    [
        {"drafter": "none"},
        {"drafter": adversarial.BranchingDrafter(1)},
        {"tree_size": 4},
        {"deterministic": True},
        {"reference_ids": [[1]]},
        {"processor": tiny.build_tokenizer(tiny.ModelSpec())},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_settings_are_refused_until_unpatched(model: PreTrainedModel, other: dict[str, Any]) -> None:
    mmspec.patch(model, drafter="lookup")
    before = picture(model)
    with pytest.raises(ValueError, match=r"already patched \(drafter '.*lookup'\); call mmspec\.unpatch\(model\)"):
        mmspec.patch(model, **{"drafter": "lookup", **other})
    assert picture(model) == before
    mmspec.unpatch(model)
    mmspec.patch(model, **{"drafter": "lookup", **other})


def test_signature_name_and_doc_are_kept(model: PreTrainedModel) -> None:
    signature, name, doc = inspect.signature(model.generate), model.generate.__name__, model.generate.__doc__
    mmspec.patch(model)
    assert inspect.signature(model.generate) == signature
    assert model.generate.__name__ == name and model.generate.__doc__ == doc
    assert inspect.ismethod(model.generate) and model.generate.__self__ is model
    assert not hasattr(type(model).generate, "__wrapped__") or type(model).generate.__wrapped__ is not model.generate


def test_arguments_by_position(model: PreTrainedModel) -> None:
    given = tiny.build_inputs(model, 1, 1, images=[0])
    plain = model.generate(given["input_ids"], **GREEDY)
    mmspec.patch(model, tree_size=8)
    assert torch.equal(model.generate(given["input_ids"], **GREEDY), plain)
    assert mmspec.stats(model).calls == 1 and not mmspec.stats(model).fallback_calls


@pytest.mark.parametrize("name", sorted({CACHE_ARGUMENT, "past_key_values"}))
def test_a_cache_is_passed_by_its_present_and_by_its_older_name(model: PreTrainedModel, name: str) -> None:
    """transformers 5.24 renamed the argument and accepts the older name with a warning, as a patched model must."""
    inputs = tiny.build_inputs(model, 1, 1)
    renamed = nullcontext() if name == CACHE_ARGUMENT else pytest.warns(FutureWarning, match="past_key_values")
    outputs = []
    for patched in (False, True):
        cache = DynamicCache(config=model.config.get_text_config())
        if patched:
            mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
        with renamed:
            outputs.append(model.generate(**inputs, **GREEDY, **{name: cache}, return_dict_in_generate=True))
        assert outputs[-1][CACHE_ARGUMENT] is outputs[-1].past_key_values is cache
        assert cache.get_seq_length() == outputs[-1].sequences.shape[1] - 1
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert mmspec.stats(model).fallback_calls == 0


def test_a_patched_model_can_be_freed() -> None:
    model = tiny.build_model(tiny.ModelSpec("llava"))
    mmspec.patch(model)
    model.generate(**tiny.build_inputs(model, 1, 1), **GREEDY)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@FAMILIES
def test_outputs_can_be_used_in_training(family: str) -> None:
    """The loop may run in inference mode; no tensor created in it may reach the caller or stay on the model."""
    model = tiny.build_model(tiny.ModelSpec(family, seed=6))
    given = tiny.build_inputs(model, 1, 2)
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    flags = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for options, chosen in ((GREEDY, {}), (SAMPLED, {}), (GREEDY, {"drafter": "none"})):
        output = model.generate(**given, **flags, **options, mmspec=chosen)
        layers = [part for layer in output.past_key_values.layers for part in (layer.keys, layer.values)]
        for tensor in (output.sequences, *output.scores, *output.logits, *layers):
            assert not tensor.is_inference()
    left = [name for name, part in [*model.named_parameters(), *model.named_buffers()] if part.is_inference()]
    assert not left
    model.train()
    ids = output.sequences
    mask = torch.ones_like(ids)
    rest = {name: part for name, part in given.items() if name not in ("input_ids", "attention_mask")}
    if "mm_token_type_ids" in rest:
        more = ids.shape[1] - given["input_ids"].shape[1]
        rest["mm_token_type_ids"] = nn.functional.pad(rest["mm_token_type_ids"], (0, more))
    model(input_ids=ids, attention_mask=mask, labels=ids, **rest).loss.backward()
    assert model.get_output_embeddings().weight.grad is not None


def test_stats_need_a_patch(model: PreTrainedModel) -> None:
    for thing in (model, None, "model"):
        with pytest.raises(ValueError, match=r"mmspec\.stats needs a patched model; call mmspec\.patch\(model\)"):
            mmspec.stats(thing)
    mmspec.patch(model)
    assert mmspec.stats(model) == mmspec.stats(model, last=True) == Stats()


@pytest.mark.parametrize("said", ["a toy that\nknows nothing", "", 7, None, ["a list"], "\x1b[2Jred", "long " * 200])
def test_stats_say_what_the_model_says_of_itself(
    model: PreTrainedModel, said: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one line, printable, of limited length, and nothing where there is no text."""
    monkeypatch.setattr(model.config, "description", said, raising=False)
    mmspec.patch(model)
    stats = mmspec.stats(model)
    if not isinstance(said, str) or not said:
        assert stats.description is None and "the model" not in str(stats)
        return
    assert stats.description.startswith(("a toy that knows nothing", r"\x1b[2Jred", "long long"))
    assert str(stats).endswith(f"; the model: {stats.description}") and len(stats.description) <= 300
    assert str(stats).isprintable() and stats.as_dict()["description"] == stats.description


# --- what is refused --------------------------------------------------------------------------------------------------


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: "llava",
        object,
        lambda: nn.Linear(2, 2),
        lambda: shared().config,
        dict,
        lambda: shared().model,
    ],
    ids=["none", "name", "object", "module", "config", "dict", "a model that cannot generate"],
)
def test_not_a_model(make: Callable[[], Any]) -> None:
    thing = make()
    before = set(getattr(thing, "__dict__", ()))
    with pytest.raises(TypeError, match=f"that can generate; got {type(thing).__name__}"):
        mmspec.patch(thing)
    assert not mmspec.is_patched(thing) and set(getattr(thing, "__dict__", ())) == before


def test_a_text_model_is_served() -> None:
    model = _llama().eval()
    given = {"input_ids": torch.arange(8, 20)[None], "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**given)
    mmspec.patch(model, "lookup")
    assert torch.equal(model.generate(**given), plain)
    assert not mmspec.stats(model).fallback_reason
    assert set(mmspec.supported()) >= set(tiny.FAMILIES)


class Tapping(adversarial.AdversarialDrafter):
    """Requires hidden states."""

    def __init__(self, *taps: int) -> None:
        super().__init__()
        self.requirements = DrafterRequirements(hidden_state_indices=taps)


class Foreign(adversarial.AdversarialDrafter):
    """For another vocabulary."""

    vocab_size = 7


class Nameless:
    """Not a drafter."""

    name = "nameless"


BAD: dict[str, tuple[dict[str, Any], Any, str]] = {
    "unknown drafter": ({"drafter": "magic"}, ValueError, r"'magic'; known are 'none', 'lookup', 'recycling'"),
    "not a drafter": ({"drafter": Nameless()}, TypeError, r"got Nameless, which has no 'requirements'"),
    "a class": ({"drafter": adversarial.AdversarialDrafter}, TypeError, r"AdversarialDrafter"),
    "vocabulary": ({"drafter": Foreign()}, ValueError, r"for a vocabulary of 7 ids, the model has 120"),
    "taps": ({"drafter": Tapping(0, 2, 3)}, ValueError, r"needs hidden states \[3\]; this model has 0 to 2"),
    "negative taps": ({"drafter": Tapping(-1)}, ValueError, r"needs hidden states \[-1\]"),
    "size 0": ({"tree_size": 0}, ValueError, r"tree_size must be 1 to 64.*got 0"),
    "size 65": ({"tree_size": 65}, ValueError, r"tree_size must be 1 to 64.*got 65"),
    "size 2.5": ({"tree_size": 2.5}, TypeError, r"tree_size.*2\.5"),
    "size as text": ({"tree_size": "8"}, TypeError, r"tree_size.*8"),
    "compressor name": ({"compressor": "magic"}, ValueError, r"'magic'"),
    "compressor": ({"compressor": Nameless()}, TypeError, r"got Nameless"),
    "ids in one list": ({"reference_ids": [1, 2]}, TypeError, r"one list of token ids per prompt.*got \[1, 2\]"),
    "ids of fractions": ({"reference_ids": [[1.5]]}, TypeError, r"one list of token ids per prompt.*got \[\[1\.5\]\]"),
    "ids as text": ({"reference_ids": ["ab"]}, TypeError, r"one list of token ids per prompt.*got \['ab'\]"),
    "no ids": ({"reference_ids": []}, ValueError, r"one list of token ids per prompt.*got \[\]\. Omit it"),
    "reference of ids": ({"reference": [[1, 2]]}, TypeError, r"must be a string.*got \[\[1, 2\]\]\. Pass token ids as"),
    "no references": ({"reference": []}, ValueError, r"must be a string.*got \[\]\. Omit it"),
    "deterministic": ({"deterministic": "yes"}, TypeError, r"must be True .* or False; got 'yes'\. Pass a bool"),
    "backend": ({"backend": "cuda"}, ValueError, r"'auto', 'torch', 'c', 'recorded'; got 'cuda'"),
    "backend of a bool": ({"backend": True}, TypeError, r"backend must be one of 'auto', .*; got True"),
    "reference": ({"reference": "abc"}, ValueError, r"needs the tokenizer: pass processor="),
}


BAD_CALLS: dict[str, tuple[Any, Any, str]] = BAD | {
    "an unknown option": ({"speed": 3}, ValueError, r"takes enabled, drafter, .*; got speed\."),
    "an unknown one of two": ({"node": 3, "tree_size": 4}, ValueError, r"takes enabled, drafter, .*; got node\."),
    **{
        f"{given!r} for options": (given, (TypeError, ValueError), r"generate\(mmspec=\.\.\.\) takes")
        for given in (True, False, "none", 3)
    },
    **{
        f"enabled {value!r}": ({"enabled": value}, TypeError, rf"True or False; got {value!r}\. .*enabled=False")
        for value in ("no", 0, None)
    },
}


def test_unknown_arguments_of_patch_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'node'"):
        mmspec.patch(model, node=4)
    assert not mmspec.is_patched(model)


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_leave_nothing_behind(model: PreTrainedModel, name: str) -> None:
    options, error, message = BAD[name]
    before = picture(model)
    with pytest.raises(error, match=message) as failed:
        mmspec.patch(model, **options)
    assert "\n" not in str(failed.value)
    assert picture(model) == before and not mmspec.is_patched(model)
    mmspec.patch(model)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_settings_of_a_call_leave_nothing_behind(model: PreTrainedModel, name: str) -> None:
    options, error, message = BAD_CALLS[name]
    given = tiny.build_inputs(model, 1, 1)
    plain = model.generate(**given, **GREEDY)
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    before, state = picture(model), torch.get_rng_state()
    with pytest.raises(error, match=message):
        model.generate(**given, **SAMPLED, mmspec=options)
    assert picture(model) == before and torch.equal(torch.get_rng_state(), state)
    assert mmspec.stats(model) == Stats()
    assert torch.equal(model.generate(**given, **GREEDY), plain)


@pytest.mark.parametrize("value", ["a string", [], 5, PreTrainedTokenizerFast, nn.Linear(2, 2)], ids=repr)
def test_not_a_processor(model: PreTrainedModel, value: Any) -> None:
    before = picture(model)
    with pytest.raises(TypeError, match=r"processor must be the model's processor or its tokenizer.* got .*AutoProc"):
        mmspec.patch(model, processor=value)
    assert picture(model) == before and not mmspec.is_patched(model)


@pytest.mark.parametrize("row", [torch.tensor([5, 6]), np.array([5, 6]), (5, 6)], ids=["torch", "numpy", "tuple"])
def test_reference_ids_of_any_integer_type(model: PreTrainedModel, row: Any) -> None:
    mmspec.patch(model, reference_ids=[row])
    assert mmspec.patch(model, reference_ids=[[5, 6]]) is model, "the same settings"


def test_a_reference_of_patch_or_of_a_call(model: PreTrainedModel) -> None:
    tokenizer, seen = tiny.build_tokenizer(tiny.ModelSpec()), list[Any]()
    mmspec.patch(model, "lookup", processor=tokenizer, reference="a b")

    def ids_of(text: str) -> list[int]:
        return [token for form in (text, " " + text) for token in tokenizer(form, add_special_tokens=False).input_ids]

    inputs = tiny.build_inputs(model, 1, 2)
    for options, expected in (
        ({}, [ids_of("a b")] * 2),
        ({"reference": ["c", "d e"]}, [ids_of("c"), ids_of("d e")]),
        ({"reference_ids": [[5, 6]]}, [[5, 6]] * 2),
        ({"reference": "c", "reference_ids": [[5, 6]]}, [ids_of("c")] * 2),
        ({"reference": None}, [[], []]),
        ({}, [ids_of("a b")] * 2),
    ):
        options = {**options, "observers": [lambda one: seen.append(one.prompt.reference_ids)]}
        model.generate(**inputs, **GREEDY, mmspec=options)
        assert seen[-1] == expected, options
    with pytest.raises(ValueError, match="reference has 3 texts for 2 prompts; pass one, or one per prompt"):
        model.generate(**inputs, **GREEDY, mmspec={"reference": ["a", "b", "c"]})


def test_a_compiled_wrapper_names_the_model(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match=r"got OptimizedModule.*torch\.compile.*mmspec\.patch\(model\._orig_mod\)"):
        mmspec.patch(torch.compile(model))
    assert not mmspec.is_patched(model)


def test_a_plain_model_does_not_know_the_argument(model: PreTrainedModel) -> None:
    with pytest.raises((ValueError, TypeError), match="mmspec"):
        model.generate(**tiny.build_inputs(model, 1, 1), **GREEDY, mmspec={})


def test_generate_replaced_by_other_code(model: PreTrainedModel) -> None:
    def theirs(*args: Any, **kwargs: Any) -> str:
        return "theirs"

    model.generate = theirs
    try:
        before = picture(model)
        with pytest.raises(ValueError, match=r"model\.generate is replaced on this instance by .*theirs"):
            mmspec.patch(model)
        assert picture(model) == before and model.generate() == "theirs" and not mmspec.is_patched(model)
    finally:
        del model.generate
    mmspec.patch(model)


def test_options_of_a_call_change_only_that_call(model: PreTrainedModel) -> None:
    given = tiny.build_inputs(model, 1, 1)
    mmspec.patch(model, drafter="none")
    model.generate(**given, **GREEDY, mmspec={"drafter": adversarial.BranchingDrafter(1), "tree_size": 8})
    assert mmspec.stats(model, last=True).num_draft_tokens > 0
    model.generate(**given, **GREEDY, mmspec={})
    model.generate(**given, **GREEDY, mmspec=None)
    assert mmspec.stats(model, last=True).num_draft_tokens == 0
    chosen = {"enabled": False}
    model.generate(**given, **GREEDY, mmspec=chosen)
    assert chosen == {"enabled": False} and mmspec.stats(model).calls == 3


# --- copies -----------------------------------------------------------------------------------------------------------


@FAMILIES
def test_a_deep_copy_is_patched_and_independent(family: str) -> None:
    model = shared(family)
    given = tiny.build_inputs(model, 1, 2)
    plain = model.generate(**given, **GREEDY)
    with patch_model(model, drafter="recycling", tree_size=8):
        model.generate(**given, **GREEDY)
        twin = copy.deepcopy(model)
        assert mmspec.is_patched(twin) and twin.generate.__self__ is twin
        assert mmspec.stats(twin) == Stats()
        assert torch.equal(twin.generate(**given, **GREEDY), plain)
        assert mmspec.stats(twin).calls == 1 and mmspec.stats(model).calls == 1
        with torch.no_grad():
            twin.get_output_embeddings().weight.neg_()
        other = twin.generate(**given, **GREEDY)
        assert not torch.equal(other, plain) and torch.equal(model.generate(**given, **GREEDY), plain)
        with mmspec.disabled(twin):
            twin.generate(**given, **GREEDY)
            model.generate(**given, **GREEDY)
        assert mmspec.stats(twin).calls == 2 and mmspec.stats(model).calls == 3
        mmspec.unpatch(model)
        assert mmspec.is_patched(twin) and torch.equal(twin.generate(**given, **GREEDY), other)
        mmspec.unpatch(twin)
        assert not mmspec.is_patched(twin) and "generate" not in twin.__dict__
        assert torch.equal(twin.generate(**given, **GREEDY), other)


COPIES: dict[str, Callable[[Any], Any]] = {
    "a copied __dict__": lambda model: with_attributes(model, dict(vars(model))),
    "replicate": lambda model: model._replicate_for_data_parallel(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def with_attributes(model: PreTrainedModel, attributes: dict[str, Any]) -> PreTrainedModel:
    twin = type(model).__new__(type(model))
    twin.__dict__ = attributes
    return twin


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_object_is_another_model(way: str) -> None:
    """It runs on its own weights, and `patch` and `unpatch` of one leave the other as it is."""
    model = tiny.build_model(tiny.ModelSpec("llama", seed=6))
    given = tiny.build_inputs(model, 1, 2)
    mmspec.patch(model, drafter="recycling", tree_size=8)
    before = model.generate(**given, **GREEDY)
    twin = COPIES[way](model)
    twin._modules = copy.deepcopy(twin._modules)
    for weight in twin.parameters():
        weight.data.mul_(1.3)
    with mmspec.disabled():
        expected = twin.generate(**given, **GREEDY)
    assert torch.equal(twin.generate(**given, **GREEDY), expected) and not torch.equal(expected, before)
    assert mmspec.is_patched(twin) is (way == "deepcopy")
    for _ in range(2):
        mmspec.unpatch(twin)
        assert type(twin) in (type(model), type(model).__mro__[1]) and served(model)
        mmspec.patch(twin, drafter="lookup")
        assert torch.equal(twin.generate(**given, **GREEDY), expected) and mmspec.stats(twin).calls == 1
    assert torch.equal(model.generate(**given, **GREEDY), before) and served(model)


def test_saving_a_patched_model(model: PreTrainedModel, tmp_path: Path) -> None:
    given = tiny.build_inputs(model, 1, 2)
    plain = model.generate(**given, **GREEDY)
    model.save_pretrained(tmp_path / "plain")
    mmspec.patch(model, tree_size=8)
    model.generate(**given, **GREEDY)
    model.save_pretrained(tmp_path / "patched")
    names = [sorted(path.name for path in (tmp_path / kind).iterdir()) for kind in ("plain", "patched")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes(), name
    loaded = type(model).from_pretrained(tmp_path / "patched").eval()
    assert not mmspec.is_patched(loaded) and torch.equal(loaded.generate(**given, **GREEDY), plain)


# --- disabled ---------------------------------------------------------------------------------------------------------


def served(model: PreTrainedModel) -> bool:
    """Whether a call is decoded by the loop."""
    before = mmspec.stats(model).calls
    model.generate(**tiny.build_inputs(model, 1, 1), do_sample=False, max_new_tokens=2)
    return mmspec.stats(model).calls > before


def test_disabled_for_all_or_for_one(model: PreTrainedModel) -> None:
    other = shared("qwen2_5_vl")
    mmspec.patch(model, drafter="none")
    with patch_model(other, drafter="none"):
        assert served(model) and served(other)
        with mmspec.disabled():
            assert not served(model) and not served(other)
        with mmspec.disabled(model):
            assert not served(model) and served(other)
            with mmspec.disabled(other):
                assert not served(model) and not served(other)
            assert not served(model) and served(other)
            with mmspec.disabled():
                with mmspec.disabled(model):
                    assert not served(other)
                assert not served(other)
            assert served(other)
        assert served(model) and served(other)


def test_disabled_ends_with_an_error(model: PreTrainedModel) -> None:
    mmspec.patch(model, drafter="none")
    with pytest.raises(ZeroDivisionError), mmspec.disabled():
        _ = 1 / 0
    assert served(model)


def test_disabled_wins_over_the_options_of_a_call(model: PreTrainedModel) -> None:
    mmspec.patch(model, drafter="none")
    with mmspec.disabled():
        model.generate(**tiny.build_inputs(model, 1, 1), **GREEDY, mmspec={"drafter": "lookup"})
    assert mmspec.stats(model).calls == 0


def test_disabled_holds_in_its_own_thread(model: PreTrainedModel) -> None:
    mmspec.patch(model, drafter="none")
    is_served: list[bool] = []
    with mmspec.disabled():
        thread = threading.Thread(target=lambda: is_served.append(served(model)))
        thread.start()
        thread.join()
        assert not served(model)
    assert is_served == [True]


def test_disabled_holds_in_its_own_task(model: PreTrainedModel) -> None:
    mmspec.patch(model, drafter="none")

    async def off(gate: asyncio.Event) -> bool:
        with mmspec.disabled():
            gate.set()
            await asyncio.sleep(0)
            return served(model)

    async def on(gate: asyncio.Event) -> bool:
        await gate.wait()
        return served(model)

    async def both() -> list[bool]:
        gate = asyncio.Event()
        return await asyncio.gather(off(gate), on(gate))

    assert asyncio.run(both()) == [False, True]


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("drafter", ["auto", "bush"])
@FAMILIES
def test_two_threads_on_one_model(family: str, drafter: str) -> None:
    model = shared(family)
    given = [tiny.build_inputs(model, 20 + i, 1 + i) for i in range(2)]
    plain = [model.generate(**inputs, **GREEDY) for inputs in given]
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            for _ in range(3):
                ids = model.generate(**given[i], **GREEDY)
                if not torch.equal(ids, plain[i]):
                    wrong.append((i, ids.tolist()))
        except Exception as error:
            wrong.append(error)

    with patch_model(model, drafter=adversarial.BranchingDrafter(1) if drafter == "bush" else drafter, tree_size=8):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        stats = mmspec.stats(model)
        assert stats.calls == 6 and stats.first_tokens == 3 * 1 + 3 * 2


# --- streamers and pipelines ------------------------------------------------------------------------------------------


def test_text_streamers(model: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, given = tiny.build_tokenizer(tiny.ModelSpec()), tiny.build_inputs(model, 1, 1)
    for options in ({"skip_prompt": True}, {"skip_special_tokens": True}):
        plain = model.generate(**given, **GREEDY, streamer=TextStreamer(tokenizer, **options))
        text = capsys.readouterr().out
        assert text.strip()
        mmspec.patch(model, drafter=adversarial.OracleDrafter(1, [plain]), tree_size=8)
        model.generate(**given, **GREEDY, streamer=TextStreamer(tokenizer, **options))
        assert capsys.readouterr().out == text
        assert mmspec.stats(model).num_accepted_tokens > 0
        mmspec.unpatch(model)


def test_streaming_from_a_thread(model: PreTrainedModel) -> None:
    tokenizer, given = tiny.build_tokenizer(tiny.ModelSpec()), tiny.build_inputs(model, 1, 1)

    def pieces() -> list[str]:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=lambda: model.generate(**given, **GREEDY, streamer=streamer))
        thread.start()
        got = list(streamer)
        thread.join()
        return got

    plain = pieces()
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    assert pieces() == plain and len(plain) > 1


@pytest.fixture(scope="module")
def pipe() -> Any:
    """A pipeline around a tiny model with a real processor."""
    model, processor = random_model("tiny")
    return pipeline("image-text-to-text", model=model, processor=processor)


def build_chat(question: str) -> list[dict[str, Any]]:
    """A chat with one image."""
    image = Image.radial_gradient("L").convert("RGB").resize((40, 50))
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]


def run_pipeline(pipe: Any, **options: Any) -> list[Any]:
    """Generated texts for a single question and for a batch."""
    answers = []
    for text in (build_chat("describe the image"), [build_chat("describe the image"), build_chat("what is this")]):
        torch.manual_seed(1)
        output = pipe(text=text, **copy.deepcopy(options))
        rows = output if isinstance(output[0], dict) else [row for group in output for row in group]
        texts = [row["generated_text"] for row in rows]
        answers.append([text if isinstance(text, str) else text[-1]["content"] for text in texts])
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {"return_full_text": False, "generate_kwargs": {"do_sample": False}},
        {"return_full_text": True, "generate_kwargs": {"do_sample": False}},
        {"return_full_text": False, "generate_kwargs": {"do_sample": True, "temperature": 0.7}},
        {"return_full_text": False, "stop_sequence": "answer", "generate_kwargs": {"do_sample": False}},
        {"batch_size": 2, "generate_kwargs": {"do_sample": False}},
    ],
    ids=["new text", "full text", "sampled", "stop", "batch"],
)
def test_pipelines(pipe: Any, options: dict[str, Any]) -> None:
    options["max_new_tokens"] = 14
    plain = run_pipeline(pipe, **options)
    with patch_model(pipe.model, tree_size=8):
        assert run_pipeline(pipe, **options) == plain
        stats = mmspec.stats(pipe.model)
        assert stats.calls >= 2 and not stats.fallback_calls and all(all(texts) for texts in plain)


def test_a_pipeline_of_a_patched_model(pipe: Any) -> None:
    options = {"max_new_tokens": 10, "generate_kwargs": {"do_sample": False}}
    plain = run_pipeline(pipe, **options)
    with patch_model(pipe.model, tree_size=8, processor=pipe.processor):
        again = pipeline("image-text-to-text", model=pipe.model, processor=pipe.processor)
        assert run_pipeline(again, **options) == plain and mmspec.stats(pipe.model).calls >= 2


# --- errors in mid-call -----------------------------------------------------------------------------------------------


class Tripping(adversarial.RecordingStreamer):
    """A streamer that raises at its fourth put."""

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.log.calls) == 4:
            raise adversarial.InjectedError("streamer")


def fault(where: str, model: PreTrainedModel) -> dict[str, Any]:
    """Arguments that make a call fail in the middle."""
    if where == "streamer":
        return {"streamer": Tripping(adversarial.CallLog())}
    if where == "criterion":
        return {"stopping_criteria": StoppingCriteriaList([adversarial.Tripping(adversarial.CallLog(), 0, 0)])}
    if where == "processor":
        return {"logits_processor": LogitsProcessorList([adversarial.Failing(adversarial.CallLog())])}
    return {}


@pytest.mark.parametrize("where", ["streamer", "criterion", "processor", "prefill", "score"])
def test_an_error_in_mid_call_leaves_the_next_call_clean(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    given = tiny.build_inputs(model, 1, 2)
    torch.manual_seed(5)
    plain = model.generate(**given, **SAMPLED)
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    before = picture(model)
    with monkeypatch.context() as broken:
        if where in ("prefill", "score"):
            calls, forward = iter(range(2 if where == "score" else 0)), getattr(HFTarget, where)

            def tired(*args: Any, **kwargs: Any) -> Any:
                result = forward(*args, **kwargs)  # keys and values are written
                if next(calls, None) is None:
                    raise adversarial.InjectedError(where)
                return result

            broken.setattr(HFTarget, where, tired)  # a forward replaced on a module is not decoded by our loop
        with pytest.raises(adversarial.InjectedError):
            model.generate(**given, **SAMPLED, **fault(where, model))
    assert mmspec.stats(model) == Stats()
    torch.manual_seed(5)
    assert torch.equal(model.generate(**given, **SAMPLED), plain)
    assert mmspec.stats(model).calls == 1
    assert picture(model) == before


@pytest.mark.parametrize("where", ["streamer", "criterion"])
def test_an_error_of_the_user_leaves_the_generator_as_transformers_does(model: PreTrainedModel, where: str) -> None:
    given, states = tiny.build_inputs(model, 1, 2), []
    for patched in (False, True):
        if patched:
            mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
        torch.manual_seed(5)
        with pytest.raises(adversarial.InjectedError):
            model.generate(**given, **SAMPLED, **fault(where, model))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
