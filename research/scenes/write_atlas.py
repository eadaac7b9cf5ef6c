"""Renders the atlas: `python -m research.scenes.write_atlas NotoColorEmoji.ttf DejaVuSans-Bold.ttf`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.sprites import ATLAS_COLUMNS, ATLAS_FILE, GLYPH_SIZE, LETTERS_TOP, SIGN_CHARACTERS, SPRITE_SIZE


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
    atlas = Image.new("RGBA", (ATLAS_COLUMNS * SPRITE_SIZE, LETTERS_TOP + GLYPH_SIZE[1]))
    for index, kind in enumerate(OBJECT_KINDS):
        row, column = divmod(index, ATLAS_COLUMNS)
        atlas.paste(_draw_sprite(kind.emoji, emoji), (column * SPRITE_SIZE, row * SPRITE_SIZE))
    for index, character in enumerate(SIGN_CHARACTERS):
        cell = Image.new("RGBA", GLYPH_SIZE)
        ImageDraw.Draw(cell).text(
            (GLYPH_SIZE[0] / 2, GLYPH_SIZE[1] / 2), character, font=letters, fill="black", anchor="mm"
        )
        atlas.paste(cell, (index * GLYPH_SIZE[0], LETTERS_TOP))
    return atlas


def main(argv: Sequence[str] | None = None) -> int:
    """Render and save the atlas; returns the exit status."""
    fonts = list(sys.argv[1:] if argv is None else argv)
    if len(fonts) != 2:
        print("usage: python -m research.scenes.write_atlas NotoColorEmoji.ttf DejaVuSans-Bold.ttf", file=sys.stderr)
        return 2
    build_atlas(*fonts).quantize(255, method=Image.Quantize.FASTOCTREE).save(ATLAS_FILE, optimize=True)
    print(
        f"{len(OBJECT_KINDS)} sprites and {len(SIGN_CHARACTERS)} glyphs in {ATLAS_FILE}, "
        f"{ATLAS_FILE.stat().st_size / 1024:.0f} KiB"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
