"""Pictures as cameras and scanners write them: more than 8 bits, missing data, colour profiles, very large photos."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from mmspec.app.ui.limits import Limits
from mmspec.app.ui.uploads import StoredFile
from mmspec.vision import images
from mmspec.vision.images import ImageError, decode_image, to_uint8
from mmspec.vision.video.decoder_pool import DecoderPool

RAMP = np.linspace(0, 1, 64).reshape(8, 8)
EXPECTED = (255 * RAMP).round()


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def near(values: np.ndarray, tolerance: float = 3) -> bool:
    return bool(np.abs(values.astype(float) - EXPECTED).max() <= tolerance)


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_bits_in_wider_files(bits: int, kind: str) -> None:
    values = (RAMP * (2**bits - 1)).round().astype(np.uint16)
    assert near(np.asarray(decode_image(saved(Image.fromarray(values), kind), 10**6))[:, :, 0])
    assert near(to_uint8(values.astype(np.int32))) and near(to_uint8(values.astype(np.int64)))


def test_large_integers() -> None:
    assert near(to_uint8((RAMP * 10**6).astype(np.int32)))
    assert near(
        np.asarray(decode_image(saved(Image.fromarray((RAMP * 10**6).astype(np.int32)), "TIFF"), 10**6))[:, :, 0]
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_with_a_value_above_one(dtype: type) -> None:
    for bright in (1.0001, 1.5, 200.0):
        values = RAMP.astype(dtype)
        values[3, 3] = bright
        scaled = to_uint8(values).astype(float)
        scaled[3, 3] = EXPECTED[3, 3]
        assert near(scaled), bright
    radiance = to_uint8((RAMP * 4).astype(dtype))
    assert near(radiance, 8), "not black"
    assert near(to_uint8((RAMP * 255).astype(dtype)))
    assert not to_uint8(np.zeros((4, 4), dtype)).any() and (to_uint8(np.ones((4, 4), dtype)) == 255).all()


@pytest.mark.parametrize(
    ("dtype", "scale", "missing"),
    [(np.float32, 1, -9999.0), (np.float32, 1, -3.4e38), (np.float32, 1, 3.4e38), (np.float32, 1, np.nan),
     (np.float32, 255, -32768.0), (np.int16, 1000, -32768), (np.int32, 4000, -2147483648), (np.int32, 255, 2147483647),
     (np.uint16, 4000, 65535)],
)  # fmt: skip
@pytest.mark.parametrize("share", [0.02, 0.4])
def test_missing_data(dtype: type, scale: int, missing: float, share: float) -> None:
    values = (np.tile(RAMP, (8, 8)) * scale).astype(dtype)
    gone = np.random.default_rng(0).random(values.shape) < share
    values[gone] = missing
    scaled = to_uint8(values).astype(float)
    full = {1000: 1023, 4000: 4095}.get(scale, scale)
    expected = np.tile(RAMP, (8, 8)) * scale / full * 255
    assert np.abs(scaled - expected)[~gone].max() < 4


def test_two_values_are_no_missing_data() -> None:
    for values in (np.array([[0, 65535]], np.uint16), np.array([[0, 255]], np.int32), np.array([[0.0, 1.0]])):
        assert to_uint8(values).tolist() == [[0, 255]]


def profile(swapped: bool) -> bytes:
    """sRGB, or sRGB with red and blue exchanged under the same name."""
    content = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for number in range(struct.unpack(">I", content[128:132])[0] if swapped else 0):
        at = 132 + 12 * number
        tag = bytes(content[at : at + 4])
        content[at : at + 4] = {b"rXYZ": b"bXYZ", b"bXYZ": b"rXYZ"}.get(tag, tag)
    return bytes(content)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L"])
def test_colour_profiles(kind: str, mode: str) -> None:
    if kind == "JPEG" and mode in ("RGBA", "P"):
        pytest.skip("no such JPEG")
    picture = Image.new("RGB", (32, 32), (255, 0, 0)).convert(mode)
    red, _, blue = np.asarray(decode_image(saved(picture, kind, icc_profile=profile(True)), 10**6))[5, 5].astype(int)
    assert (blue > 230 and red < 30) if mode != "L" else red == blue
    plain = np.asarray(decode_image(saved(picture, kind), 10**6))
    for same in (profile(False), b"no profile", b""):
        assert (np.asarray(decode_image(saved(picture, kind, icc_profile=same), 10**6)) == plain).all()


def test_large_jpegs_are_decoded_at_a_reduced_scale() -> None:
    photo = saved(Image.linear_gradient("L").resize((3000, 2000)).convert("RGB"), "JPEG", quality=50)
    for limit, size in (
        (6_000_000, (3000, 2000)),
        (5_999_999, (1500, 1000)),
        (400_000, (750, 500)),
        (94_000, (375, 250)),
    ):
        image = decode_image(photo, limit)
        assert image.size == size and abs(image.getpixel((5, size[1] // 2))[0] - 128) < 4  # type: ignore[index]
    with pytest.raises(ImageError, match=r"3000 x 2000 is more than 640000 pixels, the limit for a JPEG at 1/8 scale"):
        decode_image(photo, 10_000)
    with pytest.raises(ImageError, match="is more than 400000 pixels"):
        decode_image(saved(Image.new("RGB", (3000, 2000)), "PNG"), 400_000)
    turned = Image.Exif()
    turned[0x0112] = 6
    assert decode_image(saved(Image.open(io.BytesIO(photo)), "JPEG", exif=turned), 400_000).size == (500, 750)
    assert decode_image(saved(Image.new("CMYK", (900, 600)), "JPEG"), 200_000).size == (450, 300)


def test_a_photo_of_200_megapixels_in_the_demo(tmp_path: Path) -> None:
    content = bytearray(saved(Image.new("L", (16, 16)), "JPEG"))
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">HH", 30000, 30000)
    (tmp_path / "bomb.jpg").write_bytes(content)
    with pytest.raises(Exception, match=r"900 megapixels \(30000 x 30000\); 268 megapixels"):
        Limits().load_media(StoredFile(tmp_path / "bomb.jpg", "bomb.jpg", 0.0))
    with DecoderPool() as pool:
        photo = saved(Image.new("L", (10000, 7000)), "JPEG", quality=20)
        assert pool.decode_image(photo, 40_000_000).size == (5000, 3500)


def test_formats_that_are_not_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200)
    monkeypatch.setattr(images, "available_formats", lambda: ("PNG", "JPEG"))
    with pytest.raises(ImageError, match=r"a HEIC image \(pip install pillow-heif to read it\)"):
        decode_image(heic, 10**6)
    for start in (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"):
        with pytest.raises(ImageError, match="a JPEG XL image; convert it to PNG or JPEG"):
            decode_image(start + bytes(100), 10**6)
    monkeypatch.undo()
    if "HEIF" in images.available_formats():
        with pytest.raises(ImageError, match="cannot be decoded"):
            decode_image(heic, 10**6)
