"""Synthetic images for benchmarks: coloured shapes on a gradient, determined by a seed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

PALETTE = {"red": (200, 40, 40), "green": (40, 160, 70), "blue": (40, 80, 200), "yellow": (230, 200, 40)}
SHAPES = ("circle", "square", "triangle")


def draw_image(seed: int, size: tuple[int, int] = (320, 240)) -> tuple[Image.Image, str]:
    """An image of three shapes, and a name of its contents."""
    rng = random.Random(seed)
    width, height = size
    fade = np.linspace(rng.randint(90, 160), 250, width)[None, :, None] * np.ones((height, 1, 3))
    image = Image.fromarray(fade.astype(np.uint8))
    draw, names = ImageDraw.Draw(image), []
    for _ in range(3):
        colour, shape = rng.choice(sorted(PALETTE)), rng.choice(SHAPES)
        radius = rng.randint(height // 10, height // 4)
        x, y = rng.randint(radius, width - radius), rng.randint(radius, height - radius)
        _shape(draw, shape, x, y, radius, PALETTE[colour])
        names.append(f"{colour}-{shape}")
    return image, "_".join(names)


def _shape(draw: ImageDraw.ImageDraw, shape: str, x: int, y: int, r: int, colour: tuple[int, int, int]) -> None:
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    else:
        draw.polygon(((x, y - r), (x + r, y + r), (x - r, y + r)), fill=colour)


def write_images(folder: Path, count: int) -> list[Path]:
    """Write `count` PNG files into `folder`, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(count):
        image, name = draw_image(number)
        files.append(folder / f"{number:02d}_{name}.png")
        image.save(files[-1])
    return files
