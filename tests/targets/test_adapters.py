"""Models with adapters of PEFT: LoRA and others, unmerged, switched between calls, in a `PeftModel`.

Every call is compared with plain `generate` of the same model: tokens and generator. Without the package stand-ins run
that have its structure and claim to be its modules.
"""

from __future__ import annotations

import copy
import functools
import types
from pathlib import Path
from typing import Any

import adversarial as adversarial
import pytest
import tiny_models as tiny
import torch
from parity import GREEDY, MODES, base_of, check, drafted, fell_back
from torch import Tensor, nn
from transformers import PreTrainedModel

import mmspec
from mmspec.targets.module_scan import scan_modules


@pytest.fixture(autouse=True)
def _same_adapters() -> None:
    """PEFT draws the weights of adapters from the default generator."""
    torch.manual_seed(0)


LAYERS = ["q_proj", "v_proj", "down_proj"]


def fresh_model() -> PreTrainedModel:
    return tiny.build_model(tiny.ModelSpec(seed=29))


# --- with the package -------------------------------------------------------------------------------------------------


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="peft is not installed")


def lora(peft: Any, **changes: Any) -> Any:
    """A config of LoRA whose adapters change the output."""
    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 16, "target_modules": LAYERS, "init_lora_weights": False, **changes}
    )


def wrapped(peft: Any, config: Any) -> Any:
    """A `PeftModel` whose adapter is not its initial one, which may change nothing."""
    model = peft.get_peft_model(fresh_model(), config).eval()
    rng = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.3 * torch.randn(weight.shape, generator=rng)
    return model


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_an_adapter_in_the_model(peft: Any, dora: bool) -> None:
    model = fresh_model()
    model.add_adapter(lora(peft, use_dora=dora))
    model.eval()
    assert not scan_modules(model).foreign
    drafted(check(model))


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_adapters_are_switched_between_calls(peft: Any, task: str | None) -> None:
    model = peft.get_peft_model(fresh_model(), lora(peft, task_type=task)).eval()
    model.add_adapter("second", lora(peft))
    model.eval()
    inputs = tiny.build_inputs(base_of(model), 27, 2, images=[1, 1])

    def run() -> list[Tensor]:
        outputs = []
        for name in ("default", "second"):
            model.set_adapter(name)
            outputs.append(model.generate(**inputs, **GREEDY))
        with model.disable_adapter():
            outputs.append(model.generate(**inputs, **GREEDY))
        model.merge_adapter()
        outputs.append(model.generate(**inputs, **GREEDY))
        model.unmerge_adapter()
        return outputs

    plain = run()
    assert not torch.equal(plain[0], plain[1]) and not torch.equal(plain[1], plain[2])
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    assert all(map(torch.equal, run(), plain))
    stats = mmspec.stats(model)
    assert stats.calls == 4 and stats.fallback_calls == 0 and stats.num_draft_tokens > 0


@pytest.mark.parametrize("mixed", [False, True])
def test_a_wrapper(peft: Any, mixed: bool) -> None:
    drafted(check(peft.get_peft_model(fresh_model(), lora(peft), mixed=mixed).eval()))


def test_a_wrapper_that_is_loaded(peft: Any, tmp_path: Path) -> None:
    peft.get_peft_model(fresh_model(), lora(peft)).save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(fresh_model(), tmp_path).eval()
    drafted(check(model))
    inputs = tiny.build_inputs(base_of(model), 27, 1, images=[1])
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    assert mmspec.is_patched(model) and mmspec.is_patched(model.get_base_model())
    assert mmspec.compare(model, inputs, max_new_tokens=8, do_sample=False).identical
    calls = mmspec.stats(model).calls
    with mmspec.disabled(model):
        model.generate(**inputs, **GREEDY)
    model.generate(**inputs, **GREEDY, mmspec={"enabled": False})
    assert mmspec.stats(model).calls == calls
    twin = copy.deepcopy(model)
    twin.generate(**inputs, **GREEDY)
    assert mmspec.stats(twin, last=True).num_draft_tokens > 0 and mmspec.stats(model).calls == calls


def test_an_adapter_for_each_row(peft: Any) -> None:
    model = peft.get_peft_model(fresh_model(), lora(peft)).eval()
    drafted(check(model, adapter_names=["default", "__base__"]))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_learned_prompts_are_left_to_transformers(peft: Any, kind: str) -> None:
    model = wrapped(peft, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    fell_back(check(model), "PeftModelForCausalLM.prepare_inputs_for_generation")
    drafted(check(model.get_base_model()))


@pytest.mark.parametrize("after", [[], [25]], ids=["last", "before another token"])
def test_adapters_that_a_token_activates(peft: Any, after: list[int]) -> None:
    """aLoRA adapts the last tokens of a forward: in a tree they are others."""
    model = wrapped(peft, lora(peft, task_type="CAUSAL_LM", alora_invocation_tokens=[20, 21]))
    ending = torch.tensor([20, 21, *after])
    found = check(model, prepare=lambda ids: torch.cat([ids[:, : -len(ending)], ending.expand(len(ids), -1)], 1))
    fell_back(found, "forward pre-hook", "alora")


def test_a_mixture_of_adapters(peft: Any, tmp_path: Path) -> None:
    """X-LoRA weighs its adapters in a forward over the whole input."""
    for name in ("0", "1"):
        peft.get_peft_model(fresh_model(), lora(peft)).save_pretrained(tmp_path / name)
    model = fresh_model()
    model.config.use_cache = False
    adapters = {name: str(tmp_path / name) for name in ("0", "1")}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters=adapters)
    # Without a cache transformers encodes the images again for each token, so that none may be a placeholder.
    options = {"suppress_tokens": [tiny.special_ids(model.tiny_spec).image]}
    fell_back(check(peft.get_peft_model(model, config).eval(), **options), "forward pre-hook", "XLora")


