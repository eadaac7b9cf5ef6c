"""From the truth to the picture."""

from __future__ import annotations

import random

from PIL import Image, ImageChops, ImageDraw

from mmspec.app.scenes.sprites import LETTER, letter, sprite
from mmspec.app.scenes.world import COLOURS, SIDE, Scene, Sign, Thing

Layer = tuple[Image.Image, tuple[int, int]]
"""An RGBA picture and where its upper left corner goes."""


def paint(scene: Scene) -> Image.Image:
    """The picture of a scene, RGB, `SIDE` x `SIDE`."""
    picture = background(scene)
    for part, corner in layers(scene):
        picture.paste(part, corner, part)
    return picture


def layers(scene: Scene) -> list[Layer]:
    """What stands on the background, from back to front: the things, then the sign."""
    stack = [_thing(thing) for thing in scene.things]
    return [*stack, _sign(scene.sign)] if scene.sign is not None else stack


def visible(scene: Scene) -> list[float]:
    """For each thing, the share of its pixels that nothing before it hides."""
    shown: list[float] = []
    front = Image.new("L", (SIDE, SIDE), 0)
    for part, corner in reversed(layers(scene)):
        mask = Image.new("L", (SIDE, SIDE), 0)
        mask.paste(part.getchannel("A").point(lambda alpha: 255 if alpha > 127 else 0), corner)
        whole = mask.histogram()[255]
        hidden = ImageChops.multiply(mask, front).histogram()[255]
        shown.append(1 - hidden / max(1, whole))
        front = ImageChops.lighter(front, mask)
    shown.reverse()
    return shown[: len(scene.things)]


def background(scene: Scene) -> Image.Image:
    """The coloured, perhaps textured ground. Its shade and the pattern's phase vary with the seed."""
    dice = random.Random(f"ground {scene.seed}")
    base = _shaded(COLOURS[scene.colour], dice.randint(-8, 8))
    mark = _shaded(base, 34 if sum(base) < 330 else -34)
    picture = Image.new("RGB", (SIDE, SIDE), base)
    draw = ImageDraw.Draw(picture)
    pitch, phase = dice.randint(18, 26), dice.randint(0, 20)
    starts = range(phase - 2 * pitch, SIDE, pitch)
    if scene.texture == "striped":
        for top in starts:
            draw.rectangle((0, top, SIDE, top + pitch // 2 - 1), fill=mark)
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


def _thing(thing: Thing) -> Layer:
    drawn = sprite(thing.kind)
    if thing.flipped:
        drawn = drawn.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    drawn = drawn.resize((thing.size, thing.size), Image.Resampling.BICUBIC)
    drawn = drawn.rotate(thing.angle, Image.Resampling.BICUBIC, expand=True)
    return drawn, (thing.x - drawn.width // 2, thing.y - drawn.height // 2)


def _sign(sign: Sign) -> Layer:
    width, height = LETTER[0] * 3 // 4, LETTER[1] * 3 // 4
    board = Image.new("RGBA", (width * len(sign.text) + 8, height + 8), (20, 20, 20, 255))
    ImageDraw.Draw(board).rectangle((2, 2, board.width - 3, board.height - 3), fill=(252, 252, 252, 255))
    for number, character in enumerate(sign.text):
        drawn = letter(character).resize((width, height), Image.Resampling.BICUBIC)
        board.paste(drawn, (4 + number * width, 4), drawn)
    return board, (sign.x - board.width // 2, sign.y - board.height // 2)
