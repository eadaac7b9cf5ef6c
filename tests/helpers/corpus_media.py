"""Seeded images, videos and manifests, damaged and hostile, and a watcher of opened files and connections."""

from __future__ import annotations

import ctypes
import io
import json
import os
import random
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from video_files import write_video

CANARY = "canary.mp4"
"""A valid video next to the file under test; hostile files refer to it."""
URL = "http://127.0.0.1:{port}/canary.mp4"


def _noise(seed: int, height: int = 24, width: int = 32) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@lru_cache(maxsize=1)
def valid_images() -> dict[str, bytes]:
    """Content of valid image files, by file name."""
    files = dict[str, bytes]()
    options = {"gif": {"save_all": True, "append_images": [_noise(1), _noise(2)]}}
    for suffix, name in (
        ("png", "PNG"),
        ("jpg", "JPEG"),
        ("webp", "WEBP"),
        ("gif", "GIF"),
        ("bmp", "BMP"),
        ("tif", "TIFF"),
        ("ppm", "PPM"),
        ("avif", "AVIF"),
    ):
        buffer = io.BytesIO()
        _noise(0).save(buffer, name, **options.get(suffix, {}))  # type: ignore[arg-type]
        files[f"a.{suffix}"] = buffer.getvalue()
    for compression in ("jpeg", "tiff_lzw", "tiff_adobe_deflate", "packbits"):
        buffer = io.BytesIO()
        _noise(0).save(buffer, "TIFF", compression=compression)
        files[f"{compression}.tif"] = buffer.getvalue()
    return files


@lru_cache(maxsize=1)
def valid_videos() -> dict[str, bytes]:
    """Content of valid video files, by file name."""
    files = dict[str, bytes]()
    codecs = {
        "mp4": "libx264",
        "mov": "mpeg4",
        "mkv": "libx264",
        "webm": "libvpx-vp9",
        "avi": "mpeg4",
        "ts": "mpeg2video",
        "mpg": "mpeg2video",
        "flv": "flv1",
        "wmv": "wmv2",
        "3gp": "mpeg4",
        "m2v": "mpeg2video",
    }
    with tempfile.TemporaryDirectory() as folder:
        for suffix, codec in codecs.items():
            files[f"a.{suffix}"] = write_video(Path(folder, f"a.{suffix}"), 6, codec, fps=25).read_bytes()
    files["a.gif"] = valid_images()["a.gif"]
    return files


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n%%EndComments\n{ } loop\n"


def files_with_references(canary: str, port: int) -> dict[str, bytes]:
    """Content of files that make FFmpeg or Pillow open another file or URL, by file name."""
    url = URL.format(port=port)
    texts = dict[str, str]()
    for kind, target in (("file", canary), ("url", url)):
        texts[f"hls-{kind}.mp4"] = (
            f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:9\n#EXTINF:9.0,\n{target}\n#EXT-X-ENDLIST\n"
        )
        texts[f"master-{kind}.mp4"] = f"#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=1\n{target}\n"
        texts[f"concat-{kind}.mkv"] = f"ffconcat version 1.0\nfile '{target}'\n"
        texts[f"redirect-{kind}.avi"] = f"[Reference]\nRef1={target}\n"
        texts[f"asx-{kind}.wmv"] = f'<asx version="3.0"><entry><ref href="{target}"/></entry></asx>'
        texts[f"dash-{kind}.mp4"] = (
            '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
            'profiles="urn:mpeg:dash:profile:isoff-on-demand:2011"><Period><AdaptationSet><Representation id="0" '
            f'bandwidth="9"><BaseURL>{target}</BaseURL></Representation></AdaptationSet></Period></MPD>'
        )
        texts[f"drawing-{kind}.png"] = f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{target}"/></svg>'
        texts[f"run-{kind}.png"] = EPS.decode() + f"({target}) run\n"
    media = (
        f"o=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {port} RTP/AVP 96\na=rtpmap:96 H264/90000\n"
    )
    texts["session.mp4"] = "v=0\n" + media
    files = {name: text.encode() for name, text in texts.items()}
    packets = bytearray(f"G\n{media}".encode().ljust(188 * 4, b" "))
    packets[188::188] = b"G" * 3
    files["session-in-packets.mpg"] = bytes(packets)
    files["dash-in-ebml.mkv"] = b"\x1a\x45\xdf\xa3\xffmatroska" + texts["dash-file.mp4"].encode()
    files["dash-in-riff.avi"] = b"RIFF\x7f\x7f\x7f\x7fAVI " + texts["dash-file.mp4"].encode()
    files["dash-in-gif.gif"] = b"GIF89a" + texts["dash-url.mp4"].encode()
    files["external.mov"] = movie_with_external_samples(valid_videos()["a.mov"], canary)
    return files


def movie_with_external_samples(movie: bytes, target: str) -> bytes:
    """A QuickTime movie whose samples are in another file, through an alias in `dref`; `moov` must be the last box."""
    name, volume = os.path.basename(target).encode(), b"disk"
    path = volume + target.replace("/", ":").encode()
    path += b"\0" * (len(path) % 2)
    alias = bytes(10) + bytes([len(volume)]) + volume.ljust(27, b"\0") + bytes(12) + bytes([len(name)])
    alias += name.ljust(63, b"\0") + bytes(16) + struct.pack(">HH", 1, 1) + bytes(16)
    alias += struct.pack(">HH", 2, len(path)) + path + b"\xff\xff\0\0"
    entry = struct.pack(">I", 12 + len(alias)) + b"alis" + bytes(4) + alias
    data = bytearray(movie)
    at = movie.index(b"dref") + 4 + 8
    old_size = int.from_bytes(movie[at : at + 4], "big")
    growth = len(entry) - old_size
    data[at : at + old_size] = entry
    for box in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        end = movie.index(b"dref") if box == b"dref" else movie.rindex(box, 0, at)
        size = int.from_bytes(movie[end - 4 : end], "big")
        data[end - 4 : end] = struct.pack(">I", size + growth)
    return bytes(data)


