"""Models with recurrent layers: chains, the states of each row, and what goes to transformers."""

from __future__ import annotations

import inspect
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import adversarial as adversarial
import fuzz as fuzz
import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from parity import ALL_OUTPUTS, assert_parity, build_cached_model, generate_tokens, speculate
from recurrent_models import FAMILIES, OTHERS, HalfRight, model_of, one_row, ragged, text_batch, text_model
from spies import spy_on
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import mmspec
from mmspec.engine import undo
from mmspec.engine.tree import DraftTree, first_chain, sanitize
from mmspec.engine.tree_cache import CACHE_ARGUMENT, is_recurrent
from mmspec.interfaces import VerifyResult
from mmspec.targets import recurrent, recurrent_states, state_log
from mmspec.targets.registry import find_adapter
from mmspec.targets.selftest import run_selftest

FAMILY = pytest.mark.parametrize("family", [name for name in ("qwen3_5", "lfm2_vl") if name in FAMILIES])


@FAMILY
def test_logits_and_returned_states(family: str) -> None:
    model = model_of(family)
    options: dict[str, Any] = {**ALL_OUTPUTS, "max_new_tokens": 25, "do_sample": False}
    plain = model.generate(**one_row(model), **options)
    with speculate(model, "bush", plain):
        mine = model.generate(**one_row(model), **options)
        assert not mmspec.stats(model, last=True).fallback_reason
    pairs = [*zip(plain.logits, mine.logits, strict=True), *zip(plain.scores, mine.scores, strict=True)]
    caches = (plain.past_key_values, mine.past_key_values)
    pairs += zip(*map(fuzz.clone_cache_tensors, caches), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=fuzz.TOLERANCE, atol=fuzz.TOLERANCE)
    assert [type(layer) for layer in caches[0].layers] == [type(layer) for layer in caches[1].layers]


@FAMILY
def test_a_returned_cache_can_be_continued(family: str) -> None:
    """By transformers, outside inference mode; the states belong to the caller."""
    model = model_of(family)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    first = one_row(model)
    texts = []
    for patched in (False, True):
        with speculate(model, "bush", None) if patched else nullcontext():
            turn = model.generate(**first, **options, return_dict_in_generate=True)
            following = tiny.build_next_turn(first, turn.sequences, 2, model.tiny_spec)
            texts.append(model.generate(**following, **options, **{CACHE_ARGUMENT: turn.past_key_values}))
    assert torch.equal(*texts)


def ends(model: PreTrainedModel, given: tiny.Inputs, steps: list[int], **options: Any) -> list[int]:
    """Ids that end the rows at about these steps."""
    rows = generate_tokens(model, given, **options)
    return [row[step] for row, step in zip(rows, steps, strict=True)]


@FAMILY
def test_returned_states_of_a_ragged_batch(family: str) -> None:
    """Rows that end early read their padding, those that were ahead read their tokens again."""
    model = model_of(family)
    given = ragged(model)
    options: dict[str, Any] = {**ALL_OUTPUTS, "max_new_tokens": 20, "do_sample": False}
    stops = ends(model, given, [3, 17, 9, 17], max_new_tokens=20, do_sample=False)
    stats = assert_parity(model, given, HalfRight, eos_token_id=stops, **options)
    assert not stats.fallback_reason and stats.num_draft_tokens > 0


def test_half_precision_batches() -> None:
    """Tokens of a draft from the model's own text, in bfloat16, where states stay float32."""
    model = build_cached_model(tiny.ModelSpec("qwen3_5", seed=3, layers=3, dtype="bfloat16"))
    given = ragged(model)
    with speculate(model, "none", None, backend="torch"):
        own = model.generate(**given, max_new_tokens=20, do_sample=False, eos_token_id=None)
    with speculate(model, HalfRight(own), None, backend="torch"):
        drafted = model.generate(**given, max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert mmspec.stats(model).num_accepted_tokens > 0
    assert (own != drafted).any(1).sum() <= 1  # a near-tie


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in ("qwen3_5", "lfm2_vl") if name in FAMILIES])
def test_a_hundred_random_batches(family: str) -> None:
    """Rows of the exactness suite, in batches of four: any options, processors, criteria and streamers."""
    batches = [replace(fuzz.draw_case(8000 + seed, family), batch=4, padding="left") for seed in range(100)]
    results = [fuzz.run_case(case) for case in batches]
    failed = [result.report() for result in results if result.differences]  # with the margin of the token that differs
    assert not failed, "\n".join(failed)
    assert sum(not result.fallback for result in results) > 50


