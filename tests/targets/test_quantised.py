"""Models with quantised weights, and models in half precision.

Float32 calls are compared with plain `generate` of the same model: tokens, scores, caches, generator. In half precision
rows may differ from a near-tie on. Real packages are used where they are installed; stand-ins run always.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import adversarial as adversarial
import packed_weights as packed
import pytest
import tiny_models as tiny
import torch
from near_ties import assert_equal_up_to_near_ties
from parity import FAMILIES, GREEDY, SAMPLED, check, drafted, fell_back, generate_plain, speculate
from spies import spy_on
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import mmspec
from mmspec.cpu.c_kernel import load_kernel
from mmspec.targets.c_forwards import CForwards
from mmspec.targets.module_scan import scan_modules
from research.bench.peers.write_shape_gguf import write_shape
from research.bench.shape.models import TEXT_SHAPES

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
SKIPPED = packed.UNQUANTISED


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every round of a recognised model, whether the C decoder computed it."""
    if load_kernel() is None:
        pytest.skip("no compiler or another processor")
    return spy_on(monkeypatch, CForwards, "score", lambda scored, *_: scored is not None)


def fresh_model(family: str = "llava", **changes: Any) -> PreTrainedModel:
    """A model wide enough for groups of 32 in all layers of its decoder."""
    return tiny.build_model(tiny.ModelSpec(family, **{"hidden": 64, "kv_heads": 4, "seed": 29, **changes}))


def layers_of(model: PreTrainedModel) -> list[nn.Linear]:
    """The MLP's layers of the decoder."""
    return [
        part for layer in model.get_decoder().layers for part in layer.mlp.children() if isinstance(part, nn.Linear)
    ]


def in_decoder(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "language_model" in name


def load(saved: PreTrainedModel, folder: Path, dtype: str, config: Any = None) -> PreTrainedModel:
    """The model in `folder`, as users load it."""
    options = {} if config is None else {"quantization_config": config}
    model = type(saved).from_pretrained(folder, device_map={"": "cpu"}, dtype=getattr(torch, dtype), **options)
    model.tiny_spec = saved.tiny_spec
    return model.eval()


def assert_drafted(model: PreTrainedModel) -> None:
    """Assert that trees are scored, with the plain output; in half precision up to near-ties."""
    if model.dtype != torch.float32:
        assert assert_equal_up_to_near_ties(model) > 0
        return
    drafted(check(model))


def assert_exact_or_named(model: PreTrainedModel, name: str) -> None:
    """Either way, for kernels whose precision depends on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for stats in check(model):
            assert stats.num_draft_tokens > 0 or name in stats.fallback_reason


# --- half precision --------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@FAMILIES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_a_cpu(family: str, dtype: str) -> None:
    assert_drafted(fresh_model(family, dtype=dtype))


# --- GGUF, and others that are no longer quantised --------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("kind", ["q4_0", "bf16"])
def test_a_gguf_loaded_by_transformers(kind: str, dtype: str, tmp_path: Path, forwards: list[bool]) -> None:
    """Where there is no kernel for its blocks it is unpacked at loading, and is a model like others since."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    write_shape(str(tmp_path / "tiny.gguf"), kind, asdict(TEXT_SHAPES["tiny"]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=getattr(torch, dtype)).eval()
    assert type(model.lm_head) is nn.Linear and model.hf_quantizer is not None
    inputs = {"input_ids": torch.tensor([[3, 5, 7, 9, 3, 5], [2, 2, 4, 2, 2, 4]])}
    for mode in (GREEDY, SAMPLED):
        results = []
        for drafter in (None, "none", "bush"):
            with nullcontext() if drafter is None else speculate(model, drafter, results[0]):
                results.append(generate_plain(model, inputs, 5, pad_token_id=0, **mode))
        assert torch.equal(results[1], results[2])
        assert dtype != "float32" or torch.equal(results[0], results[1])
    assert forwards and all(forwards)


def test_a_model_that_a_quantiser_has_left_plain_runs_in_c(forwards: list[bool]) -> None:
    """As with `dequantize=True` of several of them."""
    model = fresh_model()
    model.hf_quantizer = types.SimpleNamespace(is_compileable=False)
    check(model)
    assert forwards and all(forwards) and scan_modules(model).can_use_inference_mode
    model.get_decoder().layers[0].mlp.act_fn = _Packed()
    assert not scan_modules(model).can_use_inference_mode


class _Packed(nn.SiLU):
    """A module of another package."""


# --- torchao ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torchao() -> Any:
    """`torchao.quantization`."""
    return pytest.importorskip("torchao.quantization", reason="torchao is not installed")


def weight_only(torchao: Any, bits: int) -> Any:
    """A config of weight-only quantisation. torchao's own format of four bits has no kernel for CPUs."""
    if bits == 8:
        return torchao.Int8WeightOnlyConfig()
    return torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32))


