"""Hostile images and videos: refused by content with a one-line message, and no other file is opened.

inotify reports the opened files, also those of native code and of other processes; a socket accepts connections.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corpus_media as corpus
import numpy as np
import pytest
from corpus_media import CANARY, OpenWatcher, peak_memory, watch_folder
from PIL import Image
from video_files import decoder_command_running, write_video

from mmspec.app.io.images import ImageError, load_image
from mmspec.app.io.videos import load_media
from mmspec.vision import images
from mmspec.vision.video import decoder_pool, pyav_reader
from mmspec.vision.video.containers import CONTAINERS, ContainerError, ContainerFile, detect_container
from mmspec.vision.video.frames import DecoderPool, read_frames

LINUX = sys.platform == "linux"


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    with DecoderPool(timeout_s=20) as isolated:
        yield isolated


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[OpenWatcher]:
    with watch_folder(tmp_path) as watcher:
        yield watcher


# --- containers -------------------------------------------------------------------------------------------------------


def test_containers_are_detected_and_read(pool: DecoderPool, tmp_path: Path) -> None:
    found = set[str]()
    for name, content in corpus.valid_videos().items():
        container = detect_container(content[:4096])
        (tmp_path / name).write_bytes(content)
        for source in (tmp_path / name, content):
            frames = [read_frames(source, num_frames=3, isolated=way) for way in (False, pool)]
            assert all(len(one.images) >= 3 for one in frames), name
            assert (frames[0].array() == frames[1].array()).all(), name
        found.add(container.name)
    assert found == {container.name for container in CONTAINERS} - {"Ogg", "DV"}
    assert detect_container(b"OggS\0\2").name == "Ogg"


@pytest.mark.parametrize("way", ["path", "bytes"])
@pytest.mark.parametrize("isolated", [False, True])
def test_files_with_references_open_nothing(
    way: str, isolated: bool, watcher: OpenWatcher, pool: DecoderPool, tmp_path: Path
) -> None:
    """In this process and in a worker."""
    hostile = corpus.files_with_references(str(tmp_path / CANARY), watcher.port)
    for name, content in hostile.items():
        file = tmp_path / name
        file.write_bytes(content)
        watcher.opened_files()
        with pytest.raises(ValueError, match=r"^[^\n]*$"):
            read_frames(file if way == "path" else content, isolated=pool if isolated else False)
        assert watcher.opened_files() <= {name} and not watcher.connections(), name


def test_the_message_names_the_format(tmp_path: Path) -> None:
    hostile = corpus.files_with_references("x.mp4", 9)
    names = {"hls-file": "an HLS playlist", "concat-url": "a concat script", "dash-file": "a DASH manifest"}
    names |= {"session": "an SDP file", "drawing-file": "an SVG drawing", "run-file": "an EPS or PostScript file"}
    for name, message in names.items():
        content = next(content for key, content in hostile.items() if key.startswith(f"{name}."))
        with pytest.raises(ValueError, match=rf"allowed containers: MP4/MOV, .*; received {message}\)$"):
            read_frames(content)


@pytest.mark.skipif(not LINUX, reason="inotify")
def test_watcher_detects_what_ffmpeg_opens(watcher: OpenWatcher, tmp_path: Path) -> None:
    """FFmpeg alone follows these files, so the tests above are effective."""
    av = pytest.importorskip("av")
    followed = set[str]()
    external = {"enable_drefs": "1", "use_absolute_path": "1"}
    options = {"hls-file.mp4": {"allowed_extensions": "ALL", "extension_picky": "0"}, "external.mov": external}
    formats = {"hls-file.mp4": "hls"}
    options["concat-file.mkv"] = {"safe": "0"}
    for name, more in options.items():
        file = tmp_path / name
        file.write_bytes(corpus.files_with_references(str(tmp_path / CANARY), watcher.port)[name])
        watcher.opened_files()
        try:
            with av.open(
                str(file), format=formats.get(name), options={**more, "protocol_whitelist": "file"}
            ) as container:
                next(container.decode(video=0))
        except (av.error.FFmpegError, StopIteration):
            pass
        if CANARY in watcher.opened_files():
            followed.add(name)
    assert followed == set(options)


def test_io_open_is_refused(tmp_path: Path) -> None:
    """Independent of the container check."""
    with pytest.raises(OSError, match="references to other files are not followed"):
        pyav_reader._refuse_io_open("http://localhost/a.mp4", 1, {})


@pytest.mark.parametrize(
    "head", [b"", b"RIFF\0\0\0\0WAVE", b"\x1a\x45\xdf\xa3 text", b"FLV\1\5text", b"OggS text", b"GIF88a"]
)
def test_headers_that_resemble_a_container(head: bytes) -> None:
    with pytest.raises(ContainerError, match="allowed containers"):
        detect_container(head)


def test_a_file_replaced_after_the_check_is_not_opened(tmp_path: Path) -> None:
    file = write_video(tmp_path / "a.mp4", 4)
    source = ContainerFile(str(file))
    (tmp_path / "b").write_text("#EXTM3U\n")
    os.replace(tmp_path / "b", file)
    assert source.open_stream().read(8)[4:] == b"ftyp"
    source.close()


def test_file_names_are_not_protocols_or_patterns(
    watcher: OpenWatcher, pool: DecoderPool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("concat:canary.mp4", "subfile,,start,0,end,0,,:canary.mp4", "%03d.mp4", "file:canary.mp4"):
        (tmp_path / name).write_bytes(corpus.valid_videos()["a.avi"])
        for way in (False, pool):
            watcher.opened_files()
            assert len(read_frames(name, num_frames=2, isolated=way).images) == 2
            assert watcher.opened_files() == {name}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_named_pipes_do_not_block(pool: DecoderPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    with pytest.raises(FileNotFoundError):
        read_frames(tmp_path / "pipe.mp4")
    for suffix in ("mp4", "png"):
        os.path.exists(tmp_path / f"pipe.{suffix}") or os.mkfifo(tmp_path / f"pipe.{suffix}")
        with pytest.raises(ImageError, match="not a regular file"):
            load_media(tmp_path / f"pipe.{suffix}", isolated=pool)
    with pytest.raises(OSError, match="not a regular file"):
        ContainerFile(str(tmp_path / "pipe.mp4"))


# --- limits of a worker -----------------------------------------------------------------------------------------------

OPENS_OTHER_FILES = """
import resource, socket, subprocess
def open_other_files(source):
    attempts = [lambda: open(__file__), socket.socket, os.pipe, lambda: subprocess.run(["true"]),
        lambda: os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 1, "/dev/null", 1, 0)])]
    succeeded = []
    for number, attempt in enumerate(attempts[:4]):
        try:
            attempt()
            succeeded.append(number)
        except OSError:
            pass
    names = ("FSIZE", "CORE", "CPU", "AS")
    limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0] for name in names}
    raise RuntimeError(f"succeeded {succeeded}, limits {limits}, network {os.readlink('/proc/self/ns/net')}")
