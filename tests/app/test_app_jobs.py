"""Caption jobs with a stand-in for the model: resuming, refusals, retries, shards and ranks, failures."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from caption_jobs import Fake
from input_table import line
from PIL import Image

from mmspec.app.caption.config import CaptionConfig, ProcessInfo, derive_seed
from mmspec.app.caption.executor import LocalExecutor
from mmspec.app.caption.job import CaptionJob
from mmspec.app.caption.plan import RowPlan
from mmspec.app.errors import UsageError
from mmspec.app.io import jsonl
from mmspec.app.io.item import Item
from mmspec.app.io.output import OutputJob
from mmspec.app.io.output_file import FileOutput
from mmspec.app.modeling.captioner import Caption

Row = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten pictures, 10 to 19 wide."""
    (tmp_path / "p").mkdir()
    for number in range(10):
        Image.new("RGB", (10 + number, 8)).save(tmp_path / "p" / f"{number}.png")
    return tmp_path


def job(folder: Path, fake: Fake | None = None, process: ProcessInfo | None = None, **options: Any) -> CaptionJob:
    process = process or ProcessInfo()
    base = {"paths": (str(folder / "p"),), "model": "m", "out": str(folder / "out.jsonl"), "batch_size": 4}
    config = CaptionConfig(**(base | options))
    settings = config.fingerprint(process.world_size)
    output = FileOutput(Path(config.out), OutputJob(settings, process.rank, process.world_size, config.overwrite))

    def load() -> Fake:
        if fake is None:
            raise AssertionError("the model was loaded although there was nothing to do")
        return fake

    return CaptionJob(config, output, LocalExecutor(config, load, process))


def rows(folder: Path, name: str = "out.jsonl") -> list[Row]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def complete(found: list[Row]) -> bool:
    return [(r["index"], r["caption"].split()[0]) for r in found] == [(i, str(10 + i)) for i in range(10)]


def test_all_rows_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake()
    assert job(folder, fake, prompt="hi").run() == 0
    found = rows(folder)
    assert complete(found) and fake.calls == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]
    assert found[0]["file_name"] == "p/0.png" and found[0]["caption"] == "10 hi" and found[0]["error"] == {}
    captured = capsys.readouterr()
    assert captured.out == "" and "10 captioned, 0 failed, 0 skipped" in captured.err and "tau 1.00" in captured.err


@pytest.mark.parametrize("keep", [0, 1, 5, 100, 700, 1500, 2500, -1])
def test_a_torn_file_is_completed(folder: Path, keep: int) -> None:
    job(folder, Fake(sampled=True), temperature=1.0).run()
    whole = (folder / "out.jsonl").read_bytes()
    (folder / "out.jsonl").write_bytes(whole[:keep])
    job(folder, None if keep == -1 else Fake(sampled=True), temperature=1.0).run()  # only a line feed is lacking
    assert (folder / "out.jsonl").read_bytes() == whole


def test_a_broken_line_in_the_middle_is_refused(folder: Path) -> None:
    job(folder, Fake()).run()
    lines = (folder / "out.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "out.jsonl").write_bytes(b"".join([*lines[:2], b'{"id": \n', *lines[2:]]))
    with pytest.raises(UsageError, match="line 3 is not a row"):
        job(folder, Fake()).run()


@line("an output of another job")
@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "x"},
        {"max_new_tokens": 9},
        {"model": "n"},
        {"stop": ("a",)},
        {"temperature": 0.5},
        {"dtype": "float16"},
    ],
)
def test_other_settings_are_refused_and_overwrite_helps(folder: Path, change: dict[str, Any]) -> None:
    job(folder, Fake()).run()
    before = (folder / "out.jsonl").read_bytes()
    with pytest.raises(UsageError, match=f"{next(iter(change))} .*now.*--overwrite"):
        job(folder, Fake(), **change).run()
    assert (folder / "out.jsonl").read_bytes() == before
    assert job(folder, Fake(), overwrite=True, **change).run() == 0
    assert complete(rows(folder)) and job(folder, **change).run() == 0


def test_drafter_device_and_greedy_batch_size_may_change(folder: Path) -> None:
    job(folder, Fake()).run()
    assert job(folder, drafter="none", device="cpu", batch_size=2, seed=3).run() == 0


def test_sampled_captions_need_the_same_batches(folder: Path) -> None:
    job(folder, Fake(), temperature=1.0).run()
    for change in ({"batch_size": 2}, {"seed": 1}, {"shard": (0, 2)}):
        with pytest.raises(UsageError, match="now"):
            job(folder, Fake(), temperature=1.0, **change).run()


