"""Models whose logits may depend on the other tokens of a forward: hooks, unknown modules, quantised layers.

Every call is compared with plain `generate` on the same model: tokens and generator.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import adversarial as adversarial
import fuzz as fuzz
import pytest
import tiny_models as tiny
import torch
from parity import FAMILIES, GREEDY, check, drafted, fell_back
from spies import spy_on
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

import mmspec
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.targets import agreement, selftest
from mmspec.targets.module_scan import is_library_code, scan_modules
from mmspec.targets.registry import find_adapter


def fresh_model(family: str = "llava", **changes: Any) -> PreTrainedModel:
    """A model that a test may change."""
    return tiny.build_model(tiny.ModelSpec(family, **{"seed": 29, **changes}))


def decoder(model: PreTrainedModel) -> Any:
    """The text model."""
    return model.get_decoder()


# --- hooks ------------------------------------------------------------------------------------------------------------


def steer(module: nn.Module, args: Any, out: Any) -> Any:
    """The activation-steering idiom: acts on the last position."""
    hidden = (out[0] if isinstance(out, tuple) else out).clone()
    hidden[:, -1] += 2.0
    return (hidden, *out[1:]) if isinstance(out, tuple) else hidden


class Counting:
    """Acts from its fourth call on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, out: Any) -> Any:
        self.calls += 1
        return out + 5 * torch.eye(out.shape[-1])[7] * (self.calls > 4)


def scaled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A pre-hook: divides by the largest value of the whole forward."""
    return (args[0] / args[0].abs().max(), *args[1:]), kwargs


def test_a_hook_on_the_last_position(caplog: pytest.LogCaptureFixture) -> None:
    model = fresh_model()
    decoder(model).layers[0].register_forward_hook(steer)
    with caplog.at_level(logging.WARNING, "mmspec"):
        fell_back(check(model), "forward hook", "steer", "model.language_model.layers.0 (LlamaDecoderLayer)")
    assert "steer" in caplog.text


def test_a_hook_that_counts_its_calls() -> None:
    model, hook = fresh_model(), Counting()
    model.lm_head.register_forward_hook(hook)
    fell_back(check(model, lambda: setattr(hook, "calls", 0)), "Counting", "lm_head (Linear)")


def test_a_pre_hook() -> None:
    model = fresh_model()
    decoder(model).layers[1].mlp.register_forward_pre_hook(scaled, with_kwargs=True)
    fell_back(check(model), "pre-hook", "scaled", "layers.1.mlp (LlamaMLP)")


def test_a_hook_on_the_model_itself() -> None:
    model = fresh_model()
    model.model.register_forward_pre_hook(lambda module, args: None)
    fell_back(check(model), "pre-hook", "lambda", "model (LlavaModel)")


def test_a_global_hook() -> None:
    model = fresh_model()
    handle = register_module_forward_hook(lambda module, args, out: None)
    try:
        fell_back(check(model), "global forward hook", "lambda")
    finally:
        handle.remove()
    drafted(check(model))


def test_a_removed_hook_is_forgotten() -> None:
    model = fresh_model()
    handle = decoder(model).layers[0].register_forward_hook(steer)
    fell_back(check(model), "steer")
    handle.remove()
    drafted(check(model))


@FAMILIES
def test_a_hook_on_the_vision_tower_runs_once_per_call(family: str) -> None:
    model = fresh_model(family)
    tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower
    tower.register_forward_hook(lambda module, args, out: None)
    drafted(check(model))


def test_hooks_of_accelerate() -> None:
    from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module

    class Steering(ModelHook):
        """A user's hook, added in accelerate's way."""

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return steer(module, (), output)

    model = fresh_model()
    add_hook_to_module(decoder(model).layers[0], AlignDevicesHook("cpu"))
    drafted(check(model))
    add_hook_to_module(decoder(model).layers[1], SequentialHook(AlignDevicesHook("cpu"), Steering()))
    fell_back(check(model), "Steering", "layers.1")


def test_a_replaced_forward() -> None:
    model = fresh_model()
    part, calls = decoder(model).layers[0].mlp, []
    forward = part.forward

    def own(hidden: Tensor) -> Tensor:
        calls.append(1)
        return forward(hidden) * (1.0 + (len(calls) > 3))

    part.forward = own
    fell_back(check(model, calls.clear), "replaced forward", "own", "layers.0.mlp (LlamaMLP)")


# --- modules of unknown kind ------------------------------------------------------------------------------------------


class Same(nn.Linear):
    """Does nothing of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.0


