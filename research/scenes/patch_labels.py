"""Ground truth per image patch, for the pre-training of the vision tower and the auxiliary heads of the text model.

One patch is `PATCH_SIZE` x `PATCH_SIZE` pixels and corresponds to one visual token; patches are numbered row by row,
[P] with P = `NUM_VISUAL_TOKENS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.render import build_layers, render_background
from mmspec.app.scenes.sprites import GLYPH_SIZE, SIGN_CHARACTERS
from mmspec.app.scenes.world import (
    BACKGROUND_COLOURS,
    BACKGROUND_TEXTURES,
    REGIONS,
    SCENE_IMAGE_SIZE,
    SIGN_WORDS,
    SIZE_CLASSES,
    Scene,
    Sign,
    Thing,
)
from research.scenes.build_model import GRID_SIZE, NUM_VISUAL_TOKENS, PATCH_SIZE
from research.scenes.clips import MOTION_VECTORS, Clip

BACKGROUND_CLASS = len(OBJECT_KINDS)
SIGN_CLASS = len(OBJECT_KINDS) + 1
NUM_PATCH_CLASSES = len(OBJECT_KINDS) + 2
"""Classes of `PatchLabels.kind`: the object kinds, the background, the sign."""
MAX_THINGS = 6
"""Maximum number of things in a scene."""
IGNORE_INDEX = -100
"""Label that the losses ignore."""
PATCH_LABEL_NAMES = (
    "kind",
    "size_class",
    "region",
    "centre",
    "num_others",
    "rank",
    "total",
    "letter",
    "letter_index",
    "spelling",
    "action",
)
"""Fields of `PatchLabels` that are also targets of the visual tokens in `models.VlmTrainer`."""
MAX_SIGN_LENGTH = max(map(len, SIGN_WORDS))
"""Letters of the longest sign."""
ACTIONS = (*(("moves", way) for way in MOTION_VECTORS), ("appears", ""), ("leaves", ""), ("stays", ""))
"""Classes of `PatchLabels.action`: (what, way) of `clips.Event`."""
REGION_INDEX = {name: index for index, name in enumerate(name for row in REGIONS for name in row)}
"""Region name -> class, row by row."""
MIN_PATCH_COVERAGE = 0.3
"""A patch takes the label of a thing that covers at least this share of it."""
MAX_BACKGROUND_COVERAGE = 0.05
"""A patch is background if things cover less than this share; between the two bounds it is ignored."""


@dataclass
class PatchLabels:
    """Labels of the patches of one image; int64 except `offset`. P patches; `IGNORE_INDEX` where a label is undefined.

    Attributes:
        kind: [P] object kind, `BACKGROUND_CLASS` or `SIGN_CLASS`; ignored where the coverage is ambiguous.
        offset: [P, 2] float32, from the patch's centre to its thing's centre, in units of 64 pixels.
        size_class: [P] index into `SIZE_CLASSES`.
        region: [P] class of the region (`REGION_INDEX`) that holds the thing's centre.
        centre: [P] 1 if a thing's centre is in the patch, else 0.
        num_others: [P] number of other things of the same kind.
        rank: [P] index of the thing in reading order.
        total: [P] number of things in the image, on every patch.
        letter: [P] 1 + index into `SIGN_CHARACTERS` of the letter centred in the patch; 0 for none.
        letter_index: [P] index within the sign of the letter centred in the patch.
        spelling: [P, `MAX_SIGN_LENGTH`] on the patches of a sign, all its letters as in `letter`, padded with 0.
        action: [P] in a clip, the action (`ACTIONS`) of the patch's thing since the previous frame.
        colour: [] index into `BACKGROUND_COLOURS`.
        texture: [] index into `BACKGROUND_TEXTURES`.
    """

    kind: Tensor
    offset: Tensor
    size_class: Tensor
    region: Tensor
    centre: Tensor
    num_others: Tensor
    rank: Tensor
    total: Tensor
    letter: Tensor
    letter_index: Tensor
    spelling: Tensor
    action: Tensor
    colour: Tensor
    texture: Tensor


def render_with_labels(scene: Scene) -> tuple[Image.Image, PatchLabels]:
    """Return the image of a scene, equal to `render.render_scene`, and the labels of its patches."""
    image = render_background(scene)
    owner = np.full((SCENE_IMAGE_SIZE, SCENE_IMAGE_SIZE), -1, dtype=np.int64)  # index of the front layer at each pixel
    for index, (sprite, (left, top)) in enumerate(build_layers(scene)):
        image.paste(sprite, (left, top), sprite)
        mask = np.asarray(sprite.getchannel("A")) > 127
        x0, x1 = max(0, left), min(SCENE_IMAGE_SIZE, left + sprite.width)
        y0, y1 = max(0, top), min(SCENE_IMAGE_SIZE, top + sprite.height)
        owner[y0:y1, x0:x1][mask[y0 - top : y1 - top, x0 - left : x1 - left]] = index
    return image, _build_labels(scene, owner)


def _build_labels(scene: Scene, owner: np.ndarray) -> PatchLabels:
    """Labels from [SCENE_IMAGE_SIZE, SCENE_IMAGE_SIZE] layer indices, -1 for the background."""
    num_layers = len(scene.things) + (scene.sign is not None)
    if not num_layers:  # a clip before its thing appears
        return _build_empty_labels(scene)
    coverage = _patch_coverage(owner, num_layers)
    front_layer = coverage.argmax(1)
    front_coverage = coverage.max(1)
    is_covered = front_coverage >= MIN_PATCH_COVERAGE

    def label_covered(values: list[int]) -> Tensor:
        """[P] labels from one value per layer, ignored on patches without a thing."""
        return torch.from_numpy(np.where(is_covered, np.array(values)[front_layer], IGNORE_INDEX))

    things = scene.things
    reading_order = scene.reading_order()
    sign_ignored = [IGNORE_INDEX] * (scene.sign is not None)
    kinds = np.array([thing.kind for thing in things] + [SIGN_CLASS] * (scene.sign is not None))
    uncovered = np.where(front_coverage < MAX_BACKGROUND_COVERAGE, BACKGROUND_CLASS, IGNORE_INDEX)
    kind = torch.from_numpy(np.where(is_covered, kinds[front_layer], uncovered))
    layers: list[Thing | Sign] = [*things]
    if scene.sign is not None:
        layers.append(scene.sign)
    centres = np.array([(layer.x, layer.y) for layer in layers])
    regions = [layer.region for layer in layers]
    letter, letter_index = _label_letters(scene)
    return PatchLabels(
        kind=kind,
        offset=torch.from_numpy((centres[front_layer] - _patch_centres()).astype(np.float32) / 64),
        size_class=label_covered([list(SIZE_CLASSES).index(thing.size_class) for thing in things] + sign_ignored),
        region=label_covered([REGION_INDEX[region] for region in regions]),
        centre=_label_centres(scene),
        num_others=label_covered([scene.count(thing.kind) - 1 for thing in things] + sign_ignored),
        rank=label_covered([reading_order.index(thing) for thing in things] + sign_ignored),
        total=torch.full((NUM_VISUAL_TOKENS,), len(things)),
        letter=letter,
        letter_index=letter_index,
        spelling=_label_spelling(scene, kind == SIGN_CLASS),
        action=torch.full((NUM_VISUAL_TOKENS,), IGNORE_INDEX),
        colour=torch.tensor(list(BACKGROUND_COLOURS).index(scene.colour)),
        texture=torch.tensor(BACKGROUND_TEXTURES.index(scene.texture)),
    )


def _patch_coverage(owner: np.ndarray, num_layers: int) -> np.ndarray:
    """[P, num_layers] share of each patch's pixels that show each layer."""
    patches = (
        owner.reshape(GRID_SIZE, PATCH_SIZE, GRID_SIZE, PATCH_SIZE)
        .swapaxes(1, 2)
        .reshape(NUM_VISUAL_TOKENS, PATCH_SIZE * PATCH_SIZE)
    )
    return np.stack([(patches == index).mean(1) for index in range(num_layers)], axis=1)


