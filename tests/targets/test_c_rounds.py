"""Which models and calls the C decoder computes, that it gives what the model gives, and what it leaves out."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import session_changes
import tiny_models as tiny
import torch
from parity import Kwargs, generate_plain, generate_tokens, get_model, speculate
from spies import UserCode, at, spy_on
from test_targets import bush, inside
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

import mmspec
from mmspec.cpu import decoder
from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.decoder import CDecoder
from mmspec.targets import c_check
from mmspec.targets.c_forwards import CForwards
from mmspec.targets.hf import HFTarget
from mmspec.targets.model_state import unknown_code
from mmspec.targets.module_scan import scan_modules

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
TEXT = ("llama", "mistral", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "granite", "cohere2", "phi3", "olmo2")
OUTPUTS: Kwargs = {"max_new_tokens": 16, "return_dict_in_generate": True, "output_logits": True}
VISION = (
    *(*tiny.FAMILIES, "qwen2_vl", "qwen3_vl", "internvl", "idefics2", "idefics3", "smolvlm", "mistral3", "vipllava"),
    *("gemma3", "paligemma", "glm4v", "glm_ocr", "ovis2", "got_ocr2", "lighton_ocr", "perception_lm", "video_llama_3"),
    *("qwen3_vl_moe", "qwen3_omni_moe_thinker", "gemma4", "emu3", "exaone4_5", "hyperclovax_vision_v2"),
    *("deepseek_ocr2", "glm4v_moe", "hunyuan_vl", "cosmos3_edge", "molmo2"),
)
HALVES = ("bfloat16", "float16")


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every round of a recognised model, whether the C decoder computed it."""
    return spy_on(monkeypatch, CForwards, "score", lambda scored, *_: scored is not None)


def score_all_rows(self: HFTarget, *args: Any, score: Callable[..., Any] = HFTarget.score) -> Any:
    """`HFTarget.score` without its argument `active`."""
    return score(self, *args[:2])