class Scaled(nn.Linear):
    """One scale for the whole forward, as per-tensor dynamic quantisation has."""

    def forward(self, input: Tensor) -> Tensor:
        scale = input.abs().max() / 7
        return super().forward((input / scale).round() * scale)


class LastPosition(nn.Linear):
    """Acts on the last position only."""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return torch.cat([out[:, :-1], out[:, -1:] + 1], dim=1)


class Single(nn.Linear):
    """Acts on forwards of one position only."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (1.0 if input.shape[1] == 1 else 0.0)


class Drawing(nn.Linear):
    """Draws in eval mode too, even where it changes nothing."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0 * torch.rand(1)


class PythonDrawing(nn.Linear):
    """The same, from Python's generator."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0.5 * random.random()


class Remembering(nn.Linear):
    """Counts its calls and lists their sizes."""

    def forward(self, input: Tensor) -> Tensor:
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        self.__dict__.setdefault("sizes", []).append(input.shape[1])
        return super().forward(input) + 0.5 * (self.__dict__["calls"] > 5)


class Alternating(nn.Linear):
    """Holds an iterator."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0.5 * (next(self.__dict__["steps"]) % 2)


def swapped(kind: type, **changes: Any) -> PreTrainedModel:
    """A model with a layer of that class in its first decoder layer."""
    model = fresh_model(**changes)
    decoder(model).layers[0].mlp.down_proj.__class__ = kind
    return model


