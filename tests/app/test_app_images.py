"""Image files of every kind, good and bad, as a caption job reads them."""

from __future__ import annotations

import contextlib
import io
import os
import random
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmspec.app.cli.main import main
from mmspec.app.io.images import ImageError, decode_ahead, load_image, pixel_limit

RED = (200, 30, 30)


def save(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)  # type: ignore[arg-type]
    return path


def near(image: Image.Image, colour: tuple[int, int, int], at: tuple[int, int] = (0, 0), slack: int = 12) -> bool:
    got = image.getpixel(at)
    assert isinstance(got, tuple)
    return image.mode == "RGB" and max(abs(a - b) for a, b in zip(got, colour, strict=True)) <= slack


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tif", "ppm", "avif"])
def test_formats(tmp_path: Path, suffix: str) -> None:
    assert near(load_image(save(tmp_path / f"a.{suffix}", Image.new("RGB", (9, 7), RED))), RED)


def test_cmyk_jpeg(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", Image.new("RGB", (16, 16), RED).convert("CMYK"), quality=95)
    assert near(load_image(path), RED, slack=20)


def test_transparency_goes_on_white(tmp_path: Path) -> None:
    clear = save(tmp_path / "a.png", Image.new("RGBA", (4, 4), (0, 0, 0, 0)))
    half = save(tmp_path / "b.png", Image.new("RGBA", (4, 4), (0, 0, 0, 128)))
    palette = Image.new("P", (4, 4), 3)
    palette.putpalette([0] * 768)
    indexed = save(tmp_path / "c.png", palette, transparency=3)
    assert near(load_image(clear), (255, 255, 255))
    assert near(load_image(half), (127, 127, 127))
    assert near(load_image(indexed), (255, 255, 255))


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_first_frame_of_an_animation(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, (0, 200, 0), (0, 0, 200))]
    path = save(tmp_path / f"a.{suffix}", frames[0], save_all=True, append_images=frames[1:])
    assert near(load_image(path), RED)


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage of some length", b"Exif\0\0II", b"Exif\0\0II*\0\x08\0\0\0\xff\xff"])
def test_unreadable_exif_is_ignored(tmp_path: Path, exif: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.jpg", Image.new("RGB", (20, 10), RED), exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_image(path).size == (20, 10)

        def fail(image: Image.Image) -> None:
            raise SyntaxError("not a TIFF file")

        monkeypatch.setattr("PIL.ImageOps.exif_transpose", fail)
        assert near(load_image(path), RED)


# --- one door ---------------------------------------------------------------------------------------------------------


def test_a_picture_by_any_way_in(tmp_path: Path) -> None:
    """Path, text, bytes, Pillow, array: the same pixels, and the source is not modified."""
    values = np.random.default_rng(5).integers(0, 255, (12, 9, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path / "a.png", Image.fromarray(values), exif=exif)
    upright = np.rot90(values, -1)
    with Image.open(path) as opened:
        ways = [path, str(path), path.read_bytes(), bytearray(path.read_bytes()), memoryview(path.read_bytes()), opened]
        for way in ways:
            assert np.array_equal(np.asarray(load_image(way)), upright), type(way)  # type: ignore[arg-type]
        assert opened.size == (9, 12) and opened.getexif()[0x0112] == 6
    before = values.copy()
    assert np.array_equal(np.asarray(load_image(values)), values)
    result = load_image(values)
    result.putpixel((0, 0), (1, 2, 3))
    assert np.array_equal(values, before)
    image = Image.new("RGB", (3, 3), RED)
    load_image(image).putpixel((0, 0), (1, 2, 3))
    assert image.getpixel((0, 0)) == RED


ARRAYS: dict[str, tuple[np.ndarray, list[list[int]]]] = {
    "grey": (np.array([[0, 100, 255]], np.uint8), [[0] * 3, [100] * 3, [255] * 3]),
    "grey of one colour": (np.array([[[7], [200]]], np.uint8), [[7] * 3, [200] * 3]),
    "truth": (np.array([[True, False]]), [[255] * 3, [0] * 3]),
    "clear": (np.array([[[10, 20, 30, 255], [10, 20, 30, 0]]], np.uint8), [[10, 20, 30], [255] * 3]),
    "floats": (np.array([[[0.0, 0.5, 1.0]]]), [[0, 128, 255]]),
    "halves": (np.array([[[0.0, 0.5, 1.0]]], np.float16), [[0, 128, 255]]),
    "floats up to 255": (np.array([[[0.0, 127.5, 255.0]]]), [[0, 128, 255]]),
    "16 bits": (np.array([[[0, 32768, 65535]]], np.uint16), [[0, 128, 255]]),
    "whole numbers": (np.array([[[0, 128, 255]]], np.int64), [[0, 128, 255]]),
    "not numbers": (
        np.array([[np.nan, 1.0, np.inf, -np.inf, 0.5]]),
        [[0] * 3, [255] * 3, [255] * 3, [0] * 3, [128] * 3],
    ),
    "other order": (np.asfortranarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)), [[1, 2, 3], [4, 5, 6]]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    values, pixels = ARRAYS[name]
    result = load_image(values)
    assert result.mode == "RGB" and np.asarray(result)[0].tolist() == pixels


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LA", "I;16", "I", "F", "LAB", "PA"]
)
def test_pillow_of_every_mode(mode: str) -> None:
    image = Image.new("I", (4, 3)).convert("I;16") if mode == "I;16" else Image.new(mode, (4, 3))
    assert (load_image(image).mode, load_image(image).size, image.mode) == ("RGB", (4, 3), mode)


def closed(path: Path) -> Image.Image:
    image = Image.open(save(path, Image.new("RGB", (4, 4))))
    image.close()
    return image


WRONG: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no bytes": (lambda _: b"", "Empty", "0 bytes"),
    "other bytes": (lambda _: b"hello" * 9, "NotAnImage", "not an image"),
    "half the bytes": (lambda _: jpeg()[:1500], "BrokenImage", "truncated"),
    "a bomb in bytes": (lambda _: png(30_000, 30_000), "TooLarge", "more than 64000000 pixels"),
    "a large image": (lambda _: Image.new("1", (9000, 8000)), "TooLarge", "9000 x 8000 is more than"),
    "a large array": (lambda _: np.broadcast_to(np.uint8(0), (9000, 8000, 3)), "TooLarge", "8000 x 9000 is more than"),
    "a thin array": (lambda _: np.zeros((1, 900), np.uint8), "TooThin", "900 x 1 exceeds the aspect ratio"),
    "nothing": (lambda _: np.zeros((0, 5, 3), np.uint8), "Empty", "5 x 0 pixels: the image is empty"),
    "no pixels": (lambda _: Image.new("RGB", (0, 5)), "Empty", "0 x 5 pixels: the image is empty"),
    "colours first": (lambda _: np.zeros((3, 8, 9), np.uint8), "NotAnImage", r"colours last; got \[3, 8, 9\]"),
    "a batch": (lambda _: np.zeros((1, 8, 9, 3), np.uint8), "NotAnImage", r"got \[1, 8, 9, 3\]"),
    "words": (lambda _: np.array([["a"]]), "NotAnImage", "an array holds numbers; got dtype <U1"),
    "complex numbers": (lambda _: np.zeros((2, 2), complex), "NotAnImage", "got dtype complex128"),
    "a list": (lambda _: [1, 2], "NotAnImage", "a path, bytes, a Pillow image or an array; got list"),
    "nobody": (lambda _: None, "NotAnImage", "got NoneType"),
    "thin bytes": (lambda _: png(5000, 2), "TooThin", "200:1"),
    "a folder": (lambda path: path, "NotAnImage", "folder"),
    "closed": (lambda path: closed(path / "a.png"), "BrokenImage", "cannot be decoded"),
    "a name of nothing": (lambda path: str(path / "b.png"), "Missing", "no such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_source_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    """Bytes from a file too."""
    make, kind, message = WRONG[name]
    sources = [make(tmp_path)]
    if isinstance(sources[0], bytes):
        (tmp_path / "b").write_bytes(sources[0])
        sources.append(tmp_path / "b")
    for source in sources:
        with pytest.raises(ImageError, match=message) as caught:
            load_image(source)  # type: ignore[arg-type]
        assert caught.value.kind == kind and "\n" not in str(caught.value)


def png(width: int, height: int) -> bytes:
    """A PNG that says it is this large, and is not."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def jpeg() -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize("seed", range(20))
def test_damage_never_escapes_as_another_error(tmp_path: Path, seed: int) -> None:
    rng, data = np.random.default_rng(seed), bytearray(jpeg() if seed % 2 else png(40, 30))
    for index in rng.integers(0, len(data), 12):
        data[index] = rng.integers(0, 256)
    (tmp_path / "a").write_bytes(data)
    with contextlib.suppress(ImageError):
        assert load_image(tmp_path / "a").mode == "RGB"


def test_own_pixel_limit(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", Image.new("RGB", (40, 30)))
    with pytest.raises(ImageError, match="1199 pixels; raise --max-pixels"):
        load_image(path, 1199)
    assert load_image(path, 1200).size == (40, 30)


def test_pillow_is_strict_only_within_the_limit() -> None:
    before, filters = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    with pixel_limit(1000):
        assert Image.MAX_IMAGE_PIXELS == 1000
        with pytest.raises(Image.DecompressionBombWarning):
            warnings.warn("large", Image.DecompressionBombWarning, stacklevel=1)
    assert before == Image.MAX_IMAGE_PIXELS
    assert list(warnings.filters) == filters


def test_decoding_ahead_keeps_the_order_and_its_bounds() -> None:
    started: list[int] = []
    gate = threading.Lock()

    def slow(key: int) -> int:
        with gate:
            started.append(key)
        time.sleep(0.002 * (key % 3))
        if key == 7:
            raise ImageError("Empty", "nothing in it")
        return key * key

    received = []
    for key, value in decode_ahead(range(30), slow, threads=3, ahead=5):
        received.append(key)
        assert len(started) <= len(received) + 5
        assert isinstance(value, ImageError) if key == 7 else value == key * key
    assert received == list(range(30))


def test_decoding_ahead_can_be_left_early() -> None:
    ahead = decode_ahead(range(1000), lambda key: key, threads=2, ahead=4)
    assert next(ahead) == (0, 0)
    ahead.close()


def test_nothing_that_a_decoder_prints_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """libjpeg, libtiff and FFmpeg write to the standard error of their process, past Python.

    Through a pipe: the decoding process may not write to files, such as those of pytest's capture.
    """
    (tmp_path / "in").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (120, 120, 3), dtype=np.uint8)
    video = next((Path(__file__).parents[2] / "app" / "scenes" / "data" / "examples").glob("*.mp4")).read_bytes()
    kinds: list[tuple[str, dict[str, str]]] = [(".jpg", {}), (".tif", {"compression": "tiff_lzw"}), (".mp4", {})]
    for number, (suffix, save_options) in enumerate(kinds * 3):
        buffer = io.BytesIO()
        if suffix != ".mp4":
            Image.fromarray(pixels).save(buffer, {".jpg": "JPEG", ".tif": "TIFF"}[suffix], **save_options)
        data, rng = bytearray(buffer.getvalue() or video), random.Random(number)
        for _ in range(40):
            data[rng.randrange(700, len(data))] = rng.randrange(256)
        (tmp_path / "in" / f"{number}{suffix}").write_bytes(data)
    options = ["--model", "tiny", "--max-new-tokens", "4", "--no-progress", "--out", str(tmp_path / "out.jsonl")]
    terminal, (printed, pipe) = os.dup(2), os.pipe()
    os.dup2(pipe, 2)  # what Python prints goes to `capsys`
    try:
        assert main(["caption", str(tmp_path / "in"), *options]) == 1
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(pipe)
    with os.fdopen(printed, "rb") as stream:
        assert stream.read() == b""
    captured = capsys.readouterr()
    assert captured.out == "" and all(line.startswith("mmspec: ") for line in captured.err.splitlines())