def use_c(target: HFTarget) -> None:
    kernel = load_kernel()
    assert kernel is not None
    target.prefill()
    target.use_c(kernel, unknown_code(target.adapter, scan_modules(target.model)))


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_rounds_equal_those_of_the_model(family: str, forwards: list[bool]) -> None:
    """Logits, hidden states and the cache, for trees behind padded rows of different lengths."""
    model, rng = get_model(family, seed=11), random.Random(3)
    images = None if family in TEXT else [1, 1, 1]
    inputs = tiny.build_inputs(model, 4, 3, images=images, padding="left")
    trees = [bush(rng, [9, 8, 7], nodes, range(20, 40)) for nodes in (1, 6, 1, 9)]

    def decode(target: HFTarget) -> list[Tensor]:
        found: list[Tensor] = []
        for step, tree in enumerate(trees):
            logits, states = target.score(tree, (0, 1, 2))
            found += [logits, *states.values()]
            counts = [1, 1 + step % 2, 1]
            path = [list(range(count)) for count in counts]
            target.buffer.keep_path(torch.tensor([[0, 1]] * 3), torch.tensor(counts), path)
            length = min(target.buffer.seq_lens)
            found += [part.clone() for layer in range(2) for part in target.buffer.read(layer, length)]
        return found

    results: list[list[Tensor]] = []
    inside(model, inputs, lambda target: (target.prefill(), results.append(decode(target))))
    assert not forwards
    inside(model, inputs, lambda target: (use_c(target), results.append(decode(target))))
    assert forwards == [True] * len(trees)
    for mine, want in zip(results[1], results[0], strict=True):
        assert (mine - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llava_next", {"window": 6}), ("qwen2_5_vl", {"window": 6, "mixed": True}), ("gemma3", {"attention": "eager"}),
     ("gemma2", {"attention": "eager"}), ("llava", {"tied": True}), ("qwen3_vl", {"attention": "eager"})],
)  # fmt: skip
def test_windows_and_kinds_of_attention(family: str, changes: Kwargs, forwards: list[bool]) -> None:
    """Whole calls, beyond the window and with padded rows: the logits and tokens of transformers."""
    model = get_model(family, seed=16, **changes)
    inputs = tiny.build_inputs(model, 5, 2, images=None if family in TEXT else [1, 1], padding="left")
    plain = generate_plain(model, inputs, **OUTPUTS)
    with speculate(model, "bush", plain.sequences):
        mine = generate_plain(model, inputs, **OUTPUTS)
    assert forwards and all(forwards) and torch.equal(mine.sequences, plain.sequences)
    assert torch.allclose(torch.stack(mine.logits), torch.stack(plain.logits), atol=1e-4)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3_vl", "gemma3", "smolvlm", "glm4v", "qwen3_vl_moe", "qwen3_moe"),
        "qwen3_5",
        "lfm2_vl",
        "lfm3_vl",
    ],
)
def test_in_half_precision_drafts_change_nothing(family: str, dtype: str, forwards: list[bool]) -> None:
    """In rounds in C the logits of a node are the same bits in any tree: whatever drafts, tokens and logits are."""
    model = get_model(family, seed=17, dtype=dtype)
    inputs = tiny.build_inputs(model, 5, 2, images=None if family in TEXT else [1, 1], padding="left")
    plain = generate_plain(model, inputs, **OUTPUTS)
    results = []
    for drafter in ("none", "lookup", "bush", "oracle"):
        with speculate(model, drafter, plain.sequences):
            results.append(generate_plain(model, inputs, **OUTPUTS))
    assert forwards and all(forwards)
    for other in results:
        assert torch.equal(other.sequences, results[0].sequences)
        assert all(map(torch.equal, other.logits, results[0].logits))


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("family", "batch", "nodes"),
    [
        *(("llama", 3, 43), ("llama", 3, 64), ("llama", 9, 16), ("llama", 17, 8)),
        *(("qwen3_5", 3, 64), ("qwen3_5", 9, 16), ("lfm2", 9, 16), ("lfm2", 17, 8)),
    ],
)
def test_in_half_precision_no_round_is_too_wide(
    family: str, batch: int, nodes: int, dtype: str, forwards: list[bool]
) -> None:
    """More rows times nodes than one forward takes are computed by several, while rows end one by one."""
    model = get_model(family, seed=17, dtype=dtype, layers=2 if family == "llama" else 3)
    inputs = tiny.build_inputs(model, 5, batch, padding="left")
    plain = generate_plain(model, inputs, **OUTPUTS)
    for mode in ({"do_sample": False}, {"do_sample": True}):
        results = []
        for drafter, size in (("none", 1), ("lookup", nodes), ("bush", nodes)):
            with speculate(model, drafter, plain, tree_size=size):
                torch.manual_seed(3)
                results.append(generate_plain(model, inputs, **OUTPUTS | mode))
        assert forwards and all(forwards)
        for other in results[1:]:
            assert torch.equal(other.sequences, results[0].sequences)
            assert all(map(torch.equal, other.logits, results[0].logits))


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("wrong", [{}, {"interleaved": True}, {"activation": "gelu_tanh"}])
@pytest.mark.parametrize(("layers", "factor"), [(12, 2), (12, 1.5)])
def test_layers_that_amplify_rounding(
    layers: int, factor: float, dtype: str, wrong: Kwargs, forwards: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of all layers differ by more than one rounding, as in trained models, or by so much more that only those
    of a few layers can be compared."""
    model = tiny.build_model(tiny.ModelSpec("llava", seed=17, layers=layers, dtype=dtype))
    with torch.no_grad():
        for name, parameter in model.model.language_model.layers.named_parameters():
            parameter *= factor if "proj" in name else 1
    _assert_recognised_unless(wrong, model, forwards, monkeypatch)


def _assert_recognised_unless(
    wrong: Kwargs, model: PreTrainedModel, forwards: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assert that rounds run in C if and only if no trait is replaced by one of `wrong`."""
    read = c_check.read_parts
    monkeypatch.setattr(
        c_check,
        "read_parts",
        lambda *args: (replace(one, shape=replace(one.shape, **wrong)) for one in read(*args)),
    )
    with speculate(model, "lookup"):
        generate_plain(model, tiny.build_inputs(model, 5, 2), **OUTPUTS)
    assert bool(forwards) != bool(wrong) and all(forwards)


WRONG_TRAITS: dict[str, Kwargs] = {
    "granite": {"residual_scale": 0.9},
    "cohere2": {"is_parallel": False},
    "aya_vision": {"is_centred": False},
    "exaone4_5": {"head_sizes": ()},
    "gemma4": {"normalises_values": False},
    "gemma4-per-layer": {"per_layer_scales": (1.0, 1.0, 0.5)},
    "gemma4-owners": {"owners": ()},
    "gemma4-heads": {"head_sizes": ()},
    "qwen3_5": {"delta_heads": (1, 1, 8, 8)},
    "qwen3_5-gates": {"gates_attention": False},
    "lfm2": {"rotary_size": 4},
    "lfm3_vl": {"gates_heads": False},
    "glm4v_moe": {"is_sigmoid": False},
    "hunyuan_vl": {"head_norms": "each"},
    "olmo2": {"head_norms": "rotated"},
    "cosmos3_edge": {"activation": "silu"},
}


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("name", WRONG_TRAITS)
def test_each_trait_is_found_by_the_test(
    name: str, is_wrong: bool, forwards: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one trait that is not the model's its rounds run in the model."""
    wrong = WRONG_TRAITS[name] if is_wrong else {}
    model = tiny.build_model(tiny.ModelSpec(name.partition("-")[0], seed=17, layers=3))
    with torch.no_grad():  # as of trained models: a norm without an effect hides a trait
        for parameter in model.get_decoder().layers.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    _assert_recognised_unless(wrong, model, forwards, monkeypatch)


@pytest.mark.parametrize("bug", ["window", "state", "taps"])
@pytest.mark.parametrize("family", ["lfm2_vl", "qwen3_5"])
def test_states_behind_accepted_nodes_are_compared(
    family: str, bug: str, forwards: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no logit of the tested chain depends on: what a commit makes of its nodes."""
    original = decoder.log_nodes

    def log_nodes(*args: Any) -> Any:
        log = original(*args)
        later = log.window.flip(1) if bug == "window" else log.window
        return replace(log, window=later, advance=lambda counts, path: log.next_state)

    if bug == "taps":
        read = c_check.read_parts

        def read_parts(*args: Any) -> Any:
            for parts in read(*args):
                flipped = [one if one.conv is None else replace(one, conv=one.conv.flip(1)) for one in parts.layers]
                yield replace(parts, layers=flipped)

        monkeypatch.setattr(c_check, "read_parts", read_parts)
    elif (bug, family) != ("state", "lfm2_vl"):
        monkeypatch.setattr(decoder, "log_nodes", log_nodes)
    model = tiny.build_model(tiny.ModelSpec(family, seed=17, layers=3))
    with speculate(model, "lookup"):
        generate_plain(model, tiny.build_inputs(model, 5, 2), **OUTPUTS)
    assert bool(forwards) == ((bug, family) == ("state", "lfm2_vl"))  # a convolution has no other state


@pytest.mark.every(3)
@pytest.mark.parametrize("drafter", ["none", "lookup", "recycling", "bush", "oracle"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llava", {}), ("gemma3", {}), ("qwen2_vl", {"dtype": "bfloat16"}), ("qwen3_5", {}),
     ("lfm2_vl", {"dtype": "bfloat16"})],
)  # fmt: skip
def test_rows_that_have_ended_are_not_computed(
    family: str, changes: Kwargs, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows end one by one: the tokens are those of a call that computes all of them to the end."""
    model = get_model(family, seed=18, **changes)
    inputs = tiny.build_inputs(model, 5, 4, images=[1, 1, 1, 1], padding="left")
    tokens = generate_tokens(model, inputs, max_new_tokens=16, do_sample=False)
    ends: Kwargs = {"eos_token_id": [row[step] for row, step in zip(tokens, (2, 9, 5), strict=False)]}
    ends |= {"pad_token_id": 0, "max_new_tokens": 16, "do_sample": False}
    computed = spy_on(monkeypatch, CDecoder, "forward", lambda _, decoder, given, *args: len(given.tokens))
    plain = generate_plain(model, inputs, **ends)
    with speculate(model, drafter, plain):
        mine = generate_plain(model, inputs, **ends)
        forwards = mmspec.stats(model).row_forwards
        computed.clear()
        again = generate_plain(model, inputs, **ends)  # without the check of the decoder
        assert sum(computed) == sum(mmspec.stats(model).row_forwards) and min(computed) < 4
        monkeypatch.setattr(HFTarget, "score", score_all_rows)
        computed.clear()
        whole = generate_plain(model, inputs, **ends)
    assert set(computed) == {4} and len(set(forwards)) > 1
    assert torch.equal(mine, whole) and torch.equal(again, whole)
    assert changes or torch.equal(mine, plain)


@pytest.mark.parametrize(
    "wrong", [{}, {"normalises_shares": True}, {"experts_per_token": 1}, {"expert_size": 1}], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_recognised_by_what_they_compute(
    dtype: str, wrong: Kwargs, forwards: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a router chooses another of two near-ties than the model did, but not with a wrong trait."""
    model = tiny.build_model(tiny.ModelSpec("qwen3_moe", seed=17, layers=4, dtype=dtype))
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            parameter *= 8 if "experts" in name else 1
    _assert_recognised_unless(wrong, model, forwards, monkeypatch)


def test_groups_of_experts_are_left_to_the_model() -> None:
    model = tiny.build_model(tiny.ModelSpec("glm4v_moe", seed=17))
    router = model.get_decoder().layers[1].mlp.gate
    for groups in (1, 2):
        router.num_group = groups
        check = functools.partial(_assert_is_c, is_c=groups == 1)
        inside(model, tiny.build_inputs(model, 4, 1), lambda target, check=check: (use_c(target), check(target)))


@pytest.mark.every(2)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_as_mixtral_has_them(dtype: str, implementation: str, forwards: list[bool]) -> None:
    """Shares stay in float32, and each way to run experts rounds elsewhere."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=99, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=3, **sizes)
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.set_experts_implementation(implementation)
    inputs = {"input_ids": torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(0))}
    plain = generate_plain(model, inputs, **OUTPUTS)
    with speculate(model, "bush", plain.sequences):
        mine = generate_plain(model, inputs, **OUTPUTS)
    assert forwards and all(forwards)
    if dtype == "float32":
        assert torch.equal(mine.sequences, plain.sequences)
    assert torch.allclose(mine.logits[1], plain.logits[1], atol=1e-5 if dtype == "float32" else 0.05)


def test_eager_attention_in_half_precision_gives_the_bits_of_the_model(forwards: list[bool]) -> None:
    """There all numbers are rounded where the modules of transformers round them, and few sums are long."""
    model = get_model("gemma2", seed=18, dtype="bfloat16")
    inputs = tiny.build_inputs(model, 5, 2)
    plain = generate_plain(model, inputs, **OUTPUTS)
    with speculate(model, "bush", plain.sequences):
        mine = generate_plain(model, inputs, **OUTPUTS)
    assert forwards and all(forwards)
    assert torch.equal(mine.sequences, plain.sequences)
    assert (torch.stack(mine.logits) == torch.stack(plain.logits)).float().mean() > 0.98


@pytest.mark.every(2)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3"])
def test_calls_are_decoded_in_compiled_code(family: str, options: Kwargs, forwards: list[bool]) -> None:
    model = get_model(family, seed=12)
    inputs = tiny.build_inputs(model, 5, 2)
    plain = generate_plain(model, inputs, max_new_tokens=20, **options)
    for backend in ("auto", "c", "torch"):
        forwards.clear()
        with speculate(model, "bush", plain, backend=backend):
            assert torch.equal(generate_plain(model, inputs, max_new_tokens=20, **options), plain)
        assert bool(forwards) == (backend != "torch") and all(forwards)


def test_a_model_that_is_cast_after_patch(forwards: list[bool]) -> None:
    """In place, to each type and back: rounds run in C in the new type, where drafts change nothing."""
    models = [tiny.build_model(tiny.ModelSpec(seed=21, tied=True)) for _ in range(2)]
    inputs = tiny.build_inputs(models[0], 5, 2)
    for model, drafter in zip(models, ("none", "lookup"), strict=True):
        mmspec.patch(model, drafter, tree_size=8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        none, lookup = (generate_plain(model.to(dtype), inputs, **OUTPUTS) for model in models)
        assert len(forwards) > 16 and all(forwards)
        forwards.clear()
        assert torch.equal(none.sequences, lookup.sequences) and all(map(torch.equal, none.logits, lookup.logits))
        with mmspec.disabled():
            plain = generate_plain(models[0], inputs, **OUTPUTS)
        near = 1e-4 if dtype is torch.float32 else 0.2
        assert torch.allclose(plain.logits[1], none.logits[1], atol=near)
        assert dtype != torch.float32 or torch.equal(none.sequences, plain.sequences)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize(
    "shape", [{"hidden": 40, "vocab": 121}, {"hidden": 52, "heads": 2, "kv_heads": 1, "tied": True}]
)
def test_odd_sizes_with_every_drafter(shape: Kwargs, dtype: str, forwards: list[bool]) -> None:
    model = tiny.build_model(
        tiny.ModelSpec("llava" if "tied" in shape else "llava_onevision", seed=8, dtype=dtype, **shape)
    )
    inputs = tiny.build_inputs(model, 5, 2)
    results = [] if dtype in HALVES else [generate_plain(model, inputs, **OUTPUTS).sequences]
    for drafter in ("none", "hybrid", "quantized", "auto"):
        with speculate(model, drafter, tree_size=8):
            results.append(generate_plain(model, inputs, **OUTPUTS).sequences)
    assert forwards and all(forwards)
    assert all(torch.equal(one, results[0]) for one in results)


def test_weights_that_were_made_in_inference_mode(forwards: list[bool]) -> None:
    """They have no counter of changes: a copy in 4 bits, made before, is not used for them."""
    model = tiny.build_model(tiny.ModelSpec(seed=21))
    inputs = tiny.build_inputs(model, 5, 2)
    mmspec.patch(model, "quantized")
    generate_plain(model, inputs, **OUTPUTS)
    with torch.inference_mode():
        for layer in (model.lm_head, model.get_decoder().layers[0].mlp.up_proj):
            layer.weight = nn.Parameter(layer.weight * -2, requires_grad=False)
    mine = generate_plain(model, inputs, **OUTPUTS)
    with mmspec.disabled(model):
        assert torch.equal(generate_plain(model, inputs, **OUTPUTS).sequences, mine.sequences)
    assert forwards and all(forwards)


@pytest.mark.parametrize("kind", ["the same module", "a copy"])
def test_layers_that_share_a_place_in_the_cache_are_left_to_transformers(kind: str) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=21, layers=3))
    layers = model.get_decoder().layers
    layers[2] = layers[1] if kind == "the same module" else copy.deepcopy(layers[1])
    inputs = tiny.build_inputs(model, 5, 1, images=None, padding="none")
    plain = generate_plain(model, inputs, **OUTPUTS).sequences
    with speculate(model, "lookup"):
        assert torch.equal(generate_plain(model, inputs, **OUTPUTS).sequences, plain)
        assert "layer_idx" in (mmspec.stats(model, last=True).fallback_reason or "")


@pytest.mark.parametrize("part", ["layer", "head"])
def test_a_model_of_two_types_runs_in_torch(part: str, forwards: list[bool]) -> None:
    """C reads weights of one type. What the model itself does with two, a result or an error, stays as it is."""
    model = tiny.build_model(tiny.ModelSpec(seed=21))
    inputs = tiny.build_inputs(model, 5, 1)
    mmspec.patch(model, "lookup", tree_size=8)
    for dtype in (torch.float64, torch.bfloat16):
        module = model.lm_head if part == "head" else model.get_decoder().layers[1].mlp.down_proj
        before = module.weight
        module.weight = nn.Parameter(before.detach().to(dtype), requires_grad=False)
        found = []
        for is_plain in (True, False):
            with mmspec.disabled() if is_plain else nullcontext():
                try:
                    found.append(generate_plain(model, inputs, **OUTPUTS).sequences.tolist())
                except RuntimeError as error:
                    found.append(str(error))
        assert found[0] == found[1] and not any(forwards)
        module.weight = before
    generate_plain(model, inputs, **OUTPUTS)
    assert forwards and all(forwards)


# --- what is left to the model ----------------------------------------------------------------------------------------


class Mine(nn.Linear):
    """A layer of the user's."""


def replace_function(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> None:
    module = sys.modules[type(model.get_decoder()).__module__]
    before = module.apply_rotary_pos_emb
    patch.setattr(module, "apply_rotary_pos_emb", lambda query, key, *args: before(2 * query, key, *args))


def replace_call(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> None:
    twice = lambda self, states: 2 * nn.Module.__call__(self, states)  # noqa: E731
    patch.setattr(type(model.get_decoder().norm), "__call__", twice)


def strided_weight(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> None:
    linear = model.get_decoder().layers[0].mlp.up_proj
    linear.weight.data = linear.weight.data.t().contiguous().t()


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    **{
        name: lambda model, patch, name=name: session_changes.CHANGES[name](model)
        for name in ("a hook", "a forward", "an activation")
    },
    "a class": lambda model, patch: setattr(model.get_decoder().layers[0].mlp.up_proj, "__class__", Mine),
    "another module": lambda model, patch: setattr(model.get_decoder().layers[0].mlp, "extra", nn.Identity()),
    "embeddings of a largest norm": lambda model, patch: setattr(model.get_input_embeddings(), "max_norm", 1e9),
    "a strided weight": strided_weight,
    "another epsilon": lambda model, patch: setattr(model.get_decoder().norm, "variance_epsilon", 0.5),
    "fewer layers": lambda model, patch: setattr(model.get_decoder().config, "num_hidden_layers", 1),
    "a function": replace_function,
    "a call": replace_call,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_are_not_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=13))
    inputs = tiny.build_inputs(model, 4, 1)
    for is_c in (True, False):
        inside(model, inputs, lambda target, is_c=is_c: (use_c(target), _assert_is_c(target, is_c)))
        CHANGES[name](model, monkeypatch)


def _assert_is_c(target: HFTarget, is_c: bool) -> None:
    assert (target.c_forwards is not None) == is_c


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llava", {"dtype": "float64"}), ("muse_spark", {}), ("chameleon", {}), ("qwen3_next", {}),
     ("gemma3n_text", {}), ("aria", {})],
)  # fmt: skip
def test_other_models_are_not_recognised(family: str, changes: Kwargs) -> None:
    model = get_model(family, **changes)
    inputs = tiny.build_inputs(model, 4, 1)
    inside(model, inputs, lambda target: (use_c(target), _assert_is_c(target, False)))


@pytest.mark.parametrize("kind", ["embeddings", "query", "logits", "far positions"])
def test_what_no_trait_describes_is_found_by_the_test(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of known parts that compute something else; the last only at positions that no prompt has reached."""
    model = get_model("llama", seed=19)
    decoder = model.get_decoder()
    kinds = {"embeddings": nn.Embedding, "query": nn.Linear, "logits": nn.Linear, "far positions": type(decoder)}
    module = {
        "embeddings": model.get_input_embeddings(),
        "query": decoder.layers[1].self_attn.q_proj,
        "logits": model.lm_head,
        "far positions": decoder,
    }[kind]
    original = kinds[kind].forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not module:
            return original(self, *args, **kwargs)
        if kind != "far positions":
            return 1.01 * original(self, *args, **kwargs)
        is_far = int(kwargs["position_ids"].max()) > 900
        outputs = original(self, *args, **kwargs)
        outputs.last_hidden_state *= 1.5 if is_far else 1
        return outputs

    forward.__globals__["__name__"], before = "transformers.models.mine", forward.__globals__["__name__"]
    try:
        monkeypatch.setattr(kinds[kind], "forward", forward)
        inputs = tiny.build_inputs(model, 4, 1)
        inside(model, inputs, lambda target: (use_c(target), _assert_is_c(target, False)))
        monkeypatch.undo()
        inside(model, inputs, lambda target: (use_c(target), _assert_is_c(target, True)))
    finally:
        forward.__globals__["__name__"] = before


def test_a_model_is_tested_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=20))
    inputs = tiny.build_inputs(model, 4, 1, images=[0])
    tested = spy_on(monkeypatch, c_check, "_agreeing_shape")
    for change, count in ((None, 1), (None, 1), ("weights", 1), ("eps", 2), (None, 2)):
        if change == "weights":
            model.get_decoder().layers[0].mlp.up_proj.weight.data.mul_(2)
        if change == "eps":
            for module in model.get_decoder().modules():
                if hasattr(module, "variance_epsilon"):
                    module.variance_epsilon = 1e-3
        inside(model, inputs, lambda target: (use_c(target), _assert_is_c(target, True)))
        assert len(tested) == count
    with_image = tiny.build_inputs(model, 4, 1, images=[1])
    inside(model, with_image, lambda target: (use_c(target), _assert_is_c(target, True)))
    assert len(tested) == 3


@pytest.mark.parametrize("tokens", [1, 2])
def test_one_token_needs_no_rounds(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = get_model("llava", seed=14), spy_on(monkeypatch, HFTarget, "use_c")
    with speculate(model, "lookup"):
        generate_plain(model, tiny.build_inputs(model, 4, 1), **{**OUTPUTS, "max_new_tokens": tokens})
    assert len(read) == tokens - 1


def test_autocast_and_wide_batches_run_in_the_model(forwards: list[bool]) -> None:
    model = get_model("llava", seed=14)

    def score(target: HFTarget) -> None:
        use_c(target)
        with torch.autocast("cpu", torch.bfloat16):
            target.score(bush(random.Random(1), [9, 9], 4, [9]))
        target.score(bush(random.Random(1), [9, 9], 64, [9]))

    inside(model, tiny.build_inputs(model, 4, 2), score)
    assert forwards == [False, True]
    inside(model, tiny.build_inputs(model, 4, 3), lambda target: (use_c(target), _score_wide(target)))
    assert forwards[2:] == [False]


class DoubledSilu(TorchDispatchMode):
    """User code that changes an operator."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return 2 * out if "silu" in str(function) else out


@pytest.mark.parametrize("way", ["mode", "function"])
def test_operators_of_user_code_are_not_bypassed(
    way: str, forwards: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get_model("llava", seed=15)
    inputs = tiny.build_inputs(model, 6, 2)
    linear = nn.functional.linear
    if way == "function":
        monkeypatch.setattr(nn.functional, "linear", lambda *args: 1.5 * linear(*args))
    with DoubledSilu() if way == "mode" else nullcontext():
        plain = generate_plain(model, inputs, max_new_tokens=16, do_sample=False)
        with speculate(model, "bush", plain):
            assert torch.equal(generate_plain(model, inputs, max_new_tokens=16, do_sample=False), plain)
    assert not forwards


class TripledLinear(nn.Linear):
    """A class that user code gives to a layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 3 * nn.Linear.forward(self, input)


def transpose(weight: nn.Parameter) -> None:
    """The same memory, read in another order; no counter of changes tells."""
    weight.data = weight.data.t()


CHANGES_DURING_A_CALL: dict[str, Callable[[Any], Any]] = {
    "eps": lambda model: setattr(model.get_decoder().layers[1].input_layernorm, "variance_epsilon", 3.0),
    "scaling": lambda model: setattr(model.get_decoder().layers[1].self_attn, "scaling", 9.0),
    "frequencies": lambda model: model.get_decoder().rotary_emb.inv_freq.mul_(0.1),
    "class": lambda model: setattr(model.lm_head, "__class__", TripledLinear),
    "max_norm": lambda model: setattr(model.get_input_embeddings(), "max_norm", 0.5),
    "forward": lambda model: setattr(model.lm_head, "forward", functools.partial(TripledLinear.forward, model.lm_head)),
    "forward of another": lambda model: setattr(
        model.get_decoder().layers[1].mlp, "forward", model.get_decoder().layers[0].mlp.forward
    ),
    "transposed": lambda model: transpose(model.get_decoder().layers[1].self_attn.o_proj.weight),
}


@pytest.mark.parametrize("during", [False, True])
def test_the_scale_of_the_embeddings_edited_without_a_trace(during: bool, forwards: list[bool]) -> None:
    """`.data` changes neither the place nor the version of a buffer."""
    results = []
    for is_patched in (False, True):
        model = tiny.build_model(tiny.ModelSpec(family="gemma3", seed=15))
        inputs = tiny.build_inputs(model, 6, 1)
        if is_patched:
            mmspec.patch(model, "none")
        change = functools.partial(model.get_input_embeddings().embed_scale.data.mul_, 1.5)
        generate_plain(model, inputs, **OUTPUTS)
        if not during:
            change()
        results.append(generate_plain(model, inputs, streamer=meddler(change) if during else None, **OUTPUTS))
    assert True in forwards and torch.equal(results[0].sequences, results[1].sequences)
    torch.testing.assert_close(torch.stack(results[1].logits), torch.stack(results[0].logits), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", CHANGES_DURING_A_CALL)
def test_changes_of_what_is_no_weight(kind: str) -> None:
    """They count from the next forward on, and outlive the call."""
    results = []
    for is_patched in (False, True):
        model = tiny.build_model(tiny.ModelSpec(seed=15))
        inputs = tiny.build_inputs(model, 6, 1)
        if is_patched:
            mmspec.patch(model, "none")
        changer = meddler(functools.partial(CHANGES_DURING_A_CALL[kind], model))
        results += [
            generate_plain(model, inputs, streamer=changer, **OUTPUTS),
            generate_plain(model, inputs, **OUTPUTS),
        ]
    for plain, mine in zip(results[:2], results[2:], strict=True):
        assert torch.equal(plain.sequences, mine.sequences)
        assert torch.allclose(torch.stack(plain.logits), torch.stack(mine.logits), atol=1e-3)


def _score_wide(target: HFTarget) -> None:
    target.score(bush(random.Random(1), [9, 9, 9], 64, [9]))


def meddler(change: Callable[[], Any]) -> UserCode:
    """A streamer that changes the model when the third token arrives."""
    return UserCode(at(3, change))


@pytest.mark.parametrize(("family", "name"), [("glm4v", "gate_up_proj"), ("qwen3_vl_moe", "experts")])
@pytest.mark.parametrize("kind", ["in place", "data"])
def test_changes_of_weights_that_c_reads_in_parts(family: str, name: str, kind: str, forwards: list[bool]) -> None:
    """Fused projections and stacked experts: also where they get other memory during a call."""
    model = get_model(family, seed=15)
    inputs = tiny.build_inputs(model, 6, 1)
    mlp = model.get_decoder().layers[1].mlp
    weight = mlp.experts.gate_up_proj if name == "experts" else mlp.gate_up_proj.weight
    before = weight.detach().clone()
    change = (lambda: weight.data.mul_(-20)) if kind == "in place" else (lambda: setattr(weight, "data", before * -20))

    def generate() -> Any:
        try:
            return generate_plain(model, inputs, streamer=meddler(change), **OUTPUTS)
        finally:
            weight.data = before.clone()

    plain = generate()
    with speculate(model, "bush", plain.sequences, tree_size=1):
        mine = generate()
    assert torch.equal(mine.sequences, plain.sequences)
    assert torch.allclose(torch.stack(mine.logits), torch.stack(plain.logits), atol=1e-4)
    assert forwards[0] and all(forwards) == (kind == "in place")


@pytest.mark.parametrize("kind", ["in place", "data", "hook", "module"])
def test_changes_by_user_code_during_a_call_take_effect(kind: str, forwards: list[bool]) -> None:
    model = get_model("llava", seed=15)
    inputs = tiny.build_inputs(model, 6, 1)
    mlp = model.get_decoder().layers[1].mlp
    down, before = mlp.down_proj, mlp.down_proj.weight.detach().clone()
    handles: list[Any] = []
    twice = nn.Linear(down.in_features, down.out_features, bias=False)
    twice.weight.data = before * -20
    changes: dict[str, Callable[[], Any]] = {
        "in place": lambda: down.weight.data.mul_(-20),
        "data": lambda: setattr(down.weight, "data", before * -20),
        "hook": lambda: handles.append(down.register_forward_hook(lambda module, args, output: output * -20)),
        "module": lambda: setattr(mlp, "down_proj", twice),
    }

    def generate() -> Tensor:
        try:
            return generate_plain(model, inputs, max_new_tokens=16, do_sample=False, streamer=meddler(changes[kind]))
        finally:
            mlp.down_proj = down
            down.weight.data = before.clone()
            while handles:
                handles.pop().remove()

    unchanged = generate_plain(model, inputs, max_new_tokens=16, do_sample=False)
    plain = generate()
    assert not torch.equal(plain, unchanged)
    with speculate(model, "bush", plain, tree_size=1):
        assert torch.equal(generate(), plain)
    assert forwards[0] and all(forwards) == (kind == "in place")