@FAMILIES
def test_a_foreign_module_that_passes_is_drafted(family: str) -> None:
    model = swapped(Same, family=family)
    assert len(scan_modules(model).foreign) == 1
    drafted(check(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_foreign_module_in_another_precision(dtype: str) -> None:
    model = swapped(Same, dtype=dtype)
    with fuzz.patch_model(model, adversarial.BranchingDrafter(1), tree_size=8):
        model.generate(**tiny.build_inputs(model, 27, 2, images=[1, 1]), **GREEDY)
        drafted([mmspec.stats(model, last=True)])


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", [Scaled, LastPosition, Single])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_module_that_depends_on_the_rest_of_the_forward(kind: type, family: str) -> None:
    found = check(swapped(kind, family=family))
    fell_back(found, f"layers.0.mlp.down_proj ({kind.__name__})", "logits depend on its other tokens")


@pytest.mark.parametrize("kind", [Scaled, LastPosition])
def test_the_same_in_half_precision(kind: type) -> None:
    model = swapped(kind, dtype="bfloat16")
    fell_back(check(model), kind.__name__)


@pytest.mark.parametrize("kind", [Drawing, PythonDrawing])
def test_a_module_that_draws_in_eval_mode(kind: type) -> None:
    fell_back(check(swapped(kind)), f"down_proj ({kind.__name__})", "random numbers")


def test_a_module_that_keeps_state() -> None:
    model = swapped(Remembering)
    part = decoder(model).layers[0].mlp.down_proj
    sizes: list[int] = []

    def reset() -> None:
        sizes.clear()
        part.__dict__.update(calls=0, sizes=sizes)

    logs = []
    fell_back(check(model, lambda: (logs.append(list(sizes)), reset())), "(Remembering)", "keeps state")
    assert part.__dict__["sizes"] is sizes and logs[1:] and logs[2] == logs[1], "the self-test left its calls behind"


def test_a_module_with_an_iterator() -> None:
    model = swapped(Alternating)
    part = decoder(model).layers[0].mlp.down_proj
    fell_back(check(model, lambda: part.__dict__.update(steps=itertools.count())), "(Alternating)", "steps")


def test_the_self_test_runs_once_and_again_when_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = spy_on(monkeypatch, selftest, "run_selftest")
    model = swapped(Same)
    given = tiny.build_inputs(model, 27, 1, images=[1])
    with fuzz.patch_model(model, adversarial.BranchingDrafter(1), tree_size=8):
        for _ in range(3):
            model.generate(**given, **GREEDY)
        assert len(runs) == 1
        decoder(model).layers[0].mlp.down_proj.__class__ = Scaled
        model.generate(**given, **GREEDY)
        assert len(runs) == 2 and mmspec.stats(model, last=True).fallback_reason


def test_dynamic_quantisation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(fresh_model(), {nn.Linear}, dtype=torch.qint8).eval()
        model.tiny_spec = tiny.ModelSpec(seed=29)
        assert any("quantized.dynamic" in type(part).__module__ for part in model.modules())
        fell_back(check(model), "model.language_model.layers.0.", "(Linear)", "logits depend on its other tokens")


class Weight(nn.Parameter):
    """A parameter of a class of its own, as torchao's; `act` quantises what it is multiplied with, by one scale."""

    act = False

    @classmethod
    def __torch_function__(cls, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear and args[1].act:
                scale = args[0].abs().max() / 7
                args = ((args[0] / scale).round() * scale, *args[1:])
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("act", [False, True], ids=["weight only", "dynamic activations"])
def test_quantised_parameters(act: bool) -> None:
    model = fresh_model()
    for layer in decoder(model).layers:
        part = layer.mlp.up_proj
        part.weight = Weight(part.weight.detach(), requires_grad=False)
        part.weight.act = act
    assert len(scan_modules(model).foreign) == 2
    if act:
        fell_back(
            check(model), "layers.0.mlp.up_proj (Linear, Weight)", "layers.1.mlp.up_proj", "depend on its other tokens"
        )
    else:
        drafted(check(model))


def test_adapters_of_peft_are_known() -> None:
    class Adapted(nn.Module):
        """An unmerged low-rank adapter around a layer, as PEFT's."""

        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.down = nn.Linear(base_layer.in_features, 2, bias=False)
            self.up = nn.Linear(2, base_layer.out_features, bias=False)

        def forward(self, hidden: Tensor) -> Tensor:
            out: Tensor = self.base_layer(hidden) + self.up(self.down(hidden))
            return out

    Adapted.__module__ = "peft.tuners.lora.layer"
    forward = Adapted.forward
    Adapted.forward = types.FunctionType(forward.__code__, {"__name__": Adapted.__module__})  # type: ignore
    model = fresh_model()
    for layer in decoder(model).layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj).eval()
    found = scan_modules(model)
    assert not found.foreign and not found.hook and found.can_use_inference_mode
    drafted(check(model))


def test_a_class_patched_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model()
    kind, calls = type(decoder(model).layers[0].mlp), []
    forward = kind.forward

    def own(self: nn.Module, hidden: Tensor) -> Tensor:
        calls.append(1)
        out: Tensor = forward(self, hidden) * (1.0 + (len(calls) > 5))
        return out

    monkeypatch.setattr(kind, "forward", own)
    fell_back(check(model, calls.clear), "own", "(LlamaMLP)")


CALLS = 0


def _global_counter(self: Any, hidden: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    out: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)) * (1.0 + (CALLS > 5))
    return out


def _listed(self: Any, hidden: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006
    calls.append(1)
    out: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)) * (1.0 + (len(calls) > 5))
    return out


def _forget() -> None:
    global CALLS
    CALLS = 0
    _listed.__defaults__[0].clear()  # type: ignore[index]