def test_a_changed_prompt_in_the_manifest_is_refused(folder: Path) -> None:
    manifest = folder / "p" / "m.jsonl"
    manifest.write_text('{"file_name": "1.png", "prompt": "a"}\n')
    job(folder, Fake(), paths=(str(manifest),)).run()
    manifest.write_text('{"file_name": "1.png", "prompt": "b"}\n')
    with pytest.raises(UsageError, match="another prompt"):
        job(folder, Fake(), paths=(str(manifest),)).run()


def test_a_file_that_is_not_ours_is_left_alone(folder: Path) -> None:
    for text in ('{"file_name": "0.png", "text": "mine"}\n', "my notes", "a\nb\n"):
        (folder / "out.jsonl").write_text(text)
        with pytest.raises(UsageError, match="--overwrite"):
            job(folder, Fake()).run()
        assert (folder / "out.jsonl").read_text() == text


def test_a_killed_retry_leaves_one_row_each(folder: Path) -> None:
    (folder / "p" / "3.png").write_bytes(b"no")
    job(folder, Fake()).run()

    def die(widths: list[int]) -> None:
        raise SystemExit

    Image.new("RGB", (13, 8)).save(folder / "p" / "3.png")
    with pytest.raises(SystemExit):
        job(folder, Fake(die), retry_errors=True).run()
    assert len({row["id"] for row in rows(folder)}) == len(rows(folder)) == 9
    assert job(folder, Fake()).run() == 0
    assert {row["caption"].split()[0] for row in rows(folder)} == {str(w) for w in range(10, 20)}


@pytest.mark.parametrize(
    "message", ["CUDA out of memory. Tried to allocate", "DefaultCPUAllocator: can't allocate memory"]
)
def test_out_of_memory_halves_the_batch_once(folder: Path, message: str) -> None:
    def full(widths: list[int]) -> None:
        if len(widths) > 2:
            raise RuntimeError(message)

    fake = Fake(full)
    assert job(folder, fake).run() == 0
    assert fake.calls[:3] == [[10, 11, 12, 13], [10, 11], [12, 13]]
    assert max(map(len, fake.calls[1:])) == 2, "what did not fit once is not tried again"
    assert complete(rows(folder))


def test_out_of_memory_again_is_an_error_row(folder: Path) -> None:
    def full(widths: list[int]) -> None:
        if 10 in widths:
            raise MemoryError

    assert job(folder, Fake(full)).run() == 1
    assert [bool(row["error"]) for row in rows(folder)] == [True] * 2 + [False] * 8
    assert rows(folder)[0]["error"] == {"type": "OutOfMemory", "message": "MemoryError"}


