"""Grids of the adapters whose models are in `tests/helpers/zoo`: each visual token once, where its picture put it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import pytest
import tiny_models as tiny
import torch
from parity import get_prompt
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from mmspec.drafters.heads.base.compressed_inputs import prompt_grids
from mmspec.interfaces import Prompt, VisualGrid
from mmspec.targets.registry import find_adapter

FAMILIES = ("internvl", "idefics3", "smolvlm", "mistral3", "vipllava")
FAMILY = pytest.mark.parametrize("family", FAMILIES)


@lru_cache
def build_model(family: str) -> PreTrainedModel:
    """A model that tests share."""
    model = tiny.build_model(tiny.ModelSpec(family, seed=8))
    model.generation_config.eos_token_id = None
    return model


def image_features(model: Any, inputs: tiny.Inputs) -> Tensor:
    """[N, D] features of all images, in the order of the inputs."""
    names = ("pixel_values", "pixel_attention_mask", "image_sizes")
    with torch.no_grad():
        images = model.get_image_features(**{name: inputs[name] for name in names if name in inputs}, return_dict=True)
    return torch.cat([image.reshape(-1, image.shape[-1]) for image in images.pooler_output])


def grid_states(prompt: Prompt, grid: VisualGrid) -> Tensor:
    """[tokens, D] embeddings of a grid."""
    return prompt.hidden_states[0][grid.row, list(grid.token_indices)]


@pytest.mark.every(2)
@FAMILY
@pytest.mark.parametrize("padding", ["left", "right"])
def test_grids_cover_the_placeholders_in_the_order_of_the_features(family: str, padding: str) -> None:
    model = build_model(family)
    for seed in range(8):
        images = None if seed % 2 else [1] * (1 + seed % 3)
        inputs = tiny.build_inputs(model, seed, 1 + seed % 3, padding=padding, images=images)
        prompt = get_prompt(model, inputs)
        covered = torch.zeros_like(prompt.input_ids)
        for grid in prompt.grids:
            assert len(grid.token_indices) == grid.num_tokens > 0
            covered[grid.row, list(grid.token_indices)] += 1
        assert torch.equal(covered, prompt.visual_mask.long()), "not every visual token once"
        assert [grid.row for grid in prompt.grids] == sorted(grid.row for grid in prompt.grids)
        states = torch.cat([grid_states(prompt, grid) for grid in prompt.grids])
        torch.testing.assert_close(states, image_features(model, inputs), rtol=1e-4, atol=1e-4)


@FAMILY
def test_every_image_has_one_whole_grid(family: str) -> None:
    model = build_model(family)
    seen = set[str]()
    for seed in range(12):
        inputs = tiny.build_inputs(model, seed, 2, images=[1, 2])
        prompt = get_prompt(model, inputs)
        media = [grid.media_index for grid in prompt.grids]
        assert media == sorted(media) and set(media) == set(range(max(media) + 1))
        for index in set(media):
            roles = [grid.role for grid in prompt.grids if grid.media_index == index]
            assert roles == ["tiles"] * (len(roles) - 1) + ["base"]
            seen.update(roles)
        if family in ("idefics3", "smolvlm", "mistral3", "vipllava"):
            assert max(media) == 2  # InternVL's may be videos, whose frames are images
    assert seen == ({"base"} if family in ("mistral3", "vipllava") else {"base", "tiles"})


@pytest.mark.parametrize("family", ["internvl", "idefics3", "smolvlm"])
def test_a_tile_fills_its_grid(family: str) -> None:
    """Other pixels in one tile change the embeddings of one grid."""
    model, num_tiles = build_model(family), 0
    for seed in range(4):
        inputs = tiny.build_inputs(model, seed, 1, images=[2])
        before = get_prompt(model, inputs)
        tiles = inputs["pixel_values"].view(-1, 3, 16, 16)
        filled = [index for index, tile in enumerate(tiles) if tile.any()]
        assert len(filled) == len(before.grids)
        num_tiles += len(filled)
        for index, grid in zip(filled, before.grids, strict=True):
            changed = inputs["pixel_values"].clone()
            changed.view(-1, 3, 16, 16)[index].neg_()
            after = get_prompt(model, {**inputs, "pixel_values": changed})
            moved = (before.hidden_states[0] - after.hidden_states[0]).abs().amax(-1)[0] > 1e-6
            assert moved.nonzero().flatten().tolist() == list(grid.token_indices)
    assert num_tiles > 8


@pytest.mark.parametrize("family", ["internvl", "idefics3", "smolvlm"])
def test_merged_patches_are_in_reading_order(family: str) -> None:
    model: Any = build_model(family)
    patches = torch.arange(64.0)[None, :, None]  # 8 x 8
    if family == "internvl":
        merged = model.model.pixel_shuffle(patches.view(1, 8, 8, 1), 0.5).flatten(1, 2)
    else:
        merged = model.model.connector.pixel_shuffle(patches, 2)
    corner = merged.amin(-1).view(4, 4)
    assert torch.equal(corner, 2 * torch.arange(4.0) + 16 * torch.arange(4.0)[:, None])


def test_lines_of_mistral3_end_with_a_text_token() -> None:
    model, shapes = build_model("mistral3"), set[tuple[int, int]]()
    for seed in range(10):
        inputs = tiny.build_inputs(model, seed, 2, images=[2, 1])
        prompt = get_prompt(model, inputs)
        assert [(8 * g.height, 8 * g.width) for g in prompt.grids] == [tuple(s) for s in inputs["image_sizes"].tolist()]
        for grid in prompt.grids:
            assert grid.line_gap == int(grid.height > 1)
            end = grid.start + grid.height * (grid.width + 1)
            line = prompt.visual_mask[grid.row, grid.start : end].view(grid.height, grid.width + 1)
            assert line[:, :-1].all() and not line[:, -1].any()
            shapes.add((grid.height, grid.width))
        counted = prompt_grids(prompt, prompt.input_ids.shape[1])
        assert [(g.start, g.line_gap) for g in counted if g.row == 1] == [(0, 0)]
        first, second = (g for g in counted if g.row == 0)
        assert (first.start, second.start, second.line_gap) == (0, first.num_tokens, 0)
    assert len(shapes) > 3


@FAMILY
def test_grids_of_several_sequences_per_prompt(family: str) -> None:
    model = build_model(family)
    inputs = tiny.build_inputs(model, 2, 2, images=[1, 2])
    once, thrice = get_prompt(model, inputs), get_prompt(model, inputs, num_return_sequences=3)
    assert thrice.input_ids.shape[0] == 6 and len(thrice.grids) == 3 * len(once.grids) > 0
    for row in range(6):
        own = [(g.token_indices, g.height, g.role) for g in thrice.grids if g.row == row]
        assert own == [(g.token_indices, g.height, g.role) for g in once.grids if g.row == row // 3]


def test_images_of_idefics3_without_a_common_marker_give_no_grids() -> None:
    """The last image of each row is a whole one behind the same token."""
    adapter = find_adapter(build_model("idefics3"))
    image = [tiny.special_ids(tiny.ModelSpec("idefics3")).image] * 4
    rows = [[9, 21, *image, 9], [9, 22, *image, 9]]
    assert adapter.layout.grids(torch.tensor(rows), {}) == ()
    assert adapter.layout.grids(torch.tensor([[*image, 9]]), {}) == ()
    assert len(adapter.layout.grids(torch.tensor(rows[:1] * 2), {})) == 2


@pytest.mark.parametrize("size", [(0, 0), (1, 1), (2, 3), (3, 1)])
def test_grids_of_the_layout_of_the_processor(size: tuple[int, int]) -> None:
    model = build_model("smolvlm")
    tokens = {"image_token": "<image>", "fake_token_around_image": "<fake>", "global_image_token": "<global-img>"}
    layout = get_image_prompt_string(*size, 4, **tokens)
    vocabulary = {"<image>": tiny.special_ids(model.tiny_spec).image}
    ids = [vocabulary.setdefault(word, 50 + len(vocabulary)) for word in re.findall(r"<.*?>|\n+|\w", f"a{layout}b" * 2)]
    grids = find_adapter(model).layout.grids(torch.tensor([ids]), {})
    num_tiles = size[0] * size[1]
    assert [grid.role for grid in grids] == [*["tiles"] * num_tiles, "base"] * 2
    assert [grid.media_index for grid in grids] == [0] * (num_tiles + 1) + [1] * (num_tiles + 1)
    assert all((grid.height, grid.width) == (2, 2) for grid in grids)


def test_tags_of_idefics3_may_be_several_tokens() -> None:
    """As of tokenizers without `<row_1_col_1>` and `<global-img>`."""
    adapter = find_adapter(build_model("idefics3"))
    image = [tiny.special_ids(tiny.ModelSpec("idefics3")).image] * 4
    tiles = [9, 20, 31, 31, 22, *image, 9, 20, 31, 32, 22, *image, 13, 13]
    whole = [9, 20, 33, 22, *image, 9]
    for text in ([], [40, 41], [22]):
        row = [*text, *tiles, *whole, *text, *whole, *tiles, *whole, *text]
        grids = adapter.layout.grids(torch.tensor([row]), {})
        assert [(grid.media_index, grid.role) for grid in grids] == [
            *((0, "tiles"), (0, "tiles"), (0, "base")),
            (1, "base"),
            *((2, "tiles"), (2, "tiles"), (2, "base")),
        ]
    assert adapter.layout.grids(torch.tensor([[*whole[:-1]]]), {}) == ()