@pytest.mark.parametrize("forward", [_global_counter, _listed])
@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_forward_with_a_memory_outside_the_module(forward: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model()
    part = decoder(model).layers[0].mlp
    if where == "class":
        monkeypatch.setattr(type(part), "forward", forward)
    else:
        part.forward = types.MethodType(forward, part)
    fell_back(check(model, _forget), forward.__name__, "(LlamaMLP)")


def _same_forward(self: Any, hidden: Tensor) -> Tensor:
    out: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
    return out


def test_kernels_bound_to_an_instance_are_tested() -> None:
    model = fresh_model()
    for layer in decoder(model).layers:
        layer.mlp.forward = types.MethodType(_same_forward, layer.mlp)
    assert len(scan_modules(model).foreign) == 2
    drafted(check(model))


# --- a generate of one's own ------------------------------------------------------------------------------------------


def _any_keywords(self: Any, **kw: Any) -> Any:
    return GenerationMixin.generate(self, **kw)[:, :-1]


def _fixed(self: Any, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor, max_new_tokens: int = 3) -> Any:
    given = {"pixel_values": pixel_values, "attention_mask": attention_mask}
    return GenerationMixin.generate(self, input_ids, **given, max_new_tokens=max_new_tokens, do_sample=False)


def _positional(self: Any, ids: Tensor, *rest: Any, **kw: Any) -> Any:
    assert isinstance(ids, Tensor)
    return GenerationMixin.generate(self, ids, *rest, **kw)


@functools.wraps(GenerationMixin.generate)
def _wrapped(self: Any, *args: Any, **kw: Any) -> Any:
    return GenerationMixin.generate(self, *args, **kw) + 1


@torch.no_grad()
def _decorated(self: Any, *args: Any, **kw: Any) -> Any:
    return GenerationMixin.generate(self, *args, **kw) * 2


OVERRIDES = [_any_keywords, _fixed, _positional, _wrapped, _decorated]


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda one: one.__code__.co_name + one.__name__)
@pytest.mark.parametrize("late", [False, True], ids=["before patch", "after patch"])
def test_a_generate_of_ones_own(override: Any, late: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = fresh_model()
    base = type(model)
    own = type("Own", (base,), {"generate": override})
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    options = {"max_new_tokens": 6} | ({} if override is _fixed else {"do_sample": False})
    first = () if override is _any_keywords else (given.pop("input_ids"),)
    model.__class__ = own
    plain = model.generate(*first, **given, **options)
    model.__class__ = base if late else own
    with (
        caplog.at_level(logging.WARNING, "mmspec"),
        fuzz.patch_model(model, adversarial.BranchingDrafter(1), tree_size=8),
    ):
        if late:  # whoever gives the model another class has taken the patch off
            model.__class__ = own
        assert torch.equal(model.generate(*first, **given, **options), plain)
        stats = mmspec.stats(model, last=True)
        assert late or (stats.fallback_reason == "a generate of its own (Own)" and stats.fallback_calls == 1)
        assert late == (not stats.calls)
    assert late or "a generate of its own (Own)" in caplog.text


# --- the pass over the modules ----------------------------------------------------------------------------------------


def test_one_pass_over_the_modules_until_one_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmspec import fallback
    from mmspec.targets import model_state, module_scan

    passes: list[Any] = []
    model = fresh_model()
    with fuzz.patch_model(model, adversarial.BranchingDrafter(1), tree_size=8):
        for place in (model_state, fallback, module_scan):
            monkeypatch.setattr(place, "scan_modules", lambda model: (passes.append(model), scan_modules(model))[1])
        walks: list[Any] = []
        modules = nn.Module.modules
        monkeypatch.setattr(nn.Module, "modules", lambda self, *args: (walks.append(self), modules(self, *args))[1])
        tower = next(part for part in modules(model) if "vision" in type(part).__name__.lower())
        changes = (None, None, lambda: setattr(tower, "scaling", 2.0), None, lambda: model.lm_head.train())
        for change, count in zip(changes, (1, 1, 2, 2, 3), strict=True):
            if change is not None:
                change()
            model.generate(**tiny.build_inputs(model, 27, 1, images=[1]), **GREEDY)
            assert passes == count * [model]
        walked = list(walks)  # `unpatch` looks for hooks
    assert not any(part is model for part in walked), "a walk over all modules besides the one pass"


def test_library_code() -> None:
    assert is_library_code(GenerationMixin.generate) and is_library_code(functools.partial(nn.functional.relu))
    assert not is_library_code(_wrapped) and not is_library_code(_decorated)
    assert not is_library_code(functools.partial(steer)) and not is_library_code(Counting())


# --- the judge of whole models ----------------------------------------------------------------------------------------


def in_transformers(function: Any) -> Any:
    """The function, as if a file of transformers defined it, so that only the self-test can find its fault."""
    return types.FunctionType(
        function.__code__, {"torch": torch, "__name__": "transformers.models.faulty"}, closure=function.__closure__
    )


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], PreTrainedModel]:
    """A function that makes `forward` the MLP of a class of models that claims to be transformers' own."""

    def build(forward: Any, **changes: Any) -> PreTrainedModel:
        model = fresh_model(hidden=48, vocab=111, **changes)  # a config of its own: verdicts are cached by config
        kind = type(decoder(model).layers[0].mlp)
        monkeypatch.setattr(kind, "forward", in_transformers(forward))
        monkeypatch.setattr(selftest, "_VERDICTS", {})
        return model

    return build