@DTYPES
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_torchao(torchao: Any, bits: int, dtype: str) -> None:
    model = fresh_model(dtype=dtype)
    torchao.quantize_(model, weight_only(torchao, bits), filter_fn=in_decoder)
    assert len(scan_modules(model).foreign) == 14
    assert_drafted(model)


@DTYPES
@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_loaded_with_torchao(torchao: Any, bits: int, dtype: str, tmp_path: Path) -> None:
    from transformers import TorchAoConfig

    saved = fresh_model()
    saved.save_pretrained(tmp_path)
    config = TorchAoConfig(weight_only(torchao, bits), modules_to_not_convert=SKIPPED)
    assert_drafted(load(saved, tmp_path, dtype, config))


@DTYPES
def test_activations_of_torchao(torchao: Any, dtype: str) -> None:
    for config in (
        torchao.Int8DynamicActivationInt8WeightConfig(),
        torchao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=torchao.PerGroup(32)),
    ):
        model = fresh_model(dtype=dtype)
        torchao.quantize_(model, config, filter_fn=in_decoder)
        fell_back(check(model), "quantised activations of model.language_model.layers.0.self_attn.q_proj (Linear, Int")


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def load_bitsandbytes(folder: Path, dtype: str, **options: Any) -> PreTrainedModel:
    from transformers import BitsAndBytesConfig

    saved = fresh_model()
    saved.save_pretrained(folder)
    return load(saved, folder, dtype, BitsAndBytesConfig(llm_int8_skip_modules=SKIPPED, **options))


