"""What holds for every form of output: each row once, whatever stops the job; errors, ranks, refusals; what loads them.

Then what is particular to shards and to text files.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from caption_jobs import NAMES, SHARDS, TEXTS, Fake, Killed, captions, draw, expected, good, job, kill_after, written
from input_table import line
from job_rows import check_widths, rows_of, samples
from PIL import Image

from mmspec.app.caption.config import ProcessInfo
from mmspec.app.caption.executor import LocalExecutor, Results
from mmspec.app.cli.main import main
from mmspec.app.errors import OutputError, UsageError
from mmspec.app.io.item import Item
from mmspec.app.io.output import Finished, StreamOutput
from mmspec.app.io.sidecars import SidecarOutput

pytestmark = pytest.mark.usefixtures("pictures_in_p")

each_form = pytest.mark.parametrize("form", list(NAMES))
each_shard_format = pytest.mark.parametrize("form", SHARDS)


@each_form
def test_each_row_is_there_once_and_an_error_is_repeated(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p/3.png").write_bytes(b"no")
    assert job(form).run() == 1 and good(form) == expected("x", 3)
    err = capsys.readouterr().err
    assert "7 captioned, 1 failed" in err and ("1 of 8 have no caption" if form in TEXTS else "--retry-errors") in err
    before = written()
    assert not [name for name in before if ".part" in name or ".open" in name or name.endswith(".job")]
    again = Fake()
    second = job(form, fake=again)
    assert second.run() == 1 and written() == before
    assert form in TEXTS or (second.executor.model is None and not again.calls), "the model is not loaded"
    assert "0 captioned" in capsys.readouterr().err
    draw(3)
    assert job(form, fake=again, retry_errors=True).run() == 0 and good(form) == expected("x")
    assert again.calls == [[12, 13]] if form not in TEXTS else 13 in chain(*again.calls)
    if form in SHARDS:
        check_widths(Path("o"))


@each_form
@pytest.mark.parametrize("batches", range(4))
def test_a_job_that_dies_anywhere_is_completed(form: str, batches: int) -> None:
    with pytest.raises(Killed):
        job(form, fake=kill_after(batches)).run()
    done = good(form) if batches else {}
    assert len(done) == 2 * batches and done.items() <= expected("x").items()
    rest = Fake()
    assert job(form, fake=rest).run() == 0 and good(form) == expected("x")
    assert sorted(chain(*rest.calls)) == [10 + n for n in range(8) if str(n) not in done], "nothing twice"
    assert not list(Path().rglob("*.part")) and not list(Path().rglob(".open*"))


class Repeating(LocalExecutor):
    """As a cluster that does a batch again when it has lost an actor."""

    def results(self, *args: Any) -> Results:
        for batch in super().results(*args):
            yield batch
            yield batch


@each_form
def test_what_an_executor_repeats_is_written_once(form: str) -> None:
    one = job(form)
    one.executor = Repeating(one.config, Fake)
    assert one.run() == 0 and captions(form) == expected("x")


@each_form
def test_what_is_there_is_left_alone_unless_it_is_to_be_replaced(form: str) -> None:
    assert job(form).run() == 0
    before, other = written(), Fake()
    if form in TEXTS:
        assert job(form, fake=other, prompt="y").run() == 0
    else:
        with pytest.raises(UsageError, match=r"prompt 'x' \(now 'y'\).*--overwrite"):
            job(form, fake=other, prompt="y").run()
    assert not other.calls and written() == before
    assert job(form, prompt="y", overwrite=True).run() == 0 and good(form) == expected("y")


@line("a job with `--overwrite` that is killed")
@each_form
def test_an_overwriting_job_is_continued(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p/3.png").write_bytes(b"no")
    assert job(form, prompt="old").run() == 1  # an old error row must not stay either
    draw(3)
    for kills in (1, 2):  # the second kill is one of a job that continues
        with pytest.raises(Killed):
            job(form, fake=kill_after(1), prompt="new", overwrite=True).run()
        assert sum(text.endswith("new") for text in good(form).values()) == 2 * kills
    rest = Fake()
    assert job(form, fake=rest, prompt="new", overwrite=True).run() == 0
    assert good(form) == expected("new") and "4 captioned, 0 failed, 4 skipped" in capsys.readouterr().err
    assert not [name for name in os.listdir("p") if name.startswith(".")]
    again = Fake()
    assert job(form, fake=again, prompt="new", overwrite=True).run() == 0 and len(again.calls) == 4  # it had ended
    with pytest.raises(Killed):
        job(form, fake=kill_after(1), prompt="new", overwrite=True).run()
    assert job(form, prompt="newer", overwrite=True).run() == 0 and good(form) == expected("newer")


@pytest.mark.parametrize("form", ["jsonl", *SHARDS])
def test_one_that_was_stopped_is_also_continued_without_the_option(form: str) -> None:
    with pytest.raises(Killed):
        job(form, fake=kill_after(1), overwrite=True).run()
    rest = Fake()
    assert job(form, fake=rest).run() == 0 and len(rest.calls) == 3 and good(form) == expected("x")
    again = Fake()
    assert job(form, fake=again, overwrite=True).run() == 0 and len(again.calls) == 4


@line("two jobs that write the same text files")
@each_form
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_jobs_cannot_write_one_output(form: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.app.io.jsonl.time.sleep", lambda seconds: None)

    def other(widths: list[int]) -> None:
        for options in ({}, {"overwrite": True, "shard": (0, 4)} if form in TEXTS else {"overwrite": True}):
            with pytest.raises(UsageError, match="another job is writing"):
                job(form, **options).run()

    assert job(form, fake=Fake(before=other), overwrite=overwrite).run() == 0 and good(form) == expected("x")
    assert not list(Path().rglob("*.job*")) or form not in TEXTS


@pytest.mark.parametrize("form", ["csv", *SHARDS])
def test_ranks_one_after_the_other(form: str) -> None:
    Path("p/3.png").write_bytes(b"no")
    with pytest.raises(Killed):
        job(form, kill_after(1), ProcessInfo(0, 2)).run()
    assert job(form, Fake(), ProcessInfo(1, 2)).run() == 0, "the other rank has not finished"
    assert job(form, Fake(), ProcessInfo(0, 2)).run() == 1 and good(form) == expected("x", 3)
    idle = Fake()
    assert job(form, idle, ProcessInfo(2, 3)).run() == 1 and job(form, idle).run() == 1 and not idle.calls


@pytest.mark.parametrize("form", [*SHARDS, "texts"])
def test_a_folder_may_be_a_link_and_no_file(form: str) -> None:
    Path("o").symlink_to("big")  # which does not exist yet
    assert job(form, out="o").run() == 0 and Path("o").is_symlink() and Path("big").is_dir()
    Path("q").symlink_to("missing/big")
    with pytest.raises(UsageError, match=r"missing: create it first"):
        job(form, out="q").run()
    Path("r").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        job(form, out="r").run()


@line("an `--out` that is an address, or in a missing folder")
@each_form
def test_a_folder_that_is_missing(form: str) -> None:
    for out in ("missing/x", "p/0.png/x", "missing/x/y"):
        with pytest.raises(UsageError, match=r"no folder .*: create it first"):
            job(form, out=out).run()
    assert os.listdir() == ["p"]


# --- shards


@each_shard_format
def test_a_growing_shard_is_cut_at_any_byte(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGKILL: the growing shard is left where it was, and holds any number of bytes."""
    Path("p/3.png").write_bytes(b"no")
    with monkeypatch.context() as patch:
        patch.setattr("mmspec.app.io.shards.ShardedOutput._end_shard", lambda self: None)
        job(form, rows_per_shard=100).run()
    (growing,) = Path("o").glob(".open*")
    data = growing.read_bytes()
    others = {path: path.read_bytes() for path in Path("o").glob("*.errors.jsonl")}
    settings = Path("o/_mmspec.meta.json").read_bytes()
    for cut in {*range(0, len(data), len(data) // 13), len(data)}:
        shutil.rmtree("o")
        Path("o").mkdir()
        for path, text in others.items():
            path.write_bytes(text[: len(text) * cut // len(data)])
        growing.write_bytes(data[:cut])
        with pytest.raises(UsageError, match=r"no _mmspec\.meta\.json|no caption job wrote"):
            job(form, rows_per_shard=100).run()
        Path("o/_mmspec.meta.json").write_bytes(settings)
        assert job(form, rows_per_shard=100).run() == 1
        assert len(captions(form)) == 8 and good(form) == expected("x", 3), cut


@each_shard_format
def test_foreign_shards_are_refused(form: str) -> None:
    Path("o").mkdir()
    Path(f"o/mine.{'tar' if form == 'webdataset' else 'parquet'}").write_text("x")
    with pytest.raises(UsageError, match="no caption job wrote"):
        job(form).run()


def test_equal_states_share_one_object() -> None:
    row = {"id": "a.png", "file_name": "a.png", "prompt_sha1": "a", "error": None}
    assert Finished.of(row) is Finished.of(dict(row))


def test_of_two_rows_about_one_file_a_caption_counts() -> None:
    row = {"id": "a.png", "prompt_sha1": "a", "error": None, "file_stamp": "1-1-a"}
    error = row | {"error": {"type": "T", "message": "m"}}
    for rows, errors in (([row, error], 0), ([error, row], 0), ([row, error | {"file_stamp": "2-2-b"}], 1)):
        output = StreamOutput(io.BytesIO())
        output.write(rows)
        summary = output.close(["a.png"], complete=True)
        assert summary is not None and (summary.num_rows, summary.num_errors) == (1, errors)
        assert output.close(["a.png", "b.png"], complete=True) is None, "another rank has yet to write it"


@each_shard_format
def test_datasets_loads_the_shards(form: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    Path("p/3.png").write_bytes(b"no")
    job(form).run()
    files = f"o/*.{'tar' if form == 'webdataset' else 'parquet'}"
    loaded = datasets.load_dataset(form, data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    if form == "parquet":
        assert loaded["index"] == list(range(8))
    else:
        found = [(one["png"].width, one["txt"]) for one in loaded]
        assert found == [(10 + n, f"{10 + n} x") for n in range(8) if n != 3]


def test_webdataset_loads_the_archives() -> None:
    webdataset = pytest.importorskip("webdataset", reason="optional")
    job("webdataset").run()
    shards = sorted(map(str, Path("o").glob("*.tar")))
    found = list(webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("png", "txt", "json"))
    assert [(picture.width, row["index"]) for picture, _, row in found] == [(10 + n, n) for n in range(8)]
    assert len(samples(Path("o"))) == len(rows_of(Path("o"))) == 8


# --- text files


def test_text_files_stand_where_their_pictures_do() -> None:
    Path("p/sub.v2").mkdir()
    Image.new("RGB", (40, 8)).save("p/sub.v2/9.v2.png")
    for form in TEXTS:
        assert job(form, prefix="sks dog, ", suffix=", photo").run() == 0
        found = {path: path.read_text() for path in Path("p" if form == "txt" else "t").rglob("*.txt")}
        assert {str(path.relative_to(path.parts[0])) for path in found} >= {"0.txt", "sub.v2/9.v2.txt"}
        assert set(found.values()) == {f"sks dog, {width} x, photo" for width in (*range(10, 18), 40)}
    assert job(prefix="a ", suffix=" b").run() == 0 and captions("jsonl")["0"] == "a 10 x b"  # rows as well


@line("two folders with equal names, and text files in one `--out`")
def test_a_folder_of_texts_knows_whose_they_are() -> None:
    Path("q").mkdir()
    Image.new("RGB", (40, 8)).save("q/0.png")
    job("texts").run()
    with pytest.raises(UsageError, match=r"0\.txt'.*the caption of '\.\./p/0\.png', not of '\.\./q/0"):
        job("texts", paths=("q",)).run()
    assert captions("texts") == expected("x")
    for overwrite in (True, False):
        assert job("texts", paths=("q",), overwrite=overwrite).run() == 0
        assert captions("texts") == expected("x") | {"0": "40 x"}


@line("a name of up to 255 bytes and `--format txt`")
@pytest.mark.parametrize("form", TEXTS)
def test_names_as_long_as_file_systems_permit(form: str) -> None:
    stems = ["x" * 251, "y" * 251, "\u00e9" * 125]
    for stem in stems:
        Image.new("RGB", (40, 8)).save(f"p/{stem}.png")
    assert job(form).run() == 0
    assert captions(form) == expected("x") | dict.fromkeys(stems, "40 x")
    assert not [path for path in Path().rglob(".*") if path.name != ".pictures"]


@line("a text file that is written while the job runs")
def test_what_others_write_is_left_alone() -> None:
    def write(widths: list[int]) -> None:
        Path("p/7.txt").write_text("by hand")

    Path("p/3.txt").write_text("before")
    assert job("txt", fake=Fake(before=write)).run() == 0
    assert captions("txt") == expected("x") | {"3": "before", "7": "by hand"}


def test_shards_of_a_job_with_text_files_run_side_by_side() -> None:
    unfinished = Path("p/.0.txt.0123abcd.part")  # as the first job has it while it writes

    def other(widths: list[int]) -> None:
        unfinished.touch()
        assert job("txt", shard=(1, 2)).run() == 0 and unfinished.exists()

    assert job("txt", fake=Fake(before=other), shard=(0, 2)).run() == 0 and captions("txt") == expected("x")
    assert job("txt", shard=(9, 10)).run() == 0, "nothing to do"
    assert job("txt").run() == 0 and not unfinished.exists()


def test_who_claims_nothing_removes_nothing_of_others() -> None:
    unfinished = Path("p/.0.txt.0123abcd.part")
    unfinished.touch()
    for _ in range(2):
        output = SidecarOutput(None, ["p"], lambda: [Item(Path("p/0.png"), "p/0.png")])
        output.open()
        output.begin(False)
    assert unfinished.exists()


def test_a_text_file_that_is_a_link_is_replaced_not_followed() -> None:
    Path("secret").write_text("s")
    Path("p/1.txt").symlink_to("../secret")
    assert job("txt", overwrite=True).run() == 0
    assert Path("secret").read_text() == "s" and captions("txt") == expected("x")


@line("a folder or link where a text file goes")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("form", TEXTS)
def test_a_folder_or_pipe_in_the_place_of_a_text_file(form: str, overwrite: bool) -> None:
    where = Path("p" if form == "txt" else "t", "3.txt")
    for make in (os.mkdir, os.mkfifo):
        where.parent.mkdir(exist_ok=True)
        make(where)
        with pytest.raises(UsageError, match=r"3\.txt cannot be written"):
            job(form, fake=kill_after(0), overwrite=overwrite).run()
        where.rmdir() if where.is_dir() else where.unlink()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_file_is_whole_or_not_there(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def die(source: Any, target: Any) -> None:
        if str(target).endswith(".txt"):
            if moment == "after":
                replace(source, target)
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a killed process removes nothing
        with pytest.raises(Killed):
            job("txt").run()
    torn = list(Path("p").glob("*.part"))
    assert (len(captions("txt")), len(torn)) == ((1, 0) if moment == "after" else (0, 1))
    assert job("txt").run() == 0 and captions("txt") == expected("x") and not list(Path().rglob("*.part"))


@pytest.mark.parametrize("shell_expands", [False, True])
def test_text_files_are_no_lists_of_pictures(shell_expands: bool, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        fake = Fake()
        paths = tuple(f"p/{name}" for name in sorted(os.listdir("p"))) if shell_expands else ("p/*",)
        assert job("txt", fake=fake, paths=paths).run() == 0
    assert fake.calls == [] and captions("txt") == expected("x") and "failed: " not in capsys.readouterr().err


def test_what_cannot_be_written_as_texts_is_said_before_the_model() -> None:
    Image.new("RGB", (9, 9)).save("p/3.jpg")
    with tarfile.open("a.tar", "w") as archive:
        archive.add("p/0.png", "a.png")
    for process, options, message in (
        (None, {}, r"3\.jpg and .*3\.png would both have the text file"),
        (None, {"paths": ("a.tar",)}, "row of a table or archive"),
        (None, {"fields": ("tau",)}, "--fields"),
        (ProcessInfo(0, 2), {}, "--shard"),
    ):
        with pytest.raises(UsageError, match=message):
            job("txt", kill_after(0), process, **options).run()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_found_before_the_model() -> None:
    Path("p/sub").mkdir()
    Image.new("RGB", (9, 9)).save("p/sub/0.png")
    Path("p/sub").chmod(0o500)
    with pytest.raises(OutputError, match="read-only"):
        job("txt", kill_after(0)).run()


def test_a_manifest_names_pictures_and_prompts() -> None:
    Path("list.jsonl").write_text('{"file_name": "p/1.png", "id": "one", "prompt": "what"}\n')
    for _ in range(2):
        assert job("txt", paths=("list.jsonl",)).run() == 0
    assert captions("txt") == {"1": "11 what"}


def test_from_the_command_line() -> None:
    args = ["caption", "p/1.png", "p/2.png", "--model", "tiny", "--format", "txt", "--prefix", "sks, "]
    assert main([*args, "--max-new-tokens", "4", "--no-progress"]) == 0
    found = captions("txt")
    assert set(found) == {"1", "2"} and all(str(text).startswith("sks, ") for text in found.values())
