"""Attention of the vision tower: as captured in a call, against transformers' attention weights, patch by patch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import adversarial as adversarial
import pytest
import tiny_models as tiny
import torch
from parity import get_model, get_prompt
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel, SiglipVisionConfig

import mmspec
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.interfaces import Prompt, VisualTokens
from mmspec.targets.registry import find_adapter
from mmspec.vision.compressors.elastic import Elastic
from mmspec.vision.compressors.select import Identity, TopScore, saliency
from mmspec.vision.registry import build_compressor


class AttendingIdentity(Identity):
    """Keeps every token and requires the saliency."""

    attends = True


def siglip() -> PreTrainedModel:
    """A LLaVA whose tower has no class token, and whose projector is given the last but one layer of three."""
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=12,
        patch_size=4,
        vision_use_head=False,
    )
    usual = get_model("llava")
    config = LlavaConfig(
        vision_config=vision,
        text_config=usual.config.text_config,
        image_seq_length=9,
        image_token_id=tiny.special_ids(usual.tiny_spec).image,
        vision_feature_select_strategy="full",
        vision_feature_layer=-2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = LlavaForConditionalGeneration(config).eval()
    model.generation_config = usual.generation_config
    model.tiny_spec = usual.tiny_spec
    return model


FAMILIES = ("llava", "llava_next", "llava_next_video", "llava_onevision")
MODELS = {family: partial(get_model, family) for family in FAMILIES} | {"siglip": siglip}


def slow(model: PreTrainedModel, given: tiny.Inputs) -> tuple[Tensor, Tensor]:
    """([P, D], [P]) projected patches of all pictures and tiles, and the weights that eager attention gives them."""
    model = copy.deepcopy(model)
    model.model.vision_tower.set_attn_implementation("eager")
    pixels = given["pixel_values"].flatten(0, -4)
    layer, first = model.config.vision_feature_layer, model.config.vision_feature_select_strategy == "default"
    with torch.no_grad():
        out = model.model.vision_tower(pixels, output_attentions=True, output_hidden_states=True)
        states = out.hidden_states[layer][:, int(first) :]
        weights = out.attentions[layer].mean(1)
        weights = weights[:, 0, 1:] if first else weights.mean(1)
        return model.model.multi_modal_projector(states).flatten(0, 1), weights.flatten()


def expected(model: PreTrainedModel, given: tiny.Inputs, prompt: Prompt) -> Tensor:
    """[M] of each visual token by what it is: the patch that it equals, or a newline."""
    patches, weights = slow(model, given)
    tokens = prompt.hidden_states[0][prompt.visual_mask]
    apart = torch.cdist(tokens, patches, compute_mode="donot_use_mm_for_euclid_dist")
    line = getattr(model.model, "image_newline", None)
    newline = torch.zeros(len(tokens)).bool() if line is None else (tokens - line).abs().amax(-1) < 1e-5
    assert (apart.amin(1)[~newline] < 1e-4).all() and (line is None or newline.any())
    return torch.where(newline, 0.0, weights[apart.argmin(1)])


@pytest.mark.parametrize("sort", list(MODELS))
@pytest.mark.parametrize("padding", ["left", "right"])
def test_saliency_is_the_attention_of_the_projected_layer(sort: str, padding: str) -> None:
    model = MODELS[sort]()
    for seed in range(8):
        rows = 1 + seed % 3
        given = tiny.build_inputs(
            model, seed, rows, padding=padding, images=[1 + (row + seed) % 2 for row in range(rows)]
        )
        prompt = get_prompt(model, given, AttendingIdentity())
        assert prompt.visual_saliency is not None and prompt.visual_saliency.shape == prompt.input_ids.shape
        wanted = expected(model, given, prompt)
        torch.testing.assert_close(prompt.visual_saliency[prompt.visual_mask], wanted, rtol=1e-4, atol=1e-6)
        assert not prompt.visual_saliency[~prompt.visual_mask].any() and wanted.unique().numel() > 4
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        assert not any(hook.__module__ == "mmspec.vision.grids.attention" for hook in hooks)


@pytest.mark.parametrize("sort", list(MODELS))
def test_several_sequences_per_prompt(sort: str) -> None:
    model = MODELS[sort]()
    given = tiny.build_inputs(model, 3, 2, images=[2, 1])
    once, thrice = (
        get_prompt(model, given, AttendingIdentity()),
        get_prompt(model, given, AttendingIdentity(), num_return_sequences=3),
    )
    assert once.visual_saliency is not None and thrice.visual_saliency is not None
    assert torch.equal(thrice.visual_saliency, once.visual_saliency.repeat_interleave(3, 0))


def windows(patches: Tensor, stride: int) -> Tensor:
    """[e // s, e // s] the mean of each window of [e, e], incomplete windows left out."""
    edge = len(patches) // stride
    return torch.stack(
        [
            patches[y * stride : (y + 1) * stride, x * stride : (x + 1) * stride].mean()
            for y in range(edge)
            for x in range(edge)
        ]
    ).view(edge, edge)


def halved(patches: Tensor) -> Tensor:
    """[ceil(e / 2), ceil(e / 2)] of [e, e], bilinear, point by point."""
    edge, size = len(patches), ceil(len(patches) / 2)

    def at(index: int) -> list[tuple[int, float]]:
        where = max(0.0, (index + 0.5) * edge / size - 0.5)
        low = min(int(where), edge - 1)
        return [(low, 1 - (where - low)), (min(low + 1, edge - 1), where - low)]

    rows = [[sum(patches[i, j] * a * b for i, a in at(y) for j, b in at(x)) for x in range(size)] for y in range(size)]
    return torch.stack([torch.stack(row) for row in rows])  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llava_next_video", "llava_onevision"])
def test_frames_of_clips(family: str) -> None:
    """A token pooled from several patches has their mean attention, a newline token none."""
    model, values = get_model(family), set()
    for seed in range(6):
        given = tiny.build_inputs(model, seed, 2, images=[0, 0], videos=[1, 1 + seed % 2])
        pixels = given["pixel_values_videos"]
        weights = slow(model, given | {"pixel_values": pixels})[1]
        edge = model.config.vision_config.image_size // model.config.vision_config.patch_size
        smaller: Callable[[Tensor], Tensor] = halved
        if family == "llava_next_video":
            smaller = partial(windows, stride=model.config.spatial_pool_stride)
        wanted: list[Tensor] = []
        for clip in weights.view(*pixels.shape[:2], edge, edge):
            wanted += [smaller(frame).flatten() for frame in clip]
            wanted += [torch.zeros(1)] if family == "llava_onevision" else []
        prompt = get_prompt(model, given, AttendingIdentity())
        assert prompt.visual_saliency is not None
        torch.testing.assert_close(prompt.visual_saliency[prompt.visual_mask], torch.cat(wanted), rtol=1e-4, atol=1e-6)
        values |= set(prompt.visual_saliency[prompt.visual_mask].tolist())
    assert len(values) > 20 or family == "llava_onevision"  # of which a frame is one token here


@pytest.mark.parametrize("edge", [3, 4, 5, 8])
def test_onevision_of_larger_frames(edge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where half of an edge is not an integer."""
    model = get_model("llava_onevision")
    monkeypatch.setattr(model.config.vision_config, "image_size", edge * model.config.vision_config.patch_size)
    shares = torch.rand(6, edge * edge, generator=torch.Generator().manual_seed(edge))
    found = find_adapter(model).layout.token_saliency(shares, {"pixel_values_videos": torch.zeros(2, 3, 1, 1, 1)})
    frames = [halved(frame.view(edge, edge)).flatten() for frame in shares]
    wanted = torch.cat([*frames[:3], torch.zeros(1), *frames[3:], torch.zeros(1)])
    assert found is not None
    torch.testing.assert_close(found, wanted)


def test_several_images_of_onevision_have_no_tiles() -> None:
    """As in its processor: rows with more than one image have no tiles."""
    model = get_model("llava_onevision")
    sizes, numbers = torch.tensor([[16, 16]] * 3), torch.tensor([2, 1])
    family = find_adapter(model).layout
    assert family.tiles_per_image(sizes, {"batch_num_images": numbers}) == [1, 1, 5]  # type: ignore[attr-defined]
    assert family.tiles_per_image(sizes, {}) == [5, 5, 5]  # type: ignore[attr-defined]


def test_unsupported_inputs_have_no_saliency() -> None:
    """A tower of another build, and pictures and clips in one call."""
    model = get_model("qwen2_5_vl")
    assert get_prompt(model, tiny.build_inputs(model, 1, 2, images=[1, 1]), AttendingIdentity()).visual_saliency is None
    for family in ("llava_next_video", "llava_onevision"):
        model = get_model(family)
        given = tiny.build_inputs(model, 1, 2, images=[1, 1], videos=[1, 0])
        assert get_prompt(model, given, AttendingIdentity()).visual_saliency is None


def test_none_if_not_required_or_without_images() -> None:
    model = get_model("llava")
    assert get_prompt(model, tiny.build_inputs(model, 1, 2, images=[1, 1]), "relevant:2").visual_saliency is None
    assert get_prompt(model, tiny.build_inputs(model, 1, 2, images=[0, 0]), AttendingIdentity()).visual_saliency is None


def test_layers_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    model = siglip()
    for layer, is_captured in ((-2, True), ([-3, -2], True), (2, True), (0, False), (-9, False), (9, False)):
        monkeypatch.setattr(model.config, "vision_feature_layer", layer)
        found = find_adapter(model).layout.attention_capture()
        assert (found is not None) == is_captured, layer
        layers = model.model.vision_tower.encoder.layers if found else []
        assert found is None or found.layer is layers[1].self_attn, layer


def test_calls_of_other_threads_are_not_captured() -> None:
    """Two calls on one model at the same time, the encoding of one within that of the other."""
    model = MODELS["llava"]()
    first, second = (tiny.build_inputs(model, seed, 1, images=[1]) for seed in (1, 2))
    capture = find_adapter(model).layout.attention_capture()
    assert capture is not None
    with capture.active():
        other = threading.Thread(target=lambda: model.generate(**second, max_new_tokens=2, do_sample=False))
        other.start()
        other.join()
        assert capture.scores() is None
        model.generate(**first, max_new_tokens=2, do_sample=False)
    shares = capture.scores()
    assert shares is not None and shares.shape == (1, 9)
    torch.testing.assert_close(shares[0], slow(model, first)[1], rtol=1e-4, atol=1e-6)


class Spy:
    """A compressor that records input and output of another one."""

    attends = True

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.max_tokens = inner, inner.name, inner.max_tokens
        self.calls: list[tuple[VisualTokens, VisualTokens]] = []

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """See `Compressor`."""
        few: VisualTokens = self.inner.compress(visual_tokens, query, max_tokens)
        self.calls.append((visual_tokens, few))
        return few


@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_compressor_receives_the_attention_of_the_tower(padding: str) -> None:
    """Scores are at their own tokens, `salient` keeps the highest, and the output is unchanged."""
    drafter = EagleDrafter(EagleHead(EagleConfig(32, 64, 4, 2, 120)), "decoupled", num_layers=2)
    model, spy = MODELS["llava"](), Spy(build_compressor("salient:3"))
    given = tiny.build_inputs(model, 5, 3, images=[2, 1, 1], padding=padding)
    plain = model.generate(**given, max_new_tokens=12, do_sample=False)
    wanted = slow(model, given)[1].split([18, 9, 9])
    mmspec.patch(model, drafter=drafter, compressor=spy, tree_size=8)
    try:
        assert torch.equal(model.generate(**given, max_new_tokens=12, do_sample=False), plain)
        records = mmspec.stats(model, last=True).compression
    finally:
        mmspec.unpatch(model)
    [(visual, few)] = spy.calls
    assert visual.saliency is not None
    for row, scores in enumerate(wanted):
        mine = visual.saliency[row][visual.mask[row]]
        torch.testing.assert_close(mine, scores[len(scores) - len(mine) :], rtol=1e-4, atol=1e-6)
        best = mine.topk(3).indices.sort().values.tolist()
        assert list(records[row].kept_indices or ()) == best and few.mask[row].all()


def test_which_compressors_require_attention() -> None:
    assert build_compressor("salient:3").attends and not build_compressor("relevant:3").attends  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]):
        branches = [Identity(), TopScore(2, "salient", saliency, attends=True)]
        assert Elastic(8, 2).attends and Elastic(8, 2, branches).attends and not Elastic(8, 2, branches[:1]).attends