@pytest.mark.parametrize("double", [False, True], ids=["", "double quantisation"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes(bitsandbytes: Any, kind: str, double: bool, tmp_path: Path) -> None:
    options = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
    options["bnb_4bit_compute_dtype"] = torch.bfloat16
    assert_drafted(load_bitsandbytes(tmp_path, "bfloat16", load_in_4bit=True, **options))


def test_four_bits_of_bitsandbytes_in_float32(bitsandbytes: Any, tmp_path: Path) -> None:
    """On CPUs with AVX-512 the kernel multiplies in bfloat16, so that float32 logits do not agree."""
    model = load_bitsandbytes(tmp_path, "float32", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert_exact_or_named(model, "(Linear4bit, Params4bit)")


@DTYPES
def test_eight_bits_of_bitsandbytes(bitsandbytes: Any, dtype: str, tmp_path: Path) -> None:
    model = load_bitsandbytes(tmp_path, dtype, load_in_8bit=True)
    fell_back(check(model), "quantised activations of", "q_proj (Linear8bitLt")


def test_an_adapter_on_four_bits(bitsandbytes: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = load_bitsandbytes(tmp_path, "bfloat16", load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model.add_adapter(config)
    assert_drafted(model.eval())


# --- checkpoints of other formats -------------------------------------------------------------------------------------


def load_packed(name: str, folder: Path, dtype: str) -> PreTrainedModel:
    saved = fresh_model(dtype="bfloat16")
    packed.save_quantised(saved, folder, name)
    return load(saved, folder, dtype)


@DTYPES
def test_compressed_tensors(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    assert_drafted(load_packed("w4a16", tmp_path / "weights", dtype))
    fell_back(
        check(load_packed("w8a8", tmp_path / "activations", dtype)), "quantised activations of", "q_proj (Linear)"
    )


@pytest.mark.slow  # the package compiles its kernel in the first forward
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_gptq_and_awq(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    if name == "gptq":
        pytest.importorskip("optimum", reason="optimum is not installed")
    model = load_packed(name, tmp_path, "bfloat16")
    assert len(scan_modules(model).foreign) == 14
    assert_drafted(model)


# --- stand-ins --------------------------------------------------------------------------------------------------------


class Weight(nn.Parameter):
    """A parameter of a class of its own, as torchao's."""

    @classmethod
    def __torch_function__(cls, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["act_quant_kwargs", "activation_quantization", "input_quant_func"])
def test_a_weight_whose_input_is_quantised(name: str) -> None:
    model = fresh_model()
    for part in layers_of(model):
        part.weight = Weight(part.weight.detach(), requires_grad=False)
        setattr(part.weight, name, None)
    assert_drafted(model)
    setattr(layers_of(model)[3].weight, name, object())
    fell_back(check(model), "quantised activations of model.language_model.layers.1.mlp.gate_proj (Linear, Weight)")


def test_a_vision_tower_may_quantise_its_activations() -> None:
    model = fresh_model()
    layer = model.model.vision_tower.encoder.layers[0].mlp.fc1
    layer.quantization_scheme = types.SimpleNamespace(input_activations=object())
    assert_drafted(model)


def test_a_scheme_of_compressed_tensors() -> None:
    model = fresh_model()
    scheme = types.SimpleNamespace(input_activations=None, output_activations=None)
    layers_of(model)[0].quantization_scheme = scheme  # type: ignore[assignment]
    assert_drafted(model)
    scheme.input_activations = object()
    fell_back(check(model), "quantised activations of", "layers.0.mlp.gate_proj (Linear)")


class Packing(nn.Linear):
    """Packs its weight in the first forward and records that, as bitsandbytes' layers."""

    def forward(self, input: Tensor) -> Tensor:
        self.is_packed = True
        return torch.nn.functional.linear(input, self.weight)


class Linear8bitLt(Packing):
    """Eight bits by name."""


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], PreTrainedModel]:
    """A function that builds a model with `Packing` layers that claim to be of bitsandbytes."""
    for kind in (Packing, Linear8bitLt):
        monkeypatch.setattr(kind, "__module__", "bitsandbytes.nn.modules")
    code = Packing.forward.__code__
    forward = types.FunctionType(code, {"torch": torch, "__name__": "bitsandbytes.nn.modules"}, "forward")
    monkeypatch.setattr(Packing, "forward", forward)

    def build() -> PreTrainedModel:
        model = fresh_model()
        for part in layers_of(model):
            part.__class__ = Packing
            part.is_packed = False  # type: ignore[assignment]
        return model

    return build


def test_a_library_layer_may_pack_its_weight(packing: Callable[[], PreTrainedModel]) -> None:
    model = packing()
    assert len(scan_modules(model).foreign) == 6
    inputs = tiny.build_inputs(model, 27, 1, images=[1])
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    model.generate(**inputs, **GREEDY)
    assert layers_of(model)[0].is_packed and mmspec.stats(model).num_draft_tokens > 0
    mmspec.unpatch(model)
    assert_drafted(model)


def test_a_layer_of_eight_bits(packing: Callable[[], PreTrainedModel]) -> None:
    model = packing()
    layers_of(model)[1].__class__ = Linear8bitLt
    fell_back(check(model), "quantised activations of", "layers.0.mlp.up_proj (Linear8bitLt)")
