"""From the truth to the picture."""

from __future__ import annotations

import random

from PIL import Image, ImageChops, ImageDraw

from mmspec.app.scenes.sprites import GLYPH_SIZE, get_glyph, get_sprite
from mmspec.app.scenes.world import BACKGROUND_COLOURS, IMAGE_SIZE, Scene, Sign, Thing

SpriteLayer = tuple[Image.Image, tuple[int, int]]
"""An RGBA picture and where its upper left corner goes."""


def render_scene(scene: Scene) -> Image.Image:
    """The picture of a scene, RGB, `SIDE` x `SIDE`."""
    picture = render_background(scene)
    for part, corner in build_layers(scene):
        picture.paste(part, corner, part)
    return picture


def build_layers(scene: Scene) -> list[SpriteLayer]:
    """What stands on the background, from back to front: the things, then the sign."""
    stack = [_thing(thing) for thing in scene.things]
    return [*stack, _sign(scene.sign)] if scene.sign is not None else stack


def visible_shares(scene: Scene) -> list[float]:
    """For each thing, the share of its pixels that nothing before it hides."""
    shown: list[float] = []
    front = Image.new("L", (IMAGE_SIZE, IMAGE_SIZE), 0)
    for part, corner in reversed(build_layers(scene)):
        mask = Image.new("L", (IMAGE_SIZE, IMAGE_SIZE), 0)
        mask.paste(part.getchannel("A").point(lambda alpha: 255 if alpha > 127 else 0), corner)
        whole = mask.histogram()[255]
        hidden = ImageChops.multiply(mask, front).histogram()[255]
        shown.append(1 - hidden / max(1, whole))
        front = ImageChops.lighter(front, mask)
    shown.reverse()
    return shown[: len(scene.things)]


def render_background(scene: Scene) -> Image.Image:
    """The coloured, perhaps textured ground. Its shade and the pattern's phase vary with the seed."""
    rng = random.Random(f"ground {scene.seed}")
    base = _shaded(BACKGROUND_COLOURS[scene.colour], rng.randint(-8, 8))
    mark = _shaded(base, 34 if sum(base) < 330 else -34)
    picture = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), base)
    draw = ImageDraw.Draw(picture)
    pitch, phase = rng.randint(18, 26), rng.randint(0, 20)
    starts = range(phase - 2 * pitch, IMAGE_SIZE, pitch)
    if scene.texture == "striped":
        for top in starts:
            draw.rectangle((0, top, IMAGE_SIZE, top + pitch // 2 - 1), fill=mark)
    elif scene.texture == "dotted":
        for top in starts:
            for left in starts:
                draw.ellipse((left, top, left + 7, top + 7), fill=mark)
    elif scene.texture == "checkered":
        for row, top in enumerate(starts):
            for column, left in enumerate(starts):
                if (row + column) % 2:
                    draw.rectangle((left, top, left + pitch - 1, top + pitch - 1), fill=mark)
    return picture


def _shaded(colour: tuple[int, int, int], by: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, part + by)) for part in colour)
    return red, green, blue


def _thing(thing: Thing) -> SpriteLayer:
    drawn = get_sprite(thing.kind)
    if thing.flipped:
        drawn = drawn.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    drawn = drawn.resize((thing.size, thing.size), Image.Resampling.BICUBIC)
    drawn = drawn.rotate(thing.angle, Image.Resampling.BICUBIC, expand=True)
    return drawn, (thing.x - drawn.width // 2, thing.y - drawn.height // 2)


def _sign(sign: Sign) -> SpriteLayer:
    width, height = GLYPH_SIZE[0] * 3 // 4, GLYPH_SIZE[1] * 3 // 4
    board = Image.new("RGBA", (width * len(sign.text) + 8, height + 8), (20, 20, 20, 255))
    ImageDraw.Draw(board).rectangle((2, 2, board.width - 3, board.height - 3), fill=(252, 252, 252, 255))
    for number, character in enumerate(sign.text):
        drawn = get_glyph(character).resize((width, height), Image.Resampling.BICUBIC)
        board.paste(drawn, (4 + number * width, 4), drawn)
    return board, (sign.x - board.width // 2, sign.y - board.height // 2)