__file__ = os.path.abspath(pyav_reader.__file__)
decode_worker.PyavReader = open_other_files
"""


@pytest.mark.skipif(not LINUX, reason="resource limits")
def test_nothing_can_be_opened_while_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_pool, "worker_command", decoder_command_running(OPENS_OTHER_FILES))
    with pytest.raises(
        ValueError, match=r"succeeded \[\], limits {'FSIZE': 0, 'CORE': 0, 'CPU': \d+, 'AS': \d+}"
    ) as failed:
        read_frames(corpus.valid_videos()["a.mp4"], isolated=True)
    code = "import ctypes; print(ctypes.CDLL(None).unshare(0x40000000))"
    if subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n":
        assert os.readlink("/proc/self/ns/net") not in str(failed.value)


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a fake `gs` on the PATH writes when it is started."""
    trace, folder = tmp_path / "started", tmp_path / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\necho x >> {trace}\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return trace


started = list[str]()
"""Programs started by this process."""
sys.addaudithook(lambda event, args: started.append(str(args[0])) if event == "subprocess.Popen" else None)


def test_eps_never_starts_ghostscript(ghostscript: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    for content in (corpus.EPS, b"\xc5\xd0\xd3\xc6" + bytes(26) + corpus.EPS):
        file.write_bytes(content)
        for source in (file, content):
            started.clear()
            with pytest.raises(
                ImageError, match=r"not an image of an allowed format \(PNG, JPEG.*EPS or PostScript"
            ) as one:
                load_image(source)
            assert started == [] and one.value.kind == "NotAnImage" and "\n" not in str(one.value)
            with pytest.raises(ImageError, match="EPS or PostScript"):
                load_image(source, isolated=True)
    assert not ghostscript.exists()


def test_image_open_is_called_in_one_module() -> None:
    root = Path(images.__file__).resolve().parent.parent
    calls = [
        path.name
        for folder in ("app", "vision", "mmspec", "drafters")
        for path in (root / folder).rglob("*.py")
        if "Image.open(" in path.read_text("utf-8")
    ]
    assert calls == ["images.py"] and "EPS" not in images.available_formats() and "PNG" in images.available_formats()


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tif", "ppm", "avif"])
def test_same_image_from_a_worker(suffix: str, pool: DecoderPool, tmp_path: Path) -> None:
    content = corpus.valid_images()[f"a.{suffix}"]
    (tmp_path / "a").write_bytes(content)
    actual = np.asarray(load_image(content))
    for source in (content, tmp_path / "a", str(tmp_path / "a")):
        assert (np.asarray(load_image(source, isolated=pool)) == actual).all()


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def text_bomb() -> bytes:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("a", "x" * (64 << 20), zip=True)
    return saved(Image.new("RGB", (4, 4)), "PNG", pnginfo=info)


def many_frames() -> bytes:
    content = corpus.valid_images()["a.gif"]
    frame = content[content.rindex(b"\x2c\0\0\0\0\x20\0\x18\0") : -1]
    return content[:-1] + frame * (1 + 30_000_000 // len(frame)) + b";"


def large(content: bytes, small: bytes, big: bytes) -> bytes:
    assert small in content
    return content.replace(small, big)


def huge_tag() -> bytes:
    """A TIFF that declares 4 billion strips."""
    content = bytearray(corpus.valid_images()["a.tif"])
    at = content.index(b"\x11\x01\x04\0")
    content[at + 4 : at + 8] = b"\xf0\xff\xff\xff"
    return bytes(content)


def deep_heic() -> bytes:
    return b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)


BOMBS: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "text in a PNG": (text_bomb, "cannot be decoded"),
    "no end of frames in a GIF": (many_frames, None),
    "AVIF": (
        lambda: large(corpus.valid_images()["a.avif"], b"\0\0\0\x20\0\0\0\x18", b"\0\0\x75\x30\0\0\x75\x30"),
        "more than|decoded|not an image",
    ),
    "BMP": (
        lambda: large(corpus.valid_images()["a.bmp"], b"\x20\0\0\0\x18\0\0\0", b"\x30\x75\0\0\x30\x75\0\0"),
        "more than",
    ),
    "GIF": (
        lambda: large(corpus.valid_images()["a.gif"], b"GIF87a\x20\0\x18\0", b"GIF87a\xff\xff\xff\xff"),
        "more than",
    ),
    "PPM": (lambda: b"P6 30000 30000 255 ", "more than"),
    "TIFF": (huge_tag, "cannot be decoded"),
    "PDF": (lambda: b"%PDF-1.4\n" * 9, "not an image.*a PDF file"),
    "SVG": (lambda: b'<?xml version="1.0"?><svg></svg>', "not an image.*an SVG drawing"),
    "HEIC": (deep_heic, "a HEIC image .pip install pillow-heif to read it.|cannot be decoded"),
    "WMF": (lambda: b"\xd7\xcd\xc6\x9a\0\0" + bytes(50), "not an image"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str, pool: DecoderPool) -> None:
    make, message = BOMBS[name]
    content, start = make(), time.monotonic()
    for way in (False, pool):
        if message is None:
            assert load_image(content, isolated=way).size[0] > 0
            continue
        with pytest.raises(ImageError, match=message) as failed:
            load_image(content, isolated=way)
        assert "\n" not in str(failed.value)
    assert time.monotonic() - start < 20
    assert peak_memory(pool._all) < 1 << 30


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_largest_allowed_images_fit_the_memory_limit(kind: str) -> None:
    """Transparent images, which need the largest amount of memory: WebP on opening, PNG when composed on white."""
    quick: dict[str, Any] = {"compress_level": 1} if kind == "PNG" else {"method": 0}
    content = saved(Image.new("RGBA", (8000, 8000), (9, 9, 9, 9)), kind, **quick)
    with DecoderPool() as isolated:
        assert load_image(content, isolated=isolated).size == (8000, 8000)


SLOW = """
from mmspec.vision import images
def slow(content, *rest):
    if content.startswith(b"P6 2"):
        os.abort()
    if content.startswith(b"P6 3"):
        bytearray(1500 << 20)
    time.sleep(600)
images.decode_image = slow
"""


def test_time_and_memory_limits_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_pool, "worker_command", decoder_command_running(SLOW))
    monkeypatch.setattr(decoder_pool, "IMAGE_TIMEOUT_S", 1.0)
    with DecoderPool() as isolated:
        for content, kind, message in (
            (b"P6 1", "DecoderHung", "the decoder took too long .more than 1 seconds"),
            (b"P6 2", "DecoderCrashed", "the decoder crashed .signal 6"),
            *([(b"P6 3", "OutOfMemory", "not enough memory")] if LINUX else []),
        ):
            with pytest.raises(ImageError, match=message) as failed:
                load_image(content, isolated=isolated)
            assert failed.value.kind == kind