def test_a_router_over_all_tokens(peft: Any) -> None:
    if not hasattr(peft, "LilyConfig"):
        pytest.skip("this version of peft has no Lily")
    found = check(wrapped(peft, peft.LilyConfig(target_modules=LAYERS)))
    fell_back(found, "layers.0.self_attn.q_proj", "logits depend on its other tokens")


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "OFTConfig", "VeraConfig"])
def test_other_adapters_are_tested(peft: Any, kind: str) -> None:
    options = {"feedforward_modules": ["down_proj"]} if kind == "IA3Config" else {}
    model = wrapped(peft, getattr(peft, kind)(target_modules=LAYERS, **options))
    assert scan_modules(base_of(model)).foreign
    drafted(check(model))


# --- stand-ins --------------------------------------------------------------------------------------------------------


def in_peft(function: Any, module: str) -> Any:
    """The function, as if that module of PEFT defined it."""
    return types.FunctionType(
        function.__code__, {"torch": torch, "__name__": module, "__builtins__": __builtins__}, function.__name__
    )


class Tuner(nn.Module):
    """As PEFT's `LoraModel`: the model inside, found by attribute."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class Wrapper(nn.Module):
    """As PEFT's `PeftModelForCausalLM`. With a learned prompt it replaces a method of the model in each call."""

    def __init__(self, model: PreTrainedModel, prompt: bool = False) -> None:
        super().__init__()
        self.base_model = model if prompt else Tuner(model)
        self.prepare = model.prepare_inputs_for_generation
        self.prompt = prompt

    def get_base_model(self) -> Any:
        return self.base_model if self.prompt else self.base_model.model

    def learned(self, *args: Any, **kwargs: Any) -> Any:
        return self.prepare(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.base_model.prepare_inputs_for_generation = self.learned
        try:
            return self.base_model.generate(*args, **kwargs)
        finally:
            self.base_model.prepare_inputs_for_generation = self.prepare


class PeftWrapper(Wrapper):
    """The same, of PEFT by its module."""


PeftWrapper.__module__ = "peft.peft_model"


def test_the_model_in_a_wrapper_is_patched() -> None:
    drafted(check(PeftWrapper(fresh_model())))
    model = Wrapper(fresh_model())
    model.config = model.get_base_model().config
    with pytest.raises(TypeError, match=r"got Wrapper, which is none\. If it wraps one, patch the wrapped model"):
        mmspec.patch(model)


def test_a_wrapper_that_replaces_a_method_in_each_call() -> None:
    model = PeftWrapper(fresh_model(), prompt=True)
    fell_back(check(model), "a prepare_inputs_for_generation of its own (Wrapper.learned)")
    assert "prepare_inputs_for_generation" in model.base_model.__dict__
    drafted(check(model.base_model))


def _alora_offsets_pre_forward_hook(target: Any, args: Any, kwargs: Any, alora_offsets: Any) -> Any:
    hidden = args[0].clone()
    hidden[:, -1:] += 2.0
    return (hidden, *args[1:]), kwargs


def test_a_hook_of_peft_on_the_last_position() -> None:
    model = fresh_model()
    hook = in_peft(_alora_offsets_pre_forward_hook, "peft.tuners.lora.model")
    layer = model.get_decoder().layers[0].mlp.down_proj
    layer.register_forward_pre_hook(functools.partial(hook, alora_offsets=[1, 1]), with_kwargs=True)
    fell_back(check(model), "forward pre-hook (_alora_offsets_pre_forward_hook)")


class Routed(nn.Linear):
    """Scales by a mean over all tokens, as Lily's router; `share` of it."""

    share = 1.0

    def forward(self, input: Tensor) -> Tensor:
        weight = torch.nn.functional.linear(input, self.weight)
        return weight * (1 + self.share * weight.abs().mean())


Routed.__module__ = "peft.tuners.lily.layer"
Routed.forward = in_peft(Routed.forward, Routed.__module__)  # type: ignore[method-assign]


@MODES
def test_the_self_test_runs_again_when_the_adapter_is_switched(mode: Any) -> None:
    model = fresh_model()
    layer: Any = model.get_decoder().layers[0].mlp.down_proj
    layer.__class__ = Routed
    inputs = tiny.build_inputs(model, 27, 2, images=[1, 1])
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    for name, share, is_plain in (("a", [0.0], False), ("b", [1.0], True), ("c", [0.0], False)):
        layer._active_adapter, layer.__dict__["share"] = [name], torch.tensor(share)
        model.generate(**inputs, **mode)
        stats = mmspec.stats(model, last=True)
        assert bool(stats.fallback_reason) == is_plain and bool(stats.num_draft_tokens) != is_plain
        assert not is_plain or "down_proj (Routed)" in stats.fallback_reason
