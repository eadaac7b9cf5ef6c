"""Pictures and clips as a viewer shows them: orientation, shape of the pixels, times, bits, transparency, HDR."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_table import line
from PIL import Image
from video_files import decoder_command_running, numbered_frame, read_number, write_video

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.errors import UsageError
from mmspec.app.io.images import load_image
from mmspec.app.io.inputs import find_sources
from mmspec.app.io.item import SourceOptions
from mmspec.vision.images import ImageError, available_formats, decode_image
from mmspec.vision.video import decoder_pool, worker_process
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.frames import DecoderCrashedError, Fps, Frames, Uniform, read_frames
from mmspec.vision.video.presentation import find_orientation, to_standard_range

av = pytest.importorskip("av")
CORNERS = np.zeros((64, 96, 3), np.uint8)
CORNERS[:32, :48], CORNERS[:32, 48:] = (250, 0, 0), (0, 250, 0)
CORNERS[32:, :48], CORNERS[32:, 48:] = (0, 0, 250), (250, 250, 250)
NAMES = {(1, 0, 0): "R", (0, 1, 0): "G", (0, 0, 1): "B", (1, 1, 1): "W"}


def corners(image: Image.Image) -> str:
    """The colours of the quarters of a picture, line by line."""
    width, height = image.size
    places = itertools.product((height // 4, 3 * height // 4), (width // 4, 3 * width // 4))
    pixels = np.asarray(image)
    return "".join(NAMES.get(tuple(int(value > 127) for value in pixels[place]), "?") for place in places)


# --- orientation ------------------------------------------------------------------------------------------------------

# x' = a x + c y, y' = b x + d y
MATRICES = [
    ((1, 0, 0, 1), "RGBW"), ((0, 1, -1, 0), "BRWG"), ((-1, 0, 0, -1), "WBGR"), ((0, -1, 1, 0), "GWRB"),
    ((-1, 0, 0, 1), "GRWB"), ((1, 0, 0, -1), "BWRG"), ((0, 1, 1, 0), "RBGW"), ((0, -1, -1, 0), "WGBR"),
    ((0.996, 0.087, -0.087, 0.996), "RGBW"), ((0.1, 0.995, -0.995, 0.1), "BRWG"), ((-2, 0.2, 0.1, 2), "GRWB"),
    ((0, 0, 0, 0), "RGBW"), ((0.7071, 0.7071, -0.7071, 0.7071), "RGBW"),
]  # fmt: skip


@pytest.fixture(scope="module")
def upright(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_video(tmp_path_factory.mktemp("clips") / "a.mp4", [CORNERS] * 2).read_bytes()


@line("a picture that EXIF turns, a clip that its display matrix turns or mirrors")
@pytest.mark.parametrize(("matrix", "expected"), MATRICES)
def test_display_matrices(matrix: tuple[float, ...], expected: str, upright: bytes) -> None:
    a, b, c, d = (round(65536 * value) for value in matrix)
    at = upright.index(b"tkhd") + 44
    clip = upright[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + upright[at + 36 :]
    frames = read_frames(clip, num_frames=1)
    assert corners(frames.images[0]) == expected
    assert (frames.metadata.width, frames.metadata.height) == frames.images[0].size


def test_an_angle_is_rounded_to_the_nearest_orientation() -> None:
    for degrees in range(0, 360, 5):
        turn = np.exp(1j * np.radians(degrees))
        mirrored = find_orientation(-turn.real, -turn.imag, -turn.imag, turn.real)
        plain = find_orientation(turn.real, turn.imag, -turn.imag, turn.real)
        assert (plain is None) == (min(degrees, 360 - degrees) <= 45)
        assert plain != mirrored


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF", "HEIF"])
def test_exif_orientations(kind: str) -> None:
    if kind not in available_formats():
        pytest.skip("not installed")
    turned = ("RGBW", "GRWB", "WBGR", "BWRG", "RBGW", "BRWG", "WGBR", "GWRB")
    for number, expected in enumerate(turned, 1):
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = number
        Image.fromarray(CORNERS).save(file, kind, exif=exif.tobytes())
        assert corners(decode_image(file.getvalue(), 10**6)) == expected, number


# --- shape of the pixels ----------------------------------------------------------------------------------------------


def make_clip(
    path: Path, frames: list[np.ndarray], codec: str, pix_fmt: str, sar: tuple[int, int] = (0, 1), **context: Any
) -> Path:
    """A clip of [height, width, 3 or 4] uint8 frames, with attributes of its codec's context."""
    return write_video(path, frames, codec, pix_fmt=pix_fmt, sar=sar, context=context)


