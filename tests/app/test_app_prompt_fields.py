"""Fields of rows in prompts, and answers in later prompts, of files as other programs write them."""

from __future__ import annotations

import csv
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from caption_jobs import Fake
from input_table import line
from test_app_inputs import write_tar
from test_app_jobs import job
from test_app_variants import rows

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.io.fields import MissingFieldError, field_names, fill
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import SourceOptions
from research.synthetic_images import write_images

KOHYA = {
    "1": {"caption": "a dog on grass", "tags": "dog, grass", "train_resolution": [512, 512]},
    "2.png": {"caption": "a cat", "tags": "cat"},
}
"""`meta_clean.json` of kohya's finetune scripts; without --full_path names have no suffix."""
LABEL_STUDIO = [
    {
        "id": 7,
        "annotations": [
            {
                "id": 3,
                "completed_by": 1,
                "result": [
                    {"value": {"text": ["a dog on grass"]}, "from_name": "caption", "to_name": "i", "type": "textarea"},
                    {"value": {"choices": ["dog", "grass"]}, "from_name": "tags", "to_name": "i", "type": "choices"},
                    {"value": {"rating": 4}, "from_name": "stars", "to_name": "i", "type": "rating"},
                    {"value": {"x": 1, "rectanglelabels": ["dog"]}, "from_name": "box", "type": "rectanglelabels"},
                    {"value": {"x": 9, "rectanglelabels": ["ball"]}, "from_name": "box", "type": "rectanglelabels"},
                ],
            }
        ],
        "file_upload": "1.png",
        "data": {"image": "/data/upload/1.png"},
        "project": 1,
    },
    {
        "id": 8,
        "annotations": [{"was_cancelled": True, "result": [{"value": {"text": ["skipped"]}, "from_name": "caption"}]}],
        "data": {"image": "/data/local-files/?d=upload/2.png", "caption": "a cat", "tags": "cat"},
    },
]
LABEL_STUDIO_MIN = [
    {"image": "/data/upload/1.png", "id": 7, "caption": "a dog on grass", "tags": {"choices": ["dog", "grass"]}},
    {"image": "/data/local-files/?d=upload%2F2.png", "id": 8, "caption": {"text": ["a cat"]}, "tags": "cat"},
]
"""JSON-MIN; its CSV has the objects as JSON in their cells."""
EXPECTED = ["old: a dog on grass (dog, grass)", "old: a cat (cat)"]
PROMPT = "old: {caption} ({tags})"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two pictures, `upload/1.png` and `upload/2.png`, below the current folder."""
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(sorted(write_images(tmp_path / "upload", 2)), 1):
        path.rename(tmp_path / "upload" / f"{number}.png")
    return tmp_path


def prompts(name: str, prompt: str = PROMPT, **options: Any) -> list[str]:
    """The prompts of the rows of an input; of a row without one why."""
    from mmspec.app.caption.variants import variants

    config = CaptionConfig((name,), "m", prompt=prompt, **options)
    inputs = Inputs(config.paths, config.source_options(Path()))
    inputs.check()
    found = [row for item in inputs.rows(lambda ident: False) for row in variants(item, config)]
    return [f"lacks: {row.template}" if row.template else row.prompt or "" for row in found]


def test_columns_of_excel(folder: Path) -> None:
    """Semicolons, a byte order mark, names as people write them."""
    text = "Dateiname;File Name;Tags;Caption\r\nx;1.png;dog, grass;a dog on grass\r\ny;2.png;cat;a cat\r\n"
    (folder / "upload" / "list.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert prompts("upload/list.csv") == EXPECTED
    assert prompts("upload/list.csv", "old: {Caption} ({tags})", limit=1) == EXPECTED[:1]


@pytest.mark.parametrize(
    "name",
    ["Größe (cm)", "tags/en", "artist's name", "Is it a dog?", "टैग", "标签", "meta.tags", "Tags\u00a0 (en)", "a&b #2"],
)
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_as_people_write_them(folder: Path, name: str, form: str) -> None:
    """A name that is taken for mere text would be in the prompt as it is, and nobody would notice."""
    text = f"file_name;{unicodedata.normalize(form, name)}\r\n1.png;x\r\n"
    (folder / "upload" / "list.csv").write_bytes(text.encode("utf-16"))
    for typed in (name, unicodedata.normalize("NFD", name), name.upper().replace("\u00a0 ", " ")):
        assert prompts("upload/list.csv", f"a {{{typed}}} b") == ["a x b"]
    (folder / "upload" / "1.json").write_text(json.dumps({name: "y"}))
    assert prompts("upload/1.png", f"a {{{name}}} b") == ["a y b"]


@line("metadata of kohya's scripts, by the names of pictures")
@pytest.mark.parametrize("suffix", [".png", ".PNG"])
def test_metadata_of_kohya(folder: Path, suffix: str) -> None:
    (folder / "upload" / "1.png").rename(folder / "upload" / f"1{suffix}")
    (folder / "upload" / "meta_clean.json").write_text(json.dumps(KOHYA))
    assert prompts("upload/meta_clean.json") == EXPECTED


@line("Label Studio's paths: `/data/upload/...`, `/data/local-files/?d=...`")
@pytest.mark.parametrize("form", ["json", "json-min", "csv"])
def test_an_export_of_label_studio(folder: Path, form: str) -> None:
    name = "export.csv" if form == "csv" else "export.json"
    if form == "csv":
        with Path(name).open("w", newline="") as stream:
            table = csv.DictWriter(stream, list(LABEL_STUDIO_MIN[0]))
            table.writeheader()
            for row in LABEL_STUDIO_MIN:
                table.writerow({key: json.dumps(v) if isinstance(v, dict) else v for key, v in row.items()})
    else:
        Path(name).write_text(json.dumps(LABEL_STUDIO if form == "json" else LABEL_STUDIO_MIN))
    assert prompts(name) == EXPECTED
    if form == "json":
        assert prompts(name, "{stars}: {box}", limit=1) == ["4: dog, ball"]


@pytest.mark.parametrize("tool", ["kohya", "taggui", "gallery-dl", "hydrus"])
def test_files_beside_pictures(folder: Path, tool: str) -> None:
    """kohya: `.caption` and tags in `.txt`; taggui: tags in `.txt`; gallery-dl: `photo.png.json`; Hydrus: text files
    `photo.png.txt`, which are more of the picture than `photo.txt` is."""
    for name, caption, tags in (("1", "a dog on grass", "dog, grass"), ("2", "a cat", "cat")):
        file = folder / "upload" / f"{name}.png"
        if tool == "gallery-dl":
            text = json.dumps({"tags": tags.split(", "), "caption": caption, "width": 40})
            file.with_name(f"{name}.png.json").write_text(text)
        elif tool == "hydrus":
            file.with_suffix(".txt").write_text("of another picture")
            file.with_name(f"{name}.png.txt").write_text(caption)
            file.with_name(f"{name}.png.tags").write_text(tags)
        else:
            file.with_suffix(".txt").write_text(f"{tags}\n")
        if tool == "kohya":
            file.with_suffix(".caption").write_text(caption)
    if tool == "taggui":
        assert prompts("upload", "{caption}; {txt}") == ["dog, grass; dog, grass", "cat; cat"]
    else:
        read = Inputs(["upload"], SourceOptions(fields=("tags", "caption")))
        assert read.left_out() == [], "a file that is read is not said to be skipped"
        assert prompts("upload", PROMPT.replace("{tags}", "{txt}") if tool == "kohya" else PROMPT) == EXPECTED


@line("a field or its file that was mended")
@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\xef\xbb\xbfa dog,\r\nrunning \r\n", "a dog,\nrunning"),
        ("ein Café\r\n".encode("utf-16"), "ein Café"),
        ("ein Café".encode("cp1252"), "1.txt: byte 7 (0xe9) is not UTF-8: save the file as UTF-8"),
        (b"x" * 70_000, "1.txt: it has more than 65536 bytes"),
        (b" \r\n", None),
    ],
)
def test_a_text_file_as_editors_save_it(folder: Path, data: bytes, found: str | None) -> None:
    """One that cannot be read is an error of its row, which says why, and no field that is missing."""
    (folder / "upload" / "1.txt").write_bytes(data)
    why = found if found and found.startswith("1.txt") else None
    if why is None and found is not None:
        assert prompts("upload/1.png", "{caption}!") == [f"{found}!"]
        return
    with pytest.raises(UsageError, match="no row has the field 'caption'") as error:
        prompts("upload", "{caption}")
    assert (why or "rows have name, file_name, folder; {{") in str(error.value)
    (folder / "upload" / "2.txt").write_text("a cat")
    assert job(folder, Fake(), paths=("upload",), prompt="{caption}", out="o.jsonl").run() == 1
    first, second = rows(Path("o.jsonl")).values()
    kinds = ("BadText", why) if why else ("NoField", "the row has no field 'caption', which the prompt names")
    assert second["prompt"] == "a cat" and tuple(first["error"].values()) == kinds
    (folder / "upload" / "1.txt").write_text("a dog")
    assert job(folder, Fake(), paths=("upload",), prompt="{caption}", out="o.jsonl", retry_errors=True).run() == 0


def test_an_archive_and_a_table(folder: Path) -> None:
    members = {}
    for key, text in (("1", {"tags": ["dog", "grass"]}), ("2", {"tags": "cat"})):
        caption = EXPECTED[int(key) - 1].removeprefix("old: ").partition(" (")[0]
        members[f"{key}.png"] = (folder / "upload" / f"{key}.png").read_bytes()
        members |= {f"{key}.json": json.dumps(text).encode(), f"{key}.txt": caption.encode()}
    write_tar(Path("a.tar"), members)
    assert prompts("a.tar") == EXPECTED
    with pytest.raises(UsageError, match=r"no row has the field 'tag' .*did you mean 'tags'\?; rows have txt, tags"):
        prompts("a.tar", "{tag}")
    pa = pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    from pyarrow import parquet

    pictures = [(folder / "upload" / f"{n}.png").read_bytes() for n in "12"]
    columns = {"image": pictures, "Caption": ["a dog on grass", "a cat"], "tags": [["dog", "grass"], ["cat"]]}
    parquet.write_table(pa.table(columns | {"score": [1.0, 0.5]}), "t.parquet")
    assert prompts("t.parquet") == EXPECTED and prompts("t.parquet", "{score}") == ["1", "0.5"]
    with pytest.raises(UsageError, match=r"no row has the field 'folder' .*; rows have .*name, file_name;"):
        prompts("t.parquet", "{folder}")


def test_what_a_path_says_and_what_is_no_field(folder: Path) -> None:
    assert prompts("upload", "{name} of {folder}: {file_name}") == ["1 of upload: 1.png", "2 of upload: 2.png"]
    assert prompts("upload/1.png", 'as {{name}}, {"a": [{name}]}, {}') == ['as {name}, {"a": [1]}, {}']
    assert field_names("{a} {{b}} {a} { c } {d e} {1} {f") == ["a", "d e"]
    assert field_names('{a: 1} {"a"} {red, green} {a|b} {x = 1} {a\nb} {}') == []
    assert fill("{a}{b}", {"a": "{b}", "b": "x"}) == "{b}x", "what is filled in is text"
    with pytest.raises(MissingFieldError, match="c"):
        fill("{c}", {})


def test_a_row_without_the_field_is_an_error_row(folder: Path) -> None:
    (folder / "upload" / "l.jsonl").write_text('{"file_name": "1.png", "tags": "dog"}\n{"file_name": "2.png"}\n')
    fake = Fake()
    assert job(folder, fake, paths=("upload/l.jsonl",), prompt="{tags}?", out="o.jsonl").run() == 1
    first, second = rows(Path("o.jsonl")).values()
    assert first["prompt"] == "dog?" and len(fake.calls) == 1
    assert second["error"] == {"type": "NoField", "message": "the row has no field 'tags', which the prompt names"}


@pytest.mark.parametrize(
    ("name", "there", "said"),
    [
        ("nmae", {}, "; did you mean 'name'?; rows have name, file_name, folder;"),
        ("caption", {}, "; rows have name, file_name, folder;"),
        ("captions", {"1.txt": "a dog"}, "; did you mean 'caption'?; rows have caption, name"),
        (
            "tag",
            {"2.png.json": '{"tags": ["dog"]}'},
            "; did you mean 'tags'?; rows have name, file_name, folder, tags;",
        ),
    ],
)
def test_fields_that_no_row_has_are_found_before_the_model(
    folder: Path, name: str, there: dict[str, str], said: str, capsys: Any
) -> None:
    """What rows have is what is there: text files and JSON of other programs beside the pictures included."""
    for file, text in there.items():
        (folder / "upload" / file).write_text(text)
    code = main(["caption", "upload", "--model", "no-such-model/of-this-name", "--prompt", f"Describe {{{name}}}."])
    err = capsys.readouterr().err.splitlines()
    assert code == 2 and len(err[-1]) < 300
    assert f"no row has the field '{name}' that the prompt names{said}" in err[-1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{answer1}"], "--prompts line 1 names {answer1}"),
        (["a", "b", "{answer3} {answer1}"], "line 3 names {answer3}"),
    ],
)
def test_answers_come_from_earlier_prompts(folder: Path, lines: list[str], message: str, capsys: Any) -> None:
    (folder / "q.txt").write_text("\n".join(lines))
    assert main(["caption", "upload", "--model", "no-such-model/of-this-name", "--prompts", "q.txt"]) == 2
    assert message in capsys.readouterr().err


ASKED = ("what?", "{answer1} of {name}?", "so {answer2} and {answer1}")


def test_an_answer_is_in_the_next_prompt(folder: Path) -> None:
    """And in a job that was stopped between the two, or whose first answer was an error."""
    options: dict[str, Any] = {"paths": ("upload",), "prompts": ASKED, "batch_size": 1}
    assert job(folder, Fake(), **options, out="whole.jsonl").run() == 0
    whole = rows(Path("whole.jsonl"))
    width = whole["upload/1.png#1"]["caption"].split()[0]
    second = f"{width} what? of 1?"
    assert whole["upload/1.png#2"]["prompt"] == second
    assert whole["upload/1.png#3"]["prompt"] == f"so {width} {second} and {width} what?"
    for keep in range(1, 6):
        lines = Path("whole.jsonl").read_text().splitlines(keepends=True)
        Path("part.jsonl").write_text("".join(lines[:keep]))
        Path("part.meta.json").write_text(Path("whole.meta.json").read_text())
        assert job(folder, Fake(), **options, out="part.jsonl").run() == 0
        assert Path("part.jsonl").read_text() == Path("whole.jsonl").read_text()

    def fail(widths: list[int]) -> None:
        raise ValueError("no")

    fake = Fake(fail)
    assert job(folder, fake, **options, out="bad.jsonl").run() == 1
    bad = rows(Path("bad.jsonl"))
    assert bad["upload/1.png#2"]["error"]["message"] == "prompt 1 has no answer, which the prompt names"
    assert len(fake.calls) == 2
    assert job(folder, Fake(), **options, out="bad.jsonl", retry_errors=True).run() == 0
    assert {i: row["caption"] for i, row in rows(Path("bad.jsonl")).items()} == {
        i: row["caption"] for i, row in whole.items()
    }


def test_a_changed_field_is_another_prompt(folder: Path) -> None:
    beside = folder / "upload" / "1.txt"
    beside.write_text("dog")
    (folder / "upload" / "2.txt").write_text("cat")
    options: dict[str, Any] = {"paths": ("upload",), "prompt": "{caption}?", "out": "o.jsonl"}
    assert job(folder, Fake(), **options).run() == 0 and job(folder, **options).run() == 0
    beside.write_text("dogs")
    with pytest.raises(UsageError, match="another prompt"):
        job(folder, **options).run()


def test_rays_stages_have_fields_and_answers(folder: Path) -> None:
    pytest.importorskip("pandas", reason="optional: mmspec[ray]")
    from test_app_ray import essence, plan_tasks, write_tasks

    (folder / "q.txt").write_text("\n".join(ASKED))
    words = "upload --model tiny --prompts q.txt --out o.jsonl --max-new-tokens 4 --batch-size 1 --no-progress"
    assert main(["caption", *words.split()]) == 0
    config = CaptionConfig(("upload",), "tiny", max_new_tokens=4, prompts=ASKED, batch_size=1)
    assert write_tasks(folder / "s.jsonl", plan_tasks(config, folder)[0], config) == [[1, 1, 1], [1, 1, 1]]
    assert essence(folder / "s.jsonl") == essence(folder / "o.jsonl")
