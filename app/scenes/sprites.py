"""The sprite atlas: a sprite for each object kind and a glyph for each sign character.

`research/scenes/write_atlas.py` renders it from fonts.
"""

from __future__ import annotations

import string
from functools import lru_cache
from pathlib import Path

from PIL import Image

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
LETTERS_TOP = -(-len(OBJECT_KINDS) // ATLAS_COLUMNS) * SPRITE_SIZE
"""Pixels above the row of glyphs, which is below those of sprites."""


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
    left = SIGN_CHARACTERS.index(character) * GLYPH_SIZE[0]
    return _load_atlas().crop((left, LETTERS_TOP, left + GLYPH_SIZE[0], LETTERS_TOP + GLYPH_SIZE[1]))