@line("a clip whose pixels are not square")
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
@pytest.mark.parametrize(
    ("sar", "size"),
    [((4, 3), (128, 64)), ((2, 1), (192, 64)), ((8, 9), (96, 72)), ((1, 1), (96, 64)), ((99, 1), (96, 64))],
)
def test_pixel_aspect(suffix: str, sar: tuple[int, int], size: tuple[int, int], tmp_path: Path) -> None:
    clip = make_clip(tmp_path / f"a.{suffix}", [CORNERS] * 2, "libx264", "yuv420p", sar)
    frames = read_frames(clip, num_frames=2)
    assert frames.images[0].size == size == (frames.metadata.width, frames.metadata.height)
    assert corners(frames.images[0]) == "RGBW"
    small = read_frames(clip, num_frames=1, max_pixels=1000).images[0]
    assert small.width / small.height == pytest.approx(size[0] / size[1], rel=0.1)


# --- times ------------------------------------------------------------------------------------------------------------

DENSE = [20 * number for number in range(150)]  # three seconds of 50 frames each


@line("a clip with a variable frame rate")
@pytest.mark.parametrize("isolated", [False, True])
def test_frames_are_chosen_by_time(isolated: bool, tmp_path: Path) -> None:
    pts = [*DENSE, *range(3000, 30_000, 1000)]
    clip = write_video(tmp_path / "a.mkv", [numbered_frame(n, 80) for n in range(len(pts))], pts=pts)

    def read(sampler: Any) -> Frames:
        frames = read_frames(clip, sampler, isolated=isolated)
        assert [read_number(image) for image in frames.images] == list(frames.metadata.frames_indices)
        assert [round(1000 * time) for time in frames.timestamps] == [pts[n] for n in frames.metadata.frames_indices]
        about = frames.metadata.for_processor()
        for number, time in zip(about["frames_indices"], frames.timestamps, strict=True):
            assert abs(number / about["fps"] - time) <= 1 / about["fps"]
        return frames

    for sampler in (Fps(1.0), Fps(1.0, hf=True)):
        times = read(sampler).timestamps
        assert 27 <= len(times) <= 30 and sum(time < 3 for time in times) <= 4 and np.diff(times).max() < 2.5
    for even in (Uniform(8), Uniform(8, hf=True)):
        times = read(even).timestamps
        assert len(times) == 8 and np.diff(times).min() > 2.5 and np.diff(times).max() < 5.5