def _one_scale(self: Any, hidden: Tensor) -> Tensor:
    out: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden / hidden.abs().max()))
    return out


def _previous_position(self: Any, hidden: Tensor) -> Tensor:
    """Mixes the position before, of the same forward: right in a prefill, wrong in a tree."""
    out: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden + hidden.roll(1, 1)))
    return out


@pytest.mark.parametrize("forward", [_one_scale, _previous_position])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_fails_is_refused(faulty: Any, forward: Any, dtype: str) -> None:
    model = faulty(forward, dtype=dtype)
    before = set(model.__dict__)
    with pytest.raises(mmspec.UnsupportedModelError) as failed:
        mmspec.patch(model, drafter="lookup")
    for part in ("LlavaForConditionalGeneration", "logits depend on its other tokens", "largest difference"):
        assert part in str(failed.value)
    assert "full_attention" in str(failed.value) and "mmspec env --model" in str(failed.value)
    assert set(model.__dict__) == before and not mmspec.is_patched(model)


def _amplify_rounding(model: PreTrainedModel) -> PreTrainedModel:
    """Deep layers with large weights, in which the last bits of half precision reach the logits, as trained ones do."""
    with torch.no_grad():
        for name, parameter in decoder(model).named_parameters():
            parameter *= 2 if "proj" in name else 1
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_rounding_does_to_a_model_is_no_fault(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_VERDICTS", {})
    model = _amplify_rounding(fresh_model(hidden=48, vocab=111, layers=12, dtype=dtype))
    mmspec.unpatch(mmspec.patch(model, drafter="lookup"))
    if not _rows_matter(model):
        pytest.skip("torch's products of this type do not depend on the number of rows on this processor")
    monkeypatch.setattr(selftest, "_VERDICTS", {})
    monkeypatch.setattr(selftest._TreeTest, "own_rounding", lambda self: agreement.Rounding())
    with pytest.raises(mmspec.UnsupportedModelError):
        mmspec.patch(model, drafter="lookup")


def _rows_matter(model: Any) -> bool:
    """Whether a row of a product is rounded otherwise among others."""
    weights = [layer.weight for layer in decoder(model).modules() if isinstance(layer, nn.Linear)]
    rows = [
        torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight) for weight in weights
    ]
    whole = [functional.linear(x, weight)[:1] for x, weight in zip(rows, weights, strict=True)]
    alone = [functional.linear(x[:1], weight) for x, weight in zip(rows, weights, strict=True)]
    return not all(map(torch.equal, whole, alone))


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("forward", [_one_scale, _previous_position])
def test_a_fault_of_a_model_that_amplifies_rounding(faulty: Any, forward: Any, dtype: str) -> None:
    model = _amplify_rounding(faulty(forward, layers=12, dtype=dtype))
    with pytest.raises(mmspec.UnsupportedModelError, match="logits depend on its other tokens"):
        mmspec.patch(model, drafter="lookup")