def damage(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Apply one to four random kinds of damage to a file's content."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(7)
        if kind == 0:
            for index in rng.choices(range(max(1, len(data))), k=rng.choice((1, 4, 30))):
                data[index : index + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\0\1\0\0", b"\xff\0\0\0"))
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 400)] * rng.choice((1, 3, 50))
        elif kind == 4:
            data[at:] = other[rng.randrange(len(other)) :]
        elif kind == 5:
            del data[at : at + rng.randint(1, 64)]
        else:  # near the header, which contains sizes
            index = rng.randrange(min(64, len(data)) or 1)
            data[index : index + 2] = rng.randbytes(2)
    return bytes(data)


def make_image(seed: int, canary: str = CANARY, port: int = 9) -> tuple[str, bytes]:
    """Name and content of an image file: damaged, hostile, or of another format than its name says."""
    return _make_file(random.Random(f"image {seed}"), valid_images(), canary, port)


def make_video(seed: int, canary: str = CANARY, port: int = 9) -> tuple[str, bytes]:
    """Likewise for a video file."""
    return _make_file(random.Random(f"clip {seed}"), valid_videos(), canary, port)


def _make_file(rng: random.Random, valid: dict[str, bytes], canary: str, port: int) -> tuple[str, bytes]:
    name = rng.choice(list(valid))
    if rng.random() < 0.1:
        hostile = files_with_references(canary, port)
        return name, hostile[rng.choice(list(hostile))]
    if rng.random() < 0.03:
        return name, rng.randbytes(rng.choice((1, 7, 900)))
    other = rng.choice(list({**valid_images(), **valid_videos()}.values()))
    return name, damage(rng, valid[name], other)


FILE_NAMES: tuple[Any, ...] = (
    "a.png",
    "../a.png",
    "/etc/passwd",
    "a" * 5000 + ".png",
    "b/" * 2000 + "a.png",
    "\ud800.png",
    "a\0.png",
    "",
    ".",
    "..",
    "concat:a.mp4|canary.mp4",
    "http://127.0.0.1/canary.mp4",
    "file:canary.mp4",
    "%d.png",
    "*.png",
    "loop.png",
    None,
    7,
    True,
    1e999,
    [],
    {"a": 1},
)


def make_manifest(seed: int) -> tuple[str, bytes]:
    """Name and content of a manifest."""
    rng = random.Random(f"manifest {seed}")
    suffix = rng.choice(("jsonl", "csv", "txt"))
    rows = []
    for index in range(rng.randint(0, 4)):
        name = rng.choice(FILE_NAMES) if rng.random() < 0.3 else f"{index}.png"
        row: dict[str, Any] = {rng.choice(("file_name", "image", "path", "file", "file_name")): name}
        for key in ("prompt", "id", "answer"):
            if rng.random() < 0.1:
                row[key] = rng.choice((*FILE_NAMES, "x" * 100_000, index, 10**400))
        rows.append(row)
    if suffix == "jsonl":
        text = "\n".join(json.dumps(row) for row in rows)
        if rng.random() < 0.2:
            text += "\n" + rng.choice(("[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"a": NaN}', "null", '"x"'))
    elif suffix == "csv":
        text = "file_name,prompt,id\n" + "\n".join(",".join(f'"{value}"' for value in row.values()) for row in rows)
        text += rng.choice(("", "", "", '\n"never closed', "\n" + "x" * 200_000, "\n,,,,,,,", "\r\r\n"))
    else:
        text = "\n".join(str(value) for row in rows for value in row.values())
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.5 and data:
        data = damage(rng, data, b'{"file_name": "a.png"}\n\0\xff\xfe,,""')
    return f"m.{suffix}", data


# --- opened files ----------------------------------------------------------------------------------------------------


class OpenWatcher:
    """Records files of one folder that any process opens (Linux inotify), and connections to a local port."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = -1
        if sys.platform == "linux":
            self._events = self._libc.inotify_init1(os.O_NONBLOCK)
            assert self._events >= 0 and self._libc.inotify_add_watch(self._events, os.fsencode(folder), 0x20) >= 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def opened_files(self) -> set[str]:
        """Names of files opened since the last call."""
        names = set[str]()
        while self._events >= 0:
            try:
                data = os.read(self._events, 1 << 16)
            except BlockingIOError:
                break
            while data:
                size = struct.unpack("iIII", data[:16])[3]
                names.add(data[16 : 16 + size].rstrip(b"\0").decode())
                data = data[16 + size :]
        return names - {""}

    def connections(self) -> int:
        """Number of connections since the last call."""
        count = 0
        while True:
            try:
                self._socket.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1

    def close(self) -> None:
        """Stop watching."""
        self._socket.close()
        if self._events >= 0:
            os.close(self._events)


@contextmanager
def watch_folder(folder: Path) -> Iterator[OpenWatcher]:
    """An `OpenWatcher` of a folder that contains the canary."""
    write_video(folder / CANARY, 6)
    watcher = OpenWatcher(folder)
    watcher.opened_files()
    try:
        yield watcher
    finally:
        watcher.close()


def peak_memory(workers: Iterable[Any]) -> int:
    """Most memory that one of the processes has had, in bytes; 0 where it is unknown or they are gone."""
    peaks = [0]
    for worker in list(workers):
        with suppress(OSError):
            lines = Path(f"/proc/{worker._process.pid}/status").read_text().splitlines()
            peaks += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")]
    return max(peaks)