def test_a_frame_that_is_held_is_taken_once(tmp_path: Path) -> None:
    """The last one for half a minute, or one in the middle; a constant rate with rounded times is as before."""
    held = [*DENSE, 33_000]
    clip = write_video(tmp_path / "a.mkv", [numbered_frame(n, 80) for n in range(len(held))], pts=held)
    frames = read_frames(clip, fps=1)
    assert frames.timestamps[:3] == pytest.approx([0, 1, 2], abs=0.25) and len(frames.images) <= 5
    film = [round(number * 1000 / 23.976) for number in range(60)]
    clip = write_video(tmp_path / "b.mkv", [numbered_frame(n, 80) for n in range(60)], pts=film)
    for count in (7, 8, 60):
        chosen = read_frames(clip, num_frames=count).metadata.frames_indices
        assert list(chosen) == [n * 60 // count for n in range(count)]


# --- bits -------------------------------------------------------------------------------------------------------------

RAMP = np.linspace(0, 1, 64).reshape(8, 8)


def png_of_16_bits(values: np.ndarray) -> bytes:
    """[height, width, 2 to 4] as a PNG file."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff_of_16_bits(values: np.ndarray, order: str, is_packed: bool) -> bytes:
    """[height, width, 3 or 4] as a TIFF file in the byte order "<" or ">", packed by Deflate."""
    height, width, channels = values.shape
    data = values.astype(f"{order}u2").tobytes()
    data = zlib.compress(data) if is_packed else data
    bits = struct.pack(f"{order}H", 16) * channels
    start = 8 + 2 + 12 * (11 if channels == 4 else 10) + 4
    tags = {256: width, 257: height, 258: start, 259: 8 if is_packed else 1, 262: 2, 273: start + len(bits),
            277: channels, 278: height, 279: len(data), 284: 1, **({338: 2} if channels == 4 else {})}  # fmt: skip
    entries = b"".join(
        struct.pack(f"{order}HHI", tag, 3, channels) + struct.pack(f"{order}I", value)
        if tag == 258
        else struct.pack(f"{order}HHII", tag, 4, 1, value)
        for tag, value in tags.items()
    )
    mark = {"<": b"II", ">": b"MM"}[order]
    directory = struct.pack(f"{order}HIH", 42, 8, len(tags)) + entries + bytes(4)
    return mark + directory + bits + data


@line("10 to 14 bits stored in 16: colour PNG, TIFF, PPM")
@pytest.mark.parametrize("bits", [10, 12, 14, 16])
def test_bits_in_wider_colours(bits: int) -> None:
    top = 2**bits - 1
    colours = np.stack([RAMP, RAMP[::-1], RAMP.T / 2], axis=2)
    values = (top * colours).round()
    opaque = np.full((8, 8, 1), top)
    files = {
        "png": png_of_16_bits(values),
        "png alpha": png_of_16_bits(np.concatenate([values, opaque], axis=2)),
        "ppm": b"P6 8 8 65535\n" + values.astype(">u2").tobytes(),
        "ppm of its bits": f"P6 8 8 {top}\n".encode() + values.astype(">u2").tobytes(),
    }
    for order, is_packed in itertools.product("<>", (False, True)):
        files[f"tiff {order} {is_packed}"] = tiff_of_16_bits(values, order, is_packed)
        with_alpha = np.concatenate([values, opaque], axis=2)
        files[f"tiff alpha {order} {is_packed}"] = tiff_of_16_bits(with_alpha, order, is_packed)
    for name, content in files.items():
        assert np.abs(np.asarray(decode_image(content, 10**6)) - 255 * colours).max() <= 3, name
    grey = png_of_16_bits(np.concatenate([values[:, :, :1], opaque], axis=2))
    assert np.abs(np.asarray(decode_image(grey, 10**6))[:, :, 1] - 255 * RAMP).max() <= 3
    assert not np.asarray(decode_image(png_of_16_bits(0 * values), 10**6)).any(), "black"


# --- transparency and high dynamic range ------------------------------------------------------------------------------


@line("a clip with transparency: ProRes 4444, PNG, FFV1, animation")
@pytest.mark.parametrize(
    ("suffix", "codec", "pix_fmt"),
    [
        ("mov", "qtrle", "argb"),
        ("mov", "prores_ks", "yuva444p10le"),
        ("mov", "png", "rgba"),
        ("mkv", "ffv1", "yuva420p"),
    ],
)
def test_transparency_of_clips_is_white(suffix: str, codec: str, pix_fmt: str, tmp_path: Path) -> None:
    picture = np.zeros((32, 32, 4), np.uint8)
    picture[:, :16] = (255, 0, 0, 255)
    picture[:16, 16:] = (0, 0, 0, 128)
    image = read_frames(make_clip(tmp_path / f"a.{suffix}", [picture] * 2, codec, pix_fmt), num_frames=1).images[0]
    colours = np.asarray(image).astype(int)
    for place, expected in (((24, 4), (255, 0, 0)), ((24, 28), (255, 255, 255)), ((6, 28), (127, 127, 127))):
        assert np.abs(colours[place] - expected).max() < 12, place


@line("HDR clips: PQ (HDR10), HLG")
@pytest.mark.parametrize(("transfer", "white"), [(16, 0.5807), (18, 0.75)])
@pytest.mark.parametrize("primaries", [9, 12])
def test_hdr_clips_are_tone_mapped(transfer: int, white: float, primaries: int, tmp_path: Path) -> None:
    """White of 203 nits is bright, and what is brighter is told apart from it."""
    levels = [0.0, 0.3, white, (1 + white) / 2, 1.0]
    picture = np.repeat(np.round(255 * np.array(levels)).astype(np.uint8), 16)[None, :, None]
    picture = np.ascontiguousarray(np.broadcast_to(picture, (32, 80, 3)))
    tags = {"color_trc": transfer, "color_primaries": primaries, "colorspace": 9, "color_range": 1}
    clip = make_clip(tmp_path / "a.mkv", [picture] * 2, "ffv1", "yuv420p10le", **tags)
    image = read_frames(clip, num_frames=1).images[0]
    black, dark, bright, brighter, most = (int(np.asarray(image)[16, 8 + 16 * n].mean()) for n in range(5))
    assert black <= 3 and 10 < dark < 120 and 215 < bright < 235 < brighter < most <= 255
    assert np.ptp(np.asarray(image).astype(int), axis=2).max() <= 3, "grey stays grey"


def test_the_colours_of_hdr() -> None:
    """PQ and HLG of one light are one colour; red of BT.2020 is redder than any of sRGB."""
    pq, hlg = (
        to_standard_range(np.full((1, 1, 3), round(65535 * code), np.uint16), transfer, 9)[0, 0].astype(int)
        for code, transfer in ((0.5807, 16), (0.75, 18))
    )
    assert np.abs(pq - hlg).max() <= 2
    red = np.array([[[round(65535 * 0.58), 0, 0]]], np.uint16)
    for transfer, primaries in itertools.product((16, 18), (1, 9, 12)):
        r, g, b = to_standard_range(red, transfer, primaries)[0, 0]
        assert r > 100 and g == b == 0


def test_all_of_it_works_where_no_file_can_be_opened(tmp_path: Path) -> None:
    """In the decoder process, which can import nothing by then."""
    layer = np.full((32, 32, 4), 128, np.uint8)
    tags = {"color_trc": 16, "color_primaries": 9, "colorspace": 9, "color_range": 1}
    clips = [
        make_clip(tmp_path / "a.mov", [layer] * 2, "png", "rgba"),
        make_clip(tmp_path / "b.mkv", [layer] * 2, "ffv1", "yuv420p10le", (4, 3), **tags),
    ]
    with DecoderPool() as pool:
        for clip in clips:
            frames = read_frames(clip, num_frames=1, isolated=pool)
            assert np.array_equal(frames.array(), read_frames(clip, num_frames=1).array())
        deep = png_of_16_bits((4095 * np.stack([RAMP] * 3, axis=2)).round())
        assert np.array_equal(np.asarray(pool.decode_image(deep, 10**6)), np.asarray(decode_image(deep, 10**6)))


# --- what is no picture -----------------------------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * b"0" + b"\nsize 90405214\n"


@line("a Git LFS pointer in place of a file")
def test_pointers_of_git_lfs(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.mp4"):
        (tmp_path / name).write_bytes(POINTER)
        with pytest.raises(
            ImageError if name == "a.jpg" else ValueError, match=r"a Git LFS pointer.*git lfs pull"
        ) as told:
            load_image(tmp_path / name) if name == "a.jpg" else read_frames(tmp_path / name)
        assert len(str(told.value)) <= 300
    for name in ("a.tar", "a.parquet", "a.csv", "a.jsonl", "a.txt", "a.zip"):
        (tmp_path / name).write_bytes(POINTER)
        with pytest.raises(
            UsageError, match=f"{name} is a Git LFS pointer, not the file itself: git lfs pull fetches it"
        ):
            find_sources(str(tmp_path / name), SourceOptions(), set())
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (saved / "dataset_info.json").write_text("{}")
    (saved / "data-00000-of-00001.arrow").write_bytes(POINTER)
    with pytest.raises(UsageError, match="arrow is a Git LFS pointer"):
        find_sources(str(saved), SourceOptions(), set())[0].check()


@line("`--frames` above 256")
@pytest.mark.parametrize("options", [{}, {"fps": 1.0}])
def test_more_frames_than_are_read_of_a_clip(options: dict[str, Any]) -> None:
    assert CaptionConfig((), "m", frames=256, **options).frame_sampler()
    with pytest.raises(UsageError, match="at most 256 frames of a clip are read; got --frames 300"):
        CaptionConfig((), "m", frames=300, **options).frame_sampler()


# --- the answers of decoders ------------------------------------------------------------------------------------------


@line("a decoder process that does not start, or sends wrong bytes")
@pytest.mark.parametrize(
    "code",
    [
        "decode_worker._to_bytes = lambda part: part.convert('RGB').tobytes() + b'more'",
        "decode_worker.END = b'}'",
        "decode_worker.asdict = lambda info: dict(vars(info), width=-5)",
        "decode_worker.asdict = lambda info: dict(vars(info), num_frames='many')",
        "decode_worker.asdict = lambda info: dict(vars(info), duration=float('nan'))",
        "pyav_reader.FrameIndex.shown_at = lambda self, numbers: [*numbers, 1]",
        "pyav_reader.fit_size = lambda size, max_pixels: (2000, 1000)",
    ],
)
def test_the_size_of_an_answer_is_checked(code: str, upright: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_pool, "worker_command", decoder_command_running(code))
    monkeypatch.setattr(worker_process, "EXIT_TIMEOUT_S", 0.05)
    with DecoderPool() as pool:
        with pytest.raises(DecoderCrashedError, match="malformed answer"):
            read_frames(upright, num_frames=1, isolated=pool)
        assert not pool._all, "the process is replaced"
