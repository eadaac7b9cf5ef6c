"""Images, clips and manifests, damaged and hostile, each made from a seed; and a watch over what is opened."""

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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from video_files import write_video

CANARY = "canary.mp4"
"""A whole clip beside the file that is read: hostile files refer to it."""
URL = "http://127.0.0.1:{port}/canary.mp4"


def _noise(seed: int, height: int = 24, width: int = 32) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@lru_cache(maxsize=1)
def images() -> dict[str, bytes]:
    """Whole pictures, by name."""
    made, options = dict[str, bytes](), {"gif": {"save_all": True, "append_images": [_noise(1), _noise(2)]}}
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
        buffer, more = io.BytesIO(), options.get(suffix, {})
        _noise(0).save(buffer, name, **more)  # type: ignore[arg-type]
        made[f"a.{suffix}"] = buffer.getvalue()
    for compression in ("jpeg", "tiff_lzw", "tiff_adobe_deflate", "packbits"):
        buffer = io.BytesIO()
        _noise(0).save(buffer, "TIFF", compression=compression)
        made[f"{compression}.tif"] = buffer.getvalue()
    return made


@lru_cache(maxsize=1)
def clips() -> dict[str, bytes]:
    """Whole clips, by name."""
    made = dict[str, bytes]()
    kinds = {
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
    }
    with tempfile.TemporaryDirectory() as folder:
        for suffix, codec in kinds.items():
            made[f"a.{suffix}"] = write_video(Path(folder, f"a.{suffix}"), 6, codec, fps=25).read_bytes()
    made["a.gif"] = images()["a.gif"]
    return made


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n%%EndComments\n{ } loop\n"


def referring(canary: str, port: int) -> dict[str, bytes]:
    """Files that make FFmpeg, or Pillow, open something else, by name."""
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
    made = {name: text.encode() for name, text in texts.items()}
    packets = bytearray(f"G\n{media}".encode().ljust(188 * 4, b" "))
    packets[188::188] = b"G" * 3
    made["session-in-packets.mpg"] = bytes(packets)
    made["dash-in-ebml.mkv"] = b"\x1a\x45\xdf\xa3\xffmatroska" + texts["dash-file.mp4"].encode()
    made["dash-in-riff.avi"] = b"RIFF\x7f\x7f\x7f\x7fAVI " + texts["dash-file.mp4"].encode()
    made["dash-in-gif.gif"] = b"GIF89a" + texts["dash-url.mp4"].encode()
    made["external.mov"] = external(clips()["a.mov"], canary)
    return made


def external(movie: bytes, target: str) -> bytes:
    """A QuickTime movie whose samples lie in another file, by an alias in `dref`; the index is its last box."""
    name, volume = os.path.basename(target).encode(), b"disk"
    path = volume + target.replace("/", ":").encode()
    path += b"\0" * (len(path) % 2)
    alias = bytes(10) + bytes([len(volume)]) + volume.ljust(27, b"\0") + bytes(12) + bytes([len(name)])
    alias += name.ljust(63, b"\0") + bytes(16) + struct.pack(">HH", 1, 1) + bytes(16)
    alias += struct.pack(">HH", 2, len(path)) + path + b"\xff\xff\0\0"
    entry = struct.pack(">I", 12 + len(alias)) + b"alis" + bytes(4) + alias
    data, more = bytearray(movie), 0
    at = movie.index(b"dref") + 4 + 8
    old = int.from_bytes(movie[at : at + 4], "big")
    more = len(entry) - old
    data[at : at + old] = entry
    end = 0
    for box in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        end = movie.index(b"dref") if box == b"dref" else movie.rindex(box, 0, at)
        size = int.from_bytes(movie[end - 4 : end], "big")
        data[end - 4 : end] = struct.pack(">I", size + more)
    return bytes(data)


def damaged(rng: random.Random, whole: bytes, other: bytes) -> bytes:
    """One to four kinds of damage."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(7)
        if kind == 0:
            for place in rng.choices(range(max(1, len(data))), k=rng.choice((1, 4, 30))):
                data[place : place + 1] = bytes([rng.randrange(256)])
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
        else:  # near the header, where sizes are
            place = rng.randrange(min(64, len(data)) or 1)
            data[place : place + 2] = rng.randbytes(2)
    return bytes(data)


def image(seed: int, canary: str = CANARY, port: int = 9) -> tuple[str, bytes]:
    """A name and what is in the file: damaged, hostile, or of another kind than it is named."""
    return _file(random.Random(f"image {seed}"), images(), canary, port)


def clip(seed: int, canary: str = CANARY, port: int = 9) -> tuple[str, bytes]:
    """The same of clips."""
    return _file(random.Random(f"clip {seed}"), clips(), canary, port)


def _file(rng: random.Random, whole: dict[str, bytes], canary: str, port: int) -> tuple[str, bytes]:
    name = rng.choice(list(whole))
    if rng.random() < 0.1:
        hostile = referring(canary, port)
        return name, hostile[rng.choice(list(hostile))]
    if rng.random() < 0.03:
        return name, rng.randbytes(rng.choice((1, 7, 900)))
    other = rng.choice(list({**images(), **clips()}.values()))
    return name, damaged(rng, whole[name], other)


NAMES: tuple[Any, ...] = (
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


def manifest(seed: int) -> tuple[str, bytes]:
    """A name and what is in it."""
    rng = random.Random(f"manifest {seed}")
    suffix = rng.choice(("jsonl", "csv", "txt"))
    rows = []
    for number in range(rng.randint(0, 4)):
        name = rng.choice(NAMES) if rng.random() < 0.3 else f"{number}.png"
        row: dict[str, Any] = {rng.choice(("file_name", "image", "path", "file", "file_name")): name}
        for key in ("prompt", "id", "answer"):
            if rng.random() < 0.1:
                row[key] = rng.choice((*NAMES, "x" * 100_000, number, 10**400))
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
        data = damaged(rng, data, b'{"file_name": "a.png"}\n\0\xff\xfe,,""')
    return f"m.{suffix}", data


# --- what is opened ---------------------------------------------------------------------------------------------------


class Watch:
    """Names of the files of one folder that any process opens (Linux), and connections to a port of this machine."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = -1
        if sys.platform == "linux":
            self._events = self._libc.inotify_init1(os.O_NONBLOCK)
            assert self._events >= 0 and self._libc.inotify_add_watch(self._events, os.fsencode(folder), 0x20) >= 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def opened(self) -> set[str]:
        """Since the last time."""
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
        """Since the last time."""
        many = 0
        while True:
            try:
                self._socket.accept()[0].close()
            except BlockingIOError:
                return many
            many += 1

    def close(self) -> None:
        """Stop."""
        self._socket.close()
        if self._events >= 0:
            os.close(self._events)


@contextmanager
def watched(folder: Path) -> Iterator[Watch]:
    """A `Watch` over a folder that holds the canary."""
    write_video(folder / CANARY, 6)
    watch = Watch(folder)
    watch.opened()
    try:
        yield watch
    finally:
        watch.close()