def test_an_image_that_the_model_rejects_fails_alone(folder: Path) -> None:
    def upset(widths: list[int]) -> None:
        if 15 in widths:
            raise ValueError("absolute aspect ratio\nmust be smaller than 200")

    fake = Fake(upset)
    assert job(folder, fake).run() == 1
    bad = [row for row in rows(folder) if row["error"]]
    assert [row["index"] for row in bad] == [5]
    assert bad[0]["error"]["message"] == "absolute aspect ratio must be smaller than 200"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_batch(folder: Path, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt(widths: list[int]) -> None:
        if 14 in widths:
            os.kill(os.getpid(), number)

    old = signal.getsignal(number)
    assert job(folder, Fake(interrupt)).run() == 128 + number
    assert len(rows(folder)) == 8
    assert "run the same command again" in capfd.readouterr().err
    assert signal.getsignal(number) is old
    assert job(folder, Fake()).run() == 0 and complete(rows(folder))


def test_a_second_interrupt_stops_at_once(folder: Path) -> None:
    def interrupt(widths: list[int]) -> None:
        if 14 in widths:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        job(folder, Fake(interrupt)).run()
    assert len(rows(folder)) == 4
    assert job(folder, Fake()).run() == 0 and complete(rows(folder))


def test_a_model_that_does_not_load_leaves_nothing_behind(folder: Path) -> None:
    broken = job(folder)
    with pytest.raises(AssertionError):
        broken.run()
    assert sorted(path.name for path in folder.iterdir()) == ["p"]
    job(folder, Fake()).run()
    before = (folder / "out.jsonl").read_bytes()
    with pytest.raises(AssertionError):
        job(folder, overwrite=True, prompt="new").run()
    assert (folder / "out.jsonl").read_bytes() == before, "--overwrite waits until the model is there"


@pytest.mark.parametrize("out", ["no/such/out.jsonl", "p", "p/0.png/out.jsonl", "/dev/null", "/dev/full"])
def test_an_out_that_cannot_be_written_is_found_before_the_model(folder: Path, out: str) -> None:
    with pytest.raises(UsageError, match="--out"):
        job(folder, out=str(folder / out)).run()
    assert sorted(path.name for path in folder.iterdir()) == ["p"]


def test_shards_share_the_work_and_one_file(folder: Path) -> None:
    first, second = Fake(), Fake()
    assert job(folder, first, shard=(0, 2)).run() == 0
    assert [row["index"] for row in rows(folder)] == [0, 2, 4, 6, 8]
    assert job(folder, second, shard=(1, 2)).run() == 0
    assert sorted(row["index"] for row in rows(folder)) == list(range(10))
    assert second.calls == [[11, 13, 15, 17], [19]]


def test_ranks_write_their_own_files_and_the_last_one_merges(folder: Path) -> None:
    (folder / "p" / "3.png").write_bytes(b"no")
    assert job(folder, Fake(), ProcessInfo(1, 2)).run() == 0, "a rank that is not the last does not judge"
    assert [row["index"] for row in rows(folder, "out.rank00001.jsonl")] == [1, 3, 5, 7, 9]
    assert not (folder / "out.jsonl").exists()
    assert job(folder, Fake(), ProcessInfo(0, 2)).run() == 1
    assert [row["index"] for row in rows(folder)] == list(range(10))
    assert sorted(path.name for path in folder.iterdir()) == ["out.jsonl", "out.meta.json", "p"]
    assert job(folder, None, ProcessInfo(0, 2)).run() == 1 and job(folder, None, ProcessInfo(1, 2)).run() == 1
    assert sorted(path.name for path in folder.iterdir()) == ["out.jsonl", "out.meta.json", "p"]


def test_ranks_resume_with_another_number_of_processes(folder: Path) -> None:
    def die(widths: list[int]) -> None:
        raise SystemExit

    job(folder, Fake(), ProcessInfo(2, 3)).run()
    with pytest.raises(SystemExit):
        job(folder, Fake(die), ProcessInfo(0, 3)).run()
    with (folder / "out.rank00002.jsonl").open("ab") as file:
        file.write(b'{"id": "p/')
    fake = Fake()
    assert job(folder, fake).run() == 0
    assert complete(rows(folder))
    assert not list(folder.glob("*.rank*"))


def test_ranks_retry_errors(folder: Path) -> None:
    good = (folder / "p" / "3.png").read_bytes()
    (folder / "p" / "3.png").write_bytes(b"no")
    for rank in (0, 1):
        job(folder, Fake(), ProcessInfo(rank, 2)).run()
    (folder / "p" / "3.png").write_bytes(good)
    codes = [job(folder, Fake(), ProcessInfo(rank, 2), retry_errors=True).run() for rank in (0, 1)]
    assert codes[-1] == 0 and complete(rows(folder))


def test_ranks_cannot_overwrite(folder: Path) -> None:
    with pytest.raises(UsageError, match="--overwrite"):
        job(folder, Fake(), ProcessInfo(0, 2), overwrite=True)


def test_a_difference_in_float32_fails_and_in_half_precision_is_reported(folder: Path) -> None:
    class Odd(Fake):
        def caption(self, *args: Any) -> list[Caption]:
            return [dataclasses.replace(one, identical=False) for one in super().caption(*args)]

    assert job(folder, Odd(), compare=-1).run() == 1
    assert job(folder, Odd(dtype="bfloat16"), compare=-1, out=str(folder / "half.jsonl")).run() == 0


def test_compare_the_first_n(folder: Path) -> None:
    job(folder, Fake(), compare=6).run()
    assert [row["identical"] for row in rows(folder)] == [True] * 6 + [None] * 4


def test_batches_and_seeds_are_fixed() -> None:
    items = [Item(Path(f"{i}.png"), str(i), index=i) for i in range(5)]
    plan = RowPlan(CaptionConfig((), "m", batch_size=2), ProcessInfo(), lambda item: True)
    assert [[item.index for item in batch] for (batch,) in plan.groups(items)] == [[0, 1], [2, 3], [4]]
    assert derive_seed(0, 0) == derive_seed(0, 0) != derive_seed(0, 1) != derive_seed(1, 1)
    assert 0 <= derive_seed(7, 7) < 2**63


@pytest.mark.parametrize(
    "text", ["plain", "é 漢 🙂", "two\nlines", "odd\u2028break\x85", "name\udcff", '"quoted\\"', "\r\0"]
)
def test_any_text_survives_as_one_line(tmp_path: Path, text: str) -> None:
    row = {"id": text, "caption": text, "prompt_sha1": None, "error": None}
    line = jsonl.encode_row(row)
    assert len(line.decode().splitlines()) == 1
    (tmp_path / "a").write_bytes(line * 2)
    assert jsonl.read_rows(tmp_path / "a") == ([row] * 2, 2 * len(line))