@pytest.mark.parametrize("alpha", [0.03, 1.0])
def test_a_proof_of_dependence_is_not_held_for_rounding(alpha: float) -> None:
    """`LocalResponseNorm` of [B, T, D] normalises over tokens, and is a module of torch."""
    model = _amplify_rounding(fresh_model(layers=12, dtype="bfloat16"))
    for layer in decoder(model).layers:
        layer.mlp = nn.Sequential(layer.mlp, nn.LocalResponseNorm(3, alpha=alpha))
    adapter = find_adapter(model)
    test = selftest._TreeTest(adapter, selftest.text_inputs(adapter, selftest.plan_of(adapter).prompt_lengths), True)
    with torch.no_grad():
        assert selftest._is_smooth(model) and test.own_rounding() == agreement.Rounding()


def test_the_verdict_is_found_once_per_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_VERDICTS", {})
    runs = spy_on(monkeypatch, selftest, "run_selftest")
    for seed in (1, 2):
        mmspec.unpatch(mmspec.patch(fresh_model(seed=seed), drafter="lookup"))
    assert len(runs) == 1, "the verdict does not depend on the weights"
    mmspec.unpatch(mmspec.patch(fresh_model(seed=1, layers=3), drafter="lookup"))
    assert len(runs) == 2


def test_a_model_in_train_mode_is_judged_at_its_first_call(faulty: Any) -> None:
    model = faulty(_one_scale).train()
    with fuzz.patch_model(model, adversarial.BranchingDrafter(1), tree_size=8):
        model.eval()
        model.generate(**tiny.build_inputs(model, 27, 1, images=[1]), **GREEDY)
        fell_back([mmspec.stats(model, last=True)], "failed self-test", "depend on its other tokens")


def test_the_self_test_is_cheaper_than_fifteen_tokens() -> None:
    result = selftest.run_selftest(find_adapter(fresh_model()))
    assert result.passed and result.num_forwards < 15 and not result.with_image
    assert "passed" in result.describe() and "text, 9 forwards" in result.describe()


def test_the_self_test_leaves_generators_and_model_as_they_were() -> None:
    model = fresh_model()
    before, state = {name: weight.clone() for name, weight in model.state_dict().items()}, torch.get_rng_state()
    attributes = set(model.__dict__)
    selftest.run_selftest(find_adapter(model))
    assert torch.equal(torch.get_rng_state(), state) and set(model.__dict__) == attributes
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_a_conversation_may_begin_before_the_patch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M-RoPE models keep the offset of the last prompt's positions, which the next turn reads."""
    model = tiny.build_model(tiny.ModelSpec(family, seed=3))
    model.generation_config.eos_token_id = None
    first = tiny.build_inputs(model, 4, 1, images=[2], padding="none")
    options = {"max_new_tokens": 6, "do_sample": False}

    def two_turns(patched: bool) -> Tensor:
        cache = DynamicCache(config=model.config.get_text_config())
        turn = model.generate(**first, **options, **{CACHE_ARGUMENT: cache}, return_dict_in_generate=True)
        following = tiny.build_next_turn(first, turn.sequences, 1, model.tiny_spec)
        if patched:
            mmspec.patch(model, "lookup")
        found: Tensor = model.generate(**following, **options, **{CACHE_ARGUMENT: turn.past_key_values})
        return found

    plain = two_turns(patched=False)
    monkeypatch.setattr(selftest, "_VERDICTS", {})
    assert torch.equal(two_turns(patched=True), plain)
    assert not mmspec.stats(model).fallback_reason


@FAMILIES
def test_the_verdict_does_not_depend_on_the_callers_modes(family: str) -> None:
    """It is stored for all models of the class, so a caller's half precision must not enter it."""
    adapter = find_adapter(fresh_model(family))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        inside = selftest.run_selftest(adapter)
    outside = selftest.run_selftest(adapter)
    assert inside.passed and outside.passed and inside.max_difference == outside.max_difference
