"""What is in a batch: rows of like visual tokens, large pictures alone, by the headers of the pictures."""

from __future__ import annotations

import io
import random
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_app_jobs as jobs
from caption_jobs import Fake
from PIL import Image
from test_app_inputs import write_tar

from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.plan import LARGE_PIXELS, TYPICAL_SIZE, RowPlan
from mmspec.app.caption.ray_job import RayExecutor
from mmspec.app.io.content import ByteRange, InlineBytes, Pictures, WebAddress
from mmspec.app.io.images import decode_ahead
from mmspec.app.io.item import Item
from mmspec.app.io.picture_header import header_size, picture_sizes
from mmspec.app.modeling.picture_size import count_visual_tokens
from mmspec.app.modeling.random_models import random_model


def encode(kind: str, size: tuple[int, int] = (37, 21), mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG of which nothing but the size is there."""
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + bytes(9)


EXIF = Image.Exif()
EXIF[0x9286] = "x" * 20_000
FILES = {
    "png": encode("PNG"),
    "jpeg": encode("JPEG"),
    "progressive jpeg": encode("JPEG", progressive=True),
    "jpeg with metadata": encode("JPEG", exif=EXIF, icc_profile=bytes(9000), comment=b"hi"),
    "grey jpeg": encode("JPEG", mode="L"),
    "webp": encode("WEBP"),
    "lossless webp": encode("WEBP", lossless=True),
    "webp with alpha": encode("WEBP", mode="RGBA"),
    "animated webp": encode("WEBP", save_all=True, append_images=[Image.new("RGB", (37, 21), "red")]),
    "gif": encode("GIF", mode="P"),
    "bmp": encode("BMP"),
    "tiff": encode("TIFF", tiffinfo={270: "a text"}),
    "tiff of Motorola": b"MM\0*\0\0\0\x08\0\x02\x01\0\0\x03\0\0\0\x01\0\x25\0\0\x01\x01\0\x04\0\0\0\x01\0\0\0\x15",
}


@pytest.mark.parametrize("name", FILES)
def test_sizes_by_headers(name: str) -> None:
    data = FILES[name]
    assert header_size(data) == (37, 21)
    for end in range(0, min(len(data), 400)):  # cut anywhere
        assert header_size(data[:end]) in (None, (37, 21))
    rng = random.Random(name)
    for _ in range(300):
        broken = bytearray(data[:400])
        for _ in range(4):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        header_size(bytes(broken))  # any size or none, no exception


def test_sizes_of_what_is_here_and_of_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILES["png"])
    write_tar(tmp_path / "x.tar", dict.fromkeys(("b.png", "c.jpg"), FILES["jpeg"]))
    inside = ByteRange(str(tmp_path / "x.tar"), 512, len(FILES["jpeg"]))
    held = InlineBytes(FILES["gif"])
    for content, expected in (
        (None, [(37, 21)]), (inside, [(37, 21)]), (held, [(37, 21)]), (Pictures((held, inside)), [(37, 21)] * 2),
        (WebAddress("http://example.org/a.png"), [None]), (ByteRange("s3://bucket/a.png"), [None]),
        (ByteRange(str(tmp_path / "gone.png")), [None]), (ByteRange(str(tmp_path)), [None]),
        (InlineBytes(b"no picture"), [None]),
    ):  # fmt: skip
        assert picture_sizes(Item(tmp_path / "a.png", content=content)) == expected, content


def plan(sizes: list[tuple[int, int] | None], batch_size: int = 4, finished: Any = (), tokens: Any = None) -> RowPlan:
    count = tokens or (lambda width, height: max(4, width * height // 784))
    return RowPlan(
        CaptionConfig((), "m", batch_size=batch_size), ProcessInfo(), lambda item: item.index not in finished, count
    )


def rows(sizes: list[tuple[int, int] | None]) -> list[Item]:
    contents = [WebAddress("http://a.org/x.png") if size is None else InlineBytes(png_header(*size)) for size in sizes]
    return [Item(Path(f"{i}.png"), str(i), index=i, content=content) for i, content in enumerate(contents)]


def batches_of(made: RowPlan, items: list[Item]) -> list[list[Item]]:
    return [batch for group in made.groups(items) for batch in group]


def test_batches_are_of_like_visual_tokens_and_large_pictures_alone() -> None:
    rng = random.Random(0)
    small = [(rng.choice([200, 500, 900, 1500, 3000]), rng.choice([200, 800, 2000, 4000])) for _ in range(60)]
    sizes = [*small, (8000, 5000), None, (5000, 8000), (7000, 5600), None]
    rng.shuffle(sizes)
    made = plan(sizes)
    batches = batches_of(made, rows(sizes))
    assert sorted(item.index for batch in batches for item in batch) == list(range(len(sizes))), "each once"
    limit = 4 * (TYPICAL_SIZE[0] * TYPICAL_SIZE[1] // 784)
    assert made.max_tokens == limit
    for batch in batches:
        longest = max(max(4, (item.pixels or 0) // 784) for item in batch)
        assert len(batch) == 1 or (len(batch) <= 4 and len(batch) * longest <= limit)
        assert len(batch) == 1 or all((item.pixels or 0) < LARGE_PIXELS for item in batch)
    assert sum(len(batch) == 4 for batch in batches) >= 8, "small ones fill their batches"
    window = [sizes[item.index] for batch in batches for item in batch][:64]
    known = [size is not None for size in window]
    assert not all(known) and known == sorted(known, reverse=True), "unknown ones last"
    for finished in ({3, 5, 7}, set(range(0, 64, 2))):
        again = batches_of(plan(sizes, finished=finished), rows(sizes))
        keys = [[item.index for item in batch] for batch in batches]
        assert [[item.index for item in batch] for batch in again] == [
            key for key in keys if not finished.issuperset(key)
        ], "what is finished changes no batch"
    assert f"64 rows, batches of at most 4 rows or {limit:,} visual tokens" in made.describe(64)


def test_a_model_of_one_size_is_planned_by_rows() -> None:
    sizes: list[tuple[int, int] | None] = [(3000, 2000), (100, 100), None, (1500, 20), (64, 64)]
    for count in (lambda width, height: 576, lambda width, height: None):
        found = batches_of(plan(sizes, tokens=count), rows(sizes))
        known = [[item.index for item in batch] for batch in found]
        assert sorted(index for batch in known for index in batch) == [0, 1, 2, 3, 4] and len(known) == 2
    clip = replace(rows([(9, 9)])[0], path=Path("c.mp4"), id="c")
    assert [item.pixels for batch in batches_of(plan([]), [clip]) for item in batch] == [None], (
        "clips come last, by name"
    )


def test_nothing_is_asked_before_a_row_is_pending() -> None:
    def fail(width: int, height: int) -> int:
        raise AssertionError("the model was loaded")

    sizes: list[tuple[int, int] | None] = [(64, 64)] * 5
    made = plan(sizes, finished=set(range(5)), tokens=fail)
    assert batches_of(made, rows(sizes)) == [] and made.num_finished == 5


def test_tokens_are_those_of_the_processor(tmp_path: Path) -> None:
    processor = random_model("tiny")[1]
    inputs = processor(images=Image.new("RGB", (300, 80)), text=processor.image_token, return_tensors="pt")
    expected = int((inputs["input_ids"] == processor.image_token_id).sum())
    assert count_visual_tokens(processor, 300, 80, None) == expected
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    assert RayExecutor(CaptionConfig((), str(tmp_path)))._count_tokens(9, 9) == expected
    assert RayExecutor(CaptionConfig((), "tiny"))._count_tokens(9, 9) is None, "of bundled models, which see all alike"
    assert RayExecutor(CaptionConfig((), "/no/such/model"))._count_tokens(9, 9) is None

    class Dynamic:
        def _get_num_multimodal_tokens(self, image_sizes: list[list[int]]) -> dict[str, list[int]]:
            return {"num_image_tokens": [height * width // 784 for height, width in image_sizes]}

    assert count_visual_tokens(Dynamic(), 2800, 2800, None) == 10_000  # type: ignore[arg-type]
    assert 1250 <= (count_visual_tokens(Dynamic(), 2800, 2800, 1_000_000) or 0) <= 1276  # type: ignore[arg-type]
    assert count_visual_tokens(object(), 9, 9, None) is None  # type: ignore[arg-type]


def test_what_takes_all_the_memory_is_loaded_alone() -> None:
    running, lock, together = set[int](), threading.Lock(), dict[int, int]()

    def load(key: int) -> int:
        with lock:
            running.add(key)
        time.sleep(0.005)
        with lock:
            together[key] = len(running)
            running.discard(key)
        return key

    found = list(decode_ahead(range(24), load, 4, 8, lambda key: 1.0 if key % 6 == 5 else 0.1))
    assert [value for _, value in found] == list(range(24))
    assert all(together[key] == 1 for key in range(5, 24, 6)) and max(together.values()) > 1


def test_the_plan_is_printed_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p").mkdir()
    for number in range(10):
        Image.new("RGB", (10 + 100 * (number % 2), 8 + 100 * (number % 2))).save(tmp_path / "p" / f"{number}.png")

    class Sized(Fake):
        def count_tokens(self, width: int, height: int) -> int | None:
            return 100 if (width, height) in (TYPICAL_SIZE, (110, 108)) else 1

    said: list[str] = []
    fake = Sized(before=lambda widths: said.append(capsys.readouterr().err))
    assert jobs.job(tmp_path, fake).run() == 0
    assert "mmspec: plan: 10 rows, batches of at most 4 rows or 400 visual tokens, rows of 40 megapixels" in said[0]
    assert "the first 10 are 3 batches of 2 to 4" in said[0]
    assert fake.calls == [[10] * 4, [10, 110, 110, 110], [110, 110]]
    assert jobs.job(tmp_path, None).run() == 0 and "plan: " not in capsys.readouterr().err
