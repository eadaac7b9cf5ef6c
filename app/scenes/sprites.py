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

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.vision.images import open_image

DATA_FOLDER = Path(__file__).parent / "data"
ATLAS_FILE = DATA_FOLDER / "atlas.png"
SPRITE_SIZE = 80
"""Pixels of a sprite's cell; a thing fills it in one direction."""
ATLAS_COLUMNS = 20
SIGN_CHARACTERS = string.ascii_uppercase + string.digits
GLYPH_SIZE = (20, 28)
"""Cell of a letter."""


def _rows(count: int) -> int:
    return -(-count // ATLAS_COLUMNS)


@lru_cache(maxsize=1)
def _atlas() -> Image.Image:
    with open_image(ATLAS_FILE) as image:
        return image.convert("RGBA")


@lru_cache(maxsize=len(OBJECT_KINDS))
def get_sprite(kind: int) -> Image.Image:
    """RGBA, `EDGE` x `EDGE`, the thing in the middle."""
    row, column = divmod(kind, ATLAS_COLUMNS)
    return _atlas().crop((column * SPRITE_SIZE, row * SPRITE_SIZE, (column + 1) * SPRITE_SIZE, (row + 1) * SPRITE_SIZE))


@lru_cache(maxsize=len(SIGN_CHARACTERS))
def get_glyph(character: str) -> Image.Image:
    """Black on transparent, `LETTER` in size."""
    top, left = _rows(len(OBJECT_KINDS)) * SPRITE_SIZE, SIGN_CHARACTERS.index(character) * GLYPH_SIZE[0]
    return _atlas().crop((left, top, left + GLYPH_SIZE[0], top + GLYPH_SIZE[1]))


def _draw_sprite(emoji: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """The emoji, cropped to what is drawn, its longer edge `EDGE`, in the middle of a cell."""
    canvas = Image.new("RGBA", (180, 180))
    ImageDraw.Draw(canvas).text((10, 10), emoji, font=font, embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        raise ValueError(f"the font has no picture for {emoji!r}")
    drawn = canvas.crop(box)
    scale = SPRITE_SIZE / max(drawn.size)
    drawn = drawn.resize(
        (max(1, round(drawn.width * scale)), max(1, round(drawn.height * scale))), Image.Resampling.LANCZOS
    )
    cell = Image.new("RGBA", (SPRITE_SIZE, SPRITE_SIZE))
    cell.paste(drawn, ((SPRITE_SIZE - drawn.width) // 2, (SPRITE_SIZE - drawn.height) // 2))
    return cell


def build_atlas(emoji_font: str, letter_font: str) -> Image.Image:
    """Draw the whole atlas."""
    pictures, letters = ImageFont.truetype(emoji_font, 109), ImageFont.truetype(letter_font, 24)
    top = _rows(len(OBJECT_KINDS)) * SPRITE_SIZE
    atlas = Image.new("RGBA", (ATLAS_COLUMNS * SPRITE_SIZE, top + GLYPH_SIZE[1]))
    for number, kind in enumerate(OBJECT_KINDS):
        row, column = divmod(number, ATLAS_COLUMNS)
        atlas.paste(_draw_sprite(kind.emoji, pictures), (column * SPRITE_SIZE, row * SPRITE_SIZE))
    for number, character in enumerate(SIGN_CHARACTERS):
        cell = Image.new("RGBA", GLYPH_SIZE)
        ImageDraw.Draw(cell).text(
            (GLYPH_SIZE[0] / 2, GLYPH_SIZE[1] / 2), character, font=letters, fill="black", anchor="mm"
        )
        atlas.paste(cell, (number * GLYPH_SIZE[0], top))
    return atlas


def main(argv: Sequence[str] | None = None) -> int:
    """Make the atlas from two font files."""
    fonts = list(sys.argv[1:] if argv is None else argv)
    if len(fonts) != 2:
        print("usage: python -m mmspec.app.scenes.sprites NotoColorEmoji.ttf DejaVuSans-Bold.ttf", file=sys.stderr)
        return 2
    DATA_FOLDER.mkdir(exist_ok=True)
    build_atlas(*fonts).quantize(255, method=Image.Quantize.FASTOCTREE).save(ATLAS_FILE, optimize=True)
    print(
        f"{len(OBJECT_KINDS)} things and {len(SIGN_CHARACTERS)} letters in {ATLAS_FILE}, {ATLAS_FILE.stat().st_size / 1024:.0f} KiB"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