# --- the states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_classes(model_type: str) -> None:
    """Gated delta rule, Mamba-2, convolution: the class decides by what it calls, no list of names."""
    model = text_model(model_type, **OTHERS[model_type])
    given = text_batch()
    options: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**given, **options)
    with patch_model(model, drafter=HalfRight(plain), tree_size=8):
        assert torch.equal(model.generate(**given, **options), plain)
        stats = mmspec.stats(model)
    assert not stats.fallback_reason and stats.num_accepted_tokens > 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("limits", [(0.4, 0.6), (0.9, 1e6), (0.0, 0.2)])
@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid"])
def test_limited_time_steps(family: str, limits: tuple[float, float], dtype: str) -> None:
    """transformers limits Mamba-2's time step in prompts, not where it decodes a token. float64 does not run in C."""
    model = model_of(family, dtype=dtype)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = limits
            module.dt_bias.data = torch.linspace(-2, 2, module.dt_bias.numel(), dtype=module.dt_bias.dtype)
    given = text_batch()
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, **ALL_OUTPUTS}
    plain = model.generate(**given, **options)
    with patch_model(model, drafter=HalfRight(plain.sequences), tree_size=8):
        mine = model.generate(**given, **options)
        assert mmspec.stats(model).num_accepted_tokens > 0
    assert torch.equal(mine.sequences, plain.sequences)
    for one, other in zip(mine.logits, plain.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=fuzz.TOLERANCE, atol=fuzz.TOLERANCE)


def test_an_unknown_recurrence_goes_to_transformers() -> None:
    """Mamba-1 of transformers does not continue a state over several tokens at all."""
    model = text_model("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False)
    with pytest.raises(mmspec.UnsupportedModelError, match="computes its state by a function that is not known"):
        mmspec.patch(model, drafter="lookup")


def test_functions_of_transformers_are_replaced_for_a_forward_alone() -> None:
    """Also where two threads decode at once; a third that decodes unpatched is not logged."""
    model = model_of("qwen3_5")
    functions = state_log.updating_functions(type(module) for module in model.modules())
    assert any("chunk" in one.name for one in functions) and any("recurrent" in one.name for one in functions)
    before = [one.namespace[one.name] for one in functions]
    given = ragged(model)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**given, **options)
    mmspec.patch(model, drafter=HalfRight(plain), tree_size=4)
    results: list[Tensor] = []

    def decode(drafter: Any) -> None:
        results.append(model.generate(**given, **options, mmspec=drafter))

    try:
        chosen: list[Any] = [{"drafter": "lookup"}, {"drafter": HalfRight(plain)}, {"enabled": False}]
        threads = [threading.Thread(target=decode, args=(one,)) for one in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        mmspec.unpatch(model)
    assert len(results) == 3 and all(torch.equal(result, plain) for result in results)
    assert [one.namespace[one.name] for one in functions] == before and not undo._REPLACED


def test_functions_that_are_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `kernels` is installed, the functions of the recurrence are modules with the signatures of functions."""

    def as_module(function: Any) -> torch.nn.Module:
        class Func(torch.nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [own, *inspect.signature(function).parameters.values()]
        vars(Func.forward)["__signature__"] = inspect.Signature(parameters)
        return Func()

    model = model_of("qwen3_5")
    classes = [type(module) for module in model.modules()]
    functions = state_log.updating_functions(classes)
    for one in functions:
        monkeypatch.setitem(one.namespace, one.name, as_module(one.namespace[one.name]))
    state_log._parameters_of.cache_clear()
    assert {one.name for one in state_log.updating_functions(classes)} == {one.name for one in functions}
    result = run_selftest(find_adapter(model))
    assert result.passed, result.describe()


@FAMILY
def test_each_row_keeps_its_own_part_of_the_states(family: str) -> None:
    """They are those of transformers' decoding of each row's tokens, step by step, within rounding."""
    model = model_of(family)
    given = tiny.build_inputs(model, 5, 3, images=[0, 0, 0], padding="none")
    text = generate_tokens(model, given, max_new_tokens=6, do_sample=False)
    counts = [1, 4, 2]
    found: list[Any] = []

    def loop(model: Any, input_ids: Tensor, generation_config: Any, **kwargs: Any) -> Tensor:
        kept = {name: value for name, value in kwargs.items() if not name.startswith(("logits_proc", "stopping"))}
        target = recurrent.RecurrentTarget(find_adapter(model), input_ids, kept, generation_config, max_new_tokens=8)
        target.prefill()
        tokens = torch.tensor(text)[:, :5]
        parents = torch.arange(-1, 4).expand(3, -1)
        tree = sanitize(DraftTree(tokens, parents, torch.ones(3, 5).bool()), tokens[:, 0], torch.ones(100).bool())
        for _ in range(2):  # nothing changes before the commit
            target.score(tree)
        nodes = [list(range(count)) for count in counts]
        path = torch.arange(5).expand(3, -1)
        target.commit(VerifyResult(tree, path, torch.tensor(counts), tokens, nodes, nodes))
        found.extend(target.states.layers.values())
        return input_ids

    model.generate(**given, max_new_tokens=8, do_sample=False, custom_generate=loop)
    for row, count in enumerate(counts):
        alone = {name: value[row : row + 1] for name, value in given.items() if name in ("input_ids", "attention_mask")}
        kwargs = {"return_dict_in_generate": True, "do_sample": False, "eos_token_id": None}
        cache = model.generate(**alone, max_new_tokens=count + 1, **kwargs).past_key_values
        expected = [layer for layer in cache.layers if is_recurrent(layer)]
        for mine, layer in zip(found, expected, strict=True):
            for name in ("conv_states", "recurrent_states"):
                if (state := getattr(layer, name)[0]) is not None:
                    torch.testing.assert_close(getattr(mine, name)[0][row], state[0], rtol=1e-4, atol=1e-4)


class FailsAtDrafts(LogitsProcessor):
    """A processor that only drafts make fail: it never sees the token 8 in plain decoding."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool((input_ids[:, -1] == 8).any()):
            raise ValueError("an unexpected token")
        scores = scores.clone()
        scores[:, 8] = -torch.inf
        return scores


@pytest.mark.every(2)
@FAMILY
@pytest.mark.parametrize("batch", [1, 3])
def test_an_error_at_a_draft_restarts_from_the_prompt(family: str, batch: int) -> None:
    model = model_of(family)
    given = one_row(model) if batch == 1 else ragged(model, batch=batch)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "suppress_tokens": [8]}
    assert_parity(model, given, HalfRight, **options)
    processors = {"logits_processor": lambda: LogitsProcessorList([FailsAtDrafts()])}
    assert_parity(model, given, HalfRight, **options, **processors)


