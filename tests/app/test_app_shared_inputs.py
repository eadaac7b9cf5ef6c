"""Training, examples and benchmarks read what `mmspec caption` reads; a broken picture is skipped and counted."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from mmspec.app.bench.requests import bench_images
from mmspec.app.errors import UsageError
from mmspec.app.train.datasets import FileData


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def archive(tmp_path: Path) -> str:
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        for number in range(4):
            content = png(10 * number)[: 60 if number == 2 else None]
            member = tarfile.TarInfo(f"{number}.png")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return str(tmp_path / "x.tar")


def test_training_skips_a_broken_picture(archive: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # a resumed run sees the same requests
        data = FileData([archive])
        values = [data[index].media.getpixel((3, 3))[0] for index in range(len(data))]  # type: ignore[union-attr,index]
        assert values == [0, 10, 30, 30] and data.unreadable == {2}
        assert "1 of 4 so far" in capsys.readouterr().err
        data.decoders.close()


def test_benchmarks_read_archives(archive: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [image.getpixel((3, 3))[0] for image in bench_images([archive], 4, 0)] == [0, 10, 30, 0]  # type: ignore[index]
    assert "skipped 1 of 4 that cannot be read; the first: " in capsys.readouterr().err
    (tmp_path / "only.png").write_bytes(png(1)[:50])
    with pytest.raises(UsageError, match=r"--images: .*only\.png: cannot be decoded"):
        bench_images([str(tmp_path / "only.png")], 1, 0)
