"""The sprite atlas: one image with a sprite per object kind and a glyph per sign character, rendered from fonts.

`python -m mmspec.app.scenes.sprites NotoColorEmoji.ttf DejaVuSans-Bold.ttf` renders the atlas again.
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

ATLAS_FILE = Path(__file__).parent / "data" / "atlas.png"
SPRITE_SIZE = 80
"""Edge of a sprite's cell in pixels; the longer edge of a sprite fills it."""
ATLAS_COLUMNS = 20
"""Sprites per row of the atlas."""
SIGN_CHARACTERS = string.ascii_uppercase + string.digits
GLYPH_SIZE = (20, 28)
"""Width and height of a glyph's cell in pixels."""


def _num_rows(count: int) -> int:
    """Rows of the atlas that hold `count` sprites."""
    return -(-count // ATLAS_COLUMNS)


@lru_cache(maxsize=1)
def _load_atlas() -> Image.Image:
    with open_image(ATLAS_FILE) as image:
        return image.convert("RGBA")


@lru_cache(maxsize=len(OBJECT_KINDS))
def get_sprite(kind: int) -> Image.Image:
    """Return the sprite of an object kind: RGBA, `SPRITE_SIZE` x `SPRITE_SIZE`, centred."""
    row, column = divmod(kind, ATLAS_COLUMNS)
    return _load_atlas().crop(
        (column * SPRITE_SIZE, row * SPRITE_SIZE, (column + 1) * SPRITE_SIZE, (row + 1) * SPRITE_SIZE)
    )


@lru_cache(maxsize=len(SIGN_CHARACTERS))
def get_glyph(character: str) -> Image.Image:
    """Return the glyph of a sign character: RGBA of `GLYPH_SIZE`, black on transparent."""
    top, left = _num_rows(len(OBJECT_KINDS)) * SPRITE_SIZE, SIGN_CHARACTERS.index(character) * GLYPH_SIZE[0]
    return _load_atlas().crop((left, top, left + GLYPH_SIZE[0], top + GLYPH_SIZE[1]))


def _draw_sprite(emoji: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Render an emoji, crop it to its bounding box, scale the longer edge to `SPRITE_SIZE` and centre it."""
    canvas = Image.new("RGBA", (180, 180))
    ImageDraw.Draw(canvas).text((10, 10), emoji, font=font, embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        raise ValueError(f"the font has no glyph for {emoji!r}; name a colour emoji font such as NotoColorEmoji.ttf")
    sprite = canvas.crop(box)
    scale = SPRITE_SIZE / max(sprite.size)
    sprite = sprite.resize(
        (max(1, round(sprite.width * scale)), max(1, round(sprite.height * scale))), Image.Resampling.LANCZOS
    )
    cell = Image.new("RGBA", (SPRITE_SIZE, SPRITE_SIZE))
    cell.paste(sprite, ((SPRITE_SIZE - sprite.width) // 2, (SPRITE_SIZE - sprite.height) // 2))
    return cell


def build_atlas(emoji_font: str, letter_font: str) -> Image.Image:
    """Render the atlas from the paths of two font files."""
    emoji = ImageFont.truetype(emoji_font, 109)  # the only size of the bitmap font
    letters = ImageFont.truetype(letter_font, 24)
    top = _num_rows(len(OBJECT_KINDS)) * SPRITE_SIZE
    atlas = Image.new("RGBA", (ATLAS_COLUMNS * SPRITE_SIZE, top + GLYPH_SIZE[1]))
    for index, kind in enumerate(OBJECT_KINDS):
        row, column = divmod(index, ATLAS_COLUMNS)
        atlas.paste(_draw_sprite(kind.emoji, emoji), (column * SPRITE_SIZE, row * SPRITE_SIZE))
    for index, character in enumerate(SIGN_CHARACTERS):
        cell = Image.new("RGBA", GLYPH_SIZE)
        ImageDraw.Draw(cell).text(
            (GLYPH_SIZE[0] / 2, GLYPH_SIZE[1] / 2), character, font=letters, fill="black", anchor="mm"
        )
        atlas.paste(cell, (index * GLYPH_SIZE[0], top))
    return atlas


def main(argv: Sequence[str] | None = None) -> int:
    """Render and save the atlas; returns the exit status."""
    fonts = list(sys.argv[1:] if argv is None else argv)
    if len(fonts) != 2:
        print("usage: python -m mmspec.app.scenes.sprites NotoColorEmoji.ttf DejaVuSans-Bold.ttf", file=sys.stderr)
        return 2
    build_atlas(*fonts).quantize(255, method=Image.Quantize.FASTOCTREE).save(ATLAS_FILE, optimize=True)
    print(
        f"{len(OBJECT_KINDS)} sprites and {len(SIGN_CHARACTERS)} glyphs in {ATLAS_FILE}, "
        f"{ATLAS_FILE.stat().st_size / 1024:.0f} KiB"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