@FAMILY
def test_a_cut_reads_the_tokens_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are cut, by a criterion at every step, go back to the prompt; the others stay."""
    cuts = spy_on(monkeypatch, recurrent_states.RecurrentStates, "restore", lambda _, states, rows: rows)
    model = model_of(family)
    given = ragged(model, batch=3)

    class Odd(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.tensor([input_ids.shape[1] % 5 == row + 1 for row in range(len(input_ids))])

    options: dict[str, Any] = {"max_new_tokens": 25, "do_sample": False, **ALL_OUTPUTS}
    criteria = {"stopping_criteria": lambda: StoppingCriteriaList([Odd()])}
    in_torch = {"backend": "torch"}  # in our linear layers states differ by 2.7e-4 without any draft
    stats = assert_parity(model, given, HalfRight, patch_options=in_torch, **options, **criteria)
    assert not stats.fallback_reason and stats.num_draft_tokens > 0
    assert any(any(rows) and not all(rows) for rows in cuts)


@FAMILY
def test_caches_go_to_transformers(family: str) -> None:
    model = model_of(family)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    caches = {CACHE_ARGUMENT: lambda: DynamicCache(config=model.config)}
    stats = assert_parity(model, one_row(model), "bush", **options, **caches)
    assert "past_key_values of a model with recurrent layers" in str(stats.fallback_reason)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_adapter_names_the_trait(family: str) -> None:
    adapter = find_adapter(model_of(family))
    assert adapter.is_recurrent and adapter.unsupported_reason() is None
    assert {"conv", "linear_attention"} & adapter.layer_types
    assert recurrent.target_class(adapter) is recurrent.RecurrentTarget


def test_the_chain_of_first_children() -> None:
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5]])
    parents = torch.tensor([[-1, 0, 0, 2, 1, 4], [-1, 0, 1, 1, 3, 0]])
    mask = torch.tensor([[True] * 6, [True, True, False, True, True, True]])
    scores = torch.arange(6, 0, -1).float().expand(2, -1)
    chain = first_chain(DraftTree(tokens, parents, mask, scores))
    assert chain.tokens[0, :4].tolist() == [9, 1, 4, 5] and chain.node_mask[0].tolist() == [True] * 4 + [False] * 2
    assert chain.tokens[1, :4].tolist() == [9, 1, 3, 4] and chain.node_mask[1].sum() == 4
    assert chain.parents.tolist() == [[-1, 0, 1, 2, 3, 4]] * 2
    assert chain.scores is not None and chain.scores[0, :4].tolist() == [6, 5, 2, 1]


def test_a_chain_stays_as_it_is() -> None:
    parents = torch.arange(-1, 4)[None]
    tree = DraftTree(torch.arange(5)[None], parents, torch.ones(1, 5, dtype=torch.bool))
    assert torch.equal(first_chain(tree).tokens, tree.tokens) and bool(first_chain(tree).node_mask.all())