def _patch_centres() -> np.ndarray:
    """[P, 2] x and y of the patches' centres, in pixels."""
    grid = np.stack(np.meshgrid(np.arange(GRID_SIZE), np.arange(GRID_SIZE)), -1)
    return grid.reshape(NUM_VISUAL_TOKENS, 2) * PATCH_SIZE + PATCH_SIZE // 2


def _label_centres(scene: Scene) -> Tensor:
    """[P] 1 where a thing's centre lies."""
    labels = torch.zeros(NUM_VISUAL_TOKENS, dtype=torch.long)
    for thing in scene.things:
        labels[_patch_index(thing.x, thing.y)] = 1
    return labels


def _patch_index(x: int, y: int) -> int:
    """Index of the patch that holds a pixel; x and y are clamped to the image."""
    column = min(GRID_SIZE - 1, max(0, x // PATCH_SIZE))
    row = min(GRID_SIZE - 1, max(0, y // PATCH_SIZE))
    return row * GRID_SIZE + column


def _build_empty_labels(scene: Scene) -> PatchLabels:
    """Labels of an image that shows only background."""
    zeros = torch.zeros(NUM_VISUAL_TOKENS, dtype=torch.long)
    ignored = zeros + IGNORE_INDEX
    return PatchLabels(
        kind=zeros + BACKGROUND_CLASS,
        offset=torch.zeros(NUM_VISUAL_TOKENS, 2),
        size_class=ignored,
        region=ignored,
        centre=zeros,
        num_others=ignored,
        rank=ignored,
        total=zeros,
        letter=zeros,
        letter_index=ignored,
        spelling=_label_spelling(scene, zeros > 0),
        action=ignored,
        colour=torch.tensor(list(BACKGROUND_COLOURS).index(scene.colour)),
        texture=torch.tensor(BACKGROUND_TEXTURES.index(scene.texture)),
    )


def label_actions(clip: Clip, previous: PatchLabels, current: PatchLabels) -> Tensor:
    """Label the actions between two successive frames of a clip.

    Returns:
        [P] int64 index into `ACTIONS` on the patches where a thing is, or where the hero was before it left;
        `IGNORE_INDEX` elsewhere.
    """
    is_hero = current.kind == clip.hero.kind
    was_hero = previous.kind == clip.hero.kind
    is_thing = (current.kind < BACKGROUND_CLASS) & (current.kind >= 0)
    stays = ACTIONS.index(("stays", ""))
    labels = torch.full((NUM_VISUAL_TOKENS,), IGNORE_INDEX).masked_fill(is_thing, stays)
    if not is_hero.any():
        return labels.masked_fill(was_hero & (current.kind == BACKGROUND_CLASS), ACTIONS.index(("leaves", "")))
    if not was_hero.any():
        return labels.masked_fill(is_hero, ACTIONS.index(("appears", "")))
    return labels.masked_fill(
        is_hero, ACTIONS.index(("moves", clip.event.way)) if clip.event.what == "moves" else stays
    )


def _label_letters(scene: Scene) -> tuple[Tensor, Tensor]:
    """[P] letter classes and [P] indices within the sign, on the patches that hold a letter's centre."""
    letter = torch.zeros(NUM_VISUAL_TOKENS, dtype=torch.long)
    letter_index = torch.full((NUM_VISUAL_TOKENS,), IGNORE_INDEX)
    if scene.sign is None:
        return letter, letter_index
    width = GLYPH_SIZE[0] * 3 // 4
    start = scene.sign.x - (width * len(scene.sign.text) + 8) // 2 + 4 + width // 2
    for index, character in enumerate(scene.sign.text):
        patch = _patch_index(start + index * width, scene.sign.y)
        letter[patch] = SIGN_CHARACTERS.index(character) + 1
        letter_index[patch] = index
    return letter, letter_index


def _label_spelling(scene: Scene, is_sign: Tensor) -> Tensor:
    """[P, MAX_SIGN_LENGTH] letters of the sign on its patches (`is_sign` [P] bool); ignored elsewhere."""
    labels = torch.full((NUM_VISUAL_TOKENS, MAX_SIGN_LENGTH), IGNORE_INDEX)
    if scene.sign is not None:
        letters = [SIGN_CHARACTERS.index(character) + 1 for character in scene.sign.text]
        labels[is_sign] = torch.tensor(letters + [0] * (MAX_SIGN_LENGTH - len(letters)))
    return labels
