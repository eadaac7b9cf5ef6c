"""Rendering of scenes to RGB images. Deterministic: equal scenes give equal pixels."""

from __future__ import annotations

import random

from PIL import Image, ImageDraw

from mmspec.app.scenes.sprites import GLYPH_SIZE, get_glyph, get_sprite
from mmspec.app.scenes.world import BACKGROUND_COLOURS, SCENE_IMAGE_SIZE, Scene, Sign, Thing

SpriteLayer = tuple[Image.Image, tuple[int, int]]
"""An RGBA image and the x, y of its upper left corner in the scene's image."""


def render_scene(scene: Scene) -> Image.Image:
    """Return the RGB image of a scene, `SCENE_IMAGE_SIZE` x `SCENE_IMAGE_SIZE`."""
    image = render_background(scene)
    for sprite, corner in build_layers(scene):
        image.paste(sprite, corner, sprite)
    return image


def build_layers(scene: Scene) -> list[SpriteLayer]:
    """Return the layers over the background from back to front: the things, then the sign."""
    layers = [_render_thing(thing) for thing in scene.things]
    return [*layers, _render_sign(scene.sign)] if scene.sign is not None else layers


def render_background(scene: Scene) -> Image.Image:
    """Return the background alone; shade of the colour, pitch and phase of the texture depend on the seed."""
    rng = random.Random(f"ground {scene.seed}")
    base = _shift_brightness(BACKGROUND_COLOURS[scene.colour], rng.randint(-8, 8))
    accent = _shift_brightness(base, 34 if sum(base) < 330 else -34)
    image = Image.new("RGB", (SCENE_IMAGE_SIZE, SCENE_IMAGE_SIZE), base)
    draw = ImageDraw.Draw(image)
    pitch = rng.randint(18, 26)
    phase = rng.randint(0, 20)
    starts = range(phase - 2 * pitch, SCENE_IMAGE_SIZE, pitch)
    if scene.texture == "striped":
        for top in starts:
            draw.rectangle((0, top, SCENE_IMAGE_SIZE, top + pitch // 2 - 1), fill=accent)
    elif scene.texture == "dotted":
        for top in starts:
            for left in starts:
                draw.ellipse((left, top, left + 7, top + 7), fill=accent)
    elif scene.texture == "checkered":
        for row, top in enumerate(starts):
            for column, left in enumerate(starts):
                if (row + column) % 2:
                    draw.rectangle((left, top, left + pitch - 1, top + pitch - 1), fill=accent)
    return image


def _shift_brightness(colour: tuple[int, int, int], offset: int) -> tuple[int, int, int]:
    """Add an offset to each channel, clamped to 0..255."""
    red, green, blue = (min(255, max(0, channel + offset)) for channel in colour)
    return red, green, blue


def _render_thing(thing: Thing) -> SpriteLayer:
    sprite = get_sprite(thing.kind)
    if thing.flipped:
        sprite = sprite.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    sprite = sprite.resize((thing.size, thing.size), Image.Resampling.BICUBIC)
    sprite = sprite.rotate(thing.angle, Image.Resampling.BICUBIC, expand=True)
    return sprite, (thing.x - sprite.width // 2, thing.y - sprite.height // 2)


def _render_sign(sign: Sign) -> SpriteLayer:
    width = GLYPH_SIZE[0] * 3 // 4
    height = GLYPH_SIZE[1] * 3 // 4
    board = Image.new("RGBA", (width * len(sign.text) + 8, height + 8), (20, 20, 20, 255))
    ImageDraw.Draw(board).rectangle((2, 2, board.width - 3, board.height - 3), fill=(252, 252, 252, 255))
    for index, character in enumerate(sign.text):
        glyph = get_glyph(character).resize((width, height), Image.Resampling.BICUBIC)
        board.paste(glyph, (4 + index * width, 4), glyph)
    return board, (sign.x - board.width // 2, sign.y - board.height // 2)
