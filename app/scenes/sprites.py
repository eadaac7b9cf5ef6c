"""The sprites: one picture with every kind of thing and every letter, made once from fonts and shipped.

As a script it makes the atlas anew: `python -m mmspec.app.scenes.sprites NotoColorEmoji.ttf DejaVuSans-Bold.ttf`.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mmspec.app.scenes.objects import KINDS
from mmspec.vision.images import open_image

FOLDER = Path(__file__).parent / "data"
FILE = FOLDER / "atlas.png"
EDGE = 80
"""Pixels of a sprite's cell; a thing fills it in one direction."""
COLUMNS = 20
LETTERS = string.ascii_uppercase + string.digits
LETTER = (20, 28)
"""Cell of a letter."""


def _rows(count: int) -> int:
    return -(-count // COLUMNS)


@lru_cache(maxsize=1)
def _atlas() -> Image.Image:
    with open_image(FILE) as image:
        return image.convert("RGBA")


@lru_cache(maxsize=len(KINDS))
def sprite(kind: int) -> Image.Image:
    """RGBA, `EDGE` x `EDGE`, the thing in the middle."""
    row, column = divmod(kind, COLUMNS)
    return _atlas().crop((column * EDGE, row * EDGE, (column + 1) * EDGE, (row + 1) * EDGE))


@lru_cache(maxsize=len(LETTERS))
def letter(character: str) -> Image.Image:
    """Black on transparent, `LETTER` in size."""
    top, left = _rows(len(KINDS)) * EDGE, LETTERS.index(character) * LETTER[0]
    return _atlas().crop((left, top, left + LETTER[0], top + LETTER[1]))


def _drawn(emoji: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """The emoji, cropped to what is drawn, its longer edge `EDGE`, in the middle of a cell."""
    canvas = Image.new("RGBA", (180, 180))
    ImageDraw.Draw(canvas).text((10, 10), emoji, font=font, embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        raise ValueError(f"the font has no picture for {emoji!r}")
    drawn = canvas.crop(box)
    scale = EDGE / max(drawn.size)
    drawn = drawn.resize(
        (max(1, round(drawn.width * scale)), max(1, round(drawn.height * scale))), Image.Resampling.LANCZOS
    )
    cell = Image.new("RGBA", (EDGE, EDGE))
    cell.paste(drawn, ((EDGE - drawn.width) // 2, (EDGE - drawn.height) // 2))
    return cell


def build(emoji_font: str, letter_font: str) -> Image.Image:
    """Draw the whole atlas."""
    pictures, letters = ImageFont.truetype(emoji_font, 109), ImageFont.truetype(letter_font, 24)
    top = _rows(len(KINDS)) * EDGE
    atlas = Image.new("RGBA", (COLUMNS * EDGE, top + LETTER[1]))
    for number, kind in enumerate(KINDS):
        row, column = divmod(number, COLUMNS)
        atlas.paste(_drawn(kind.emoji, pictures), (column * EDGE, row * EDGE))
    for number, character in enumerate(LETTERS):
        cell = Image.new("RGBA", LETTER)
        ImageDraw.Draw(cell).text((LETTER[0] / 2, LETTER[1] / 2), character, font=letters, fill="black", anchor="mm")
        atlas.paste(cell, (number * LETTER[0], top))
    return atlas


def main(argv: Sequence[str] | None = None) -> int:
    """Make the atlas from two font files."""
    fonts = list(sys.argv[1:] if argv is None else argv)
    if len(fonts) != 2:
        print("usage: python -m mmspec.app.scenes.sprites NotoColorEmoji.ttf DejaVuSans-Bold.ttf", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    build(*fonts).quantize(255, method=Image.Quantize.FASTOCTREE).save(FILE, optimize=True)
    print(f"{len(KINDS)} things and {len(LETTERS)} letters in {FILE}, {FILE.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
