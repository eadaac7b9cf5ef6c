"""Lists of pictures as people, Excel and data sets write them: delimiters, encodings, columns, paths, addresses."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from input_table import line
from test_app_inputs import content_of, failure, picture, read

from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.io.content import Pictures, WebAddress


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in ("a.png", "sub/b.png", "café.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture())
    return tmp_path


def listed(folder: Path, name: str, text: str | bytes, **options: Any) -> list[tuple[str, str | None]]:
    """File name and prompt of the rows of a list."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(row.file_name, row.prompt) for row in read(folder / name, **options)]


ROWS = [("a.png", "what ?"), ("café.png", "l'été ?")]


@line("a list as Excel writes it: `;`, tabs, `sep=`, UTF-16, Windows-1252, `File Name`")
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252"])
def test_lists_of_excel(here: Path, delimiter: str, encoding: str) -> None:
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    for header in ("File Name", "FILE-NAME", '"filename"'):
        lines = [f"{header}{delimiter}Prompt{delimiter}note", *(f"{a}{delimiter}{b}{delimiter}" for a, b in ROWS)]
        data = mark + "\r\n".join([*lines, delimiter * 2, ""]).encode(encoding)
        for name in ("l.csv", "l.tsv", "l.txt"):
            assert listed(here, name, data) == ROWS, (name, header)
    given = f"sep={delimiter}\r\nfile_name{delimiter}prompt\r\na.png{delimiter}what ?\r\n"
    assert listed(here, "l.csv", given) == ROWS[:1]


def test_cells_that_do_not_fit_the_header_are_named(here: Path) -> None:
    with pytest.raises(UsageError, match=r"l\.csv line 3 has 3 cells, its header 2: put quotes around"):
        listed(here, "l.csv", "file_name,prompt\na.png,what\nsub/b.png,red, or blue ?\n")
    assert listed(here, "l.csv", 'file_name,prompt\na.png,"red, or\nblue ?"\n') == [("a.png", "red, or\nblue ?")]


@line("a JSON list, also of LLaVA's conversations or COCO's object")
def test_json_lists(here: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat ?"}, {"from": "gpt", "value": "A cat."}]
    both = {"id": 3, "image": ["a.png", "sub/b.png"], "messages": [{"role": "user", "content": "Both ?"}]}
    llava = [{"id": 1, "image": "a.png", "conversations": turns}, {"id": 2, "conversations": turns[1:]}, both]
    (here / "l.json").write_text(json.dumps(llava))
    found = read(here / "l.json")
    assert [(row.id, row.prompt, row.answer) for row in found] == [("1", "What ?", "A cat."), ("3", "Both ?", None)]
    assert isinstance(found[1].content, Pictures) and len(found[1].content.parts) == 2
    assert listed(here, "l.json", '["a.png", "sub/b.png"]') == [("a.png", None), ("sub/b.png", None)]
    (here / "l.json").write_text(
        json.dumps({"info": {}, "images": [{"file_name": "b.png", "id": 9}], "annotations": []})
    )
    assert [(row.id, row.file_name) for row in read(here / "l.json", root=str(here / "sub"))] == [("9", "sub/b.png")]
    many = [{"file_name": "a.png", "id": number, "pad": "x" * 900} for number in range(4000)]
    assert len(listed(here, "l.json", json.dumps(many, indent=1))) == 4000, "longer than a part that is read at once"
    for text, message in (
        ("[1]", "record 1 is not a JSON object"),
        ('[{"file_name": "a.png"}, {', "record 2 is not JSON"),
        ('[{"file_name": "a.png"}', "record 2 is not JSON"),
        ("7", "is a JSON int"),
    ):
        with pytest.raises(UsageError, match=rf"l\.json.*{message}"):
            listed(here, "l.json", text)


def test_pictures_among_the_parts_of_a_message(here: Path) -> None:
    def row(*parts: dict[str, Any], **columns: Any) -> str:
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [*parts]}]
        return json.dumps({"messages": [*turns, {"role": "assistant", "content": "A cat."}], **columns}) + "\n"

    text = {"type": "text", "text": "What ?"}
    first, second, third, fourth = read_rows(
        here,
        row({"type": "image", "image": "a.png"}, text)
        + row(text, {"type": "image_url", "image_url": {"url": "sub/b.png"}})
        + row({"type": "image_url", "image_url": "file://" + str(here / "café.png")}, text, id="c")
        + row({"image": "a.png"}, {"image": "sub/b.png"}, text, id="two")
        + row(text, id="none"),
    )
    assert [one.file_name for one in (first, second, third)] == ["a.png", "sub/b.png", "café.png"]
    assert {(one.prompt, one.answer) for one in (first, second, third, fourth)} == {("What ?", "A cat.")}
    assert isinstance(fourth.content, Pictures) and len(fourth.content.parts) == 2


def read_rows(folder: Path, text: str) -> list[Any]:
    (folder / "l.jsonl").write_text(text)
    return read(folder / "l.jsonl")


@line("a JSON list named `.jsonl`, JSON lines named `.json`")
def test_json_by_another_name(here: Path) -> None:
    records = [{"file_name": "a.png"}, {"file_name": "sub/b.png", "prompt": "{x}\n["}]
    as_lines = "".join(json.dumps(one) + "\n" for one in records)
    expected = [("a.png", None), ("sub/b.png", "{x}\n[")]
    for name in ("l.json", "l.jsonl"):
        for text in (
            as_lines,
            "\ufeff" + as_lines.replace("\n", "\r\n"),
            json.dumps(records),
            json.dumps(records, indent=1),
        ):
            assert listed(here, name, text) == expected, (name, text[:20])
        with pytest.raises(UsageError, match="goes on after its list of 2 records"):
            listed(here, name, json.dumps(records) + "\n" + json.dumps(records))
    assert listed(here, "l.json", json.dumps(records[0], indent=1)) == expected[:1]


@line("paths as other programs write them: backslashes, quotes, `file://`")
def test_paths_as_other_programs_write_them(here: Path) -> None:
    names = [r"sub\b.png", '"a.png"', r".\sub\b.png", f"file://{here}/caf%C3%A9.png", f"FILE://localhost{here}/a.png"]
    expected = ["sub/b.png", "a.png", "café.png"]
    assert [name for name, _ in listed(here, "l.txt", "\n".join(names))] == expected
    rows = [json.dumps({"image": name, "id": number}) for number, name in enumerate(names)]
    assert {name for name, _ in listed(here, "l.jsonl", "\n".join(rows))} == set(expected)
    (here / r"odd\name.png").write_bytes(picture())
    assert listed(here, "l.txt", r"odd\name.png") == [(r"odd\name.png", None)], "a name that is there is what it says"
    (here / "link.png").symlink_to("/etc/hosts")
    (here / "out").symlink_to("/etc")
    outside = [r"..\..\etc\passwd", "file:///etc/passwd", '"/etc/passwd"', "file://server/share/a.png"]
    for name in (*outside, "../secret.png", "sub/../../secret.png", "link.png", "out/hosts"):
        with pytest.raises(UsageError, match="leads out of"):
            listed(here, "l.txt", name)
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image": [*names, r"..\x.png"]}), here / "t.parquet")
    found = read(here / "t.parquet")
    assert [content_of(row) for row in found[:-1]] == [picture()] * len(names) and failure(found[-1]) == "OutsideInput"


@line("an id that pandas made a float: `7.0`")
def test_whole_floats_are_ids(here: Path) -> None:
    (here / "l.jsonl").write_text('{"file_name": "a.png", "id": 7.0}\n')
    assert [row.id for row in read(here / "l.jsonl")] == ["7"]
    with pytest.raises(UsageError, match=r"line 1: 'id' is text or a whole number, got 7\.5"):
        listed(here, "l.jsonl", '{"file_name": "a.png", "id": 7.5}')
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image": [picture()] * 3, "n": [7.0, None, 2.5]}), here / "t.parquet")
    rows = read(here / "t.parquet", id_column="n")
    assert [row.id for row in rows] == ["7", "t.parquet#1", "t.parquet#2"] and failure(rows[2]) == "BadText"


def test_of_two_columns_of_a_name_the_first_is_read(here: Path) -> None:
    assert listed(here, "l.csv", "file_name,file_name,prompt\na.png,x.png,hi\n") == [("a.png", "hi")]


@line("addresses")
def test_lists_of_addresses(here: Path) -> None:
    url = "http://example.org/a.png?size=1"
    for name, text in {
        "l.txt": url,
        "l.csv": f"url,caption\n{url},hi\n",
        "l.tsv": f"URL\tprompt\n{url}\twhat ?",
        "l.jsonl": json.dumps({"url": url}),
        "m.jsonl": json.dumps({"image": url}),
    }.items():
        (here / name).write_text(text)
        (row,) = read(here / name, urls="public")
        assert row.content == WebAddress(url) and row.id == row.file_name == url
        with pytest.raises(UsageError, match=rf"{name} line [12]: addresses in rows are read with --urls"):
            read(here / name)


@line("an absolute path; `--root DIR`")
def test_absolute_paths_and_root(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other, third = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("third")
    (other / "c.png").write_bytes(picture())
    (third / "x.png").write_bytes(picture())
    (other / "out.png").symlink_to(third / "x.png")
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    assert listed(here, "l.txt", f"{here}/a.png\n{here}/sub/b.png") == [("a.png", None), ("sub/b.png", None)]
    pq.write_table(pa.table({"image": [f"{here}/a.png", f"{other}/c.png", "c.png"]}), here / "t.parquet")
    first, outside, relative = read(here / "t.parquet")
    assert content_of(first) == picture() and failure(outside) == "OutsideInput" and failure(relative) == "Missing"
    found = read(here / "t.parquet", root=str(other))
    assert [content_of(row) for row in found] == [picture()] * 3, "relative paths start from --root"
    for name in (f"{other}/c.png", "c.png"):
        assert listed(here, "l.txt", name, root=str(other)) == [(f"{other}/c.png", None)]
    for name in (f"{other}/c.png", "../x.png", f"{here}/../x.png", f"{here}-2/a.png"):
        with pytest.raises(UsageError, match=r"l\.txt line 1: .* leads out of .*--root DIR"):
            listed(here, "l.txt", name)
    for name in ("out.png", f"{other}/out.png", f"{other}/../{third.name}/x.png"):
        with pytest.raises(UsageError, match="leads out of"):
            listed(here, "l.txt", name, root=str(other))


def test_base64_in_a_list(here: Path) -> None:
    text = base64.b64encode(picture()).decode()
    rows = [{"image": text}, {"image": f"data:image/png;base64,{text}", "id": "x"}]
    (here / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read(here / "l.jsonl")
    assert [content_of(row) for row in found] == [picture()] * 2
    assert [(row.id, row.file_name) for row in found] == [("l.jsonl#1", "l.jsonl#1"), ("x", "l.jsonl#2")]


JUNK = "A" * 900_000


@line("a mistake, or a named file that is missing")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"image": JUNK}), "line 1 names no file"),
        (json.dumps({"image": "a.png", "prompt": [JUNK]}), "line 1: 'prompt' is text"),
        (json.dumps({"image": "a.png", "prompt": 3}), "line 1: 'prompt' is text"),
        (json.dumps({"image": "a.png", "id": {"x": JUNK}}), "line 1: 'id' is text"),
        (json.dumps({"image": "a.png", "id": [1]}), "line 1: 'id' is text"),
        (json.dumps({JUNK: 1}), "line 1 names no file"),
        ('{"file_name": "a.png"}\n' + json.dumps([JUNK]), "line 2 is not a JSON object"),
        ('{"file_name": "a.png"}\n{"file_name": ', "line 2 is not JSON"),
        ("[" * 100_000, "nested too deeply|is not JSON"),
        ("\x00\ud800", "not UTF-8"),
        ('{"file_name": 3}', "line 1 names no file"),
        ('{"file_name": "' + "a" * 300 + '.png"}', "line 1 names no file"),
        ('{"file_name": "\\ud800.png"}', "line 1 names no file"),
        ('{"file_name": "a\\nb.png"}', "line 1 names no file"),
        ('{"image": "a.png", "id": 1}\n{"image": "sub/b.png", "id": 1}', "two rows have the id '1' (l.jsonl line 2)"),
        ('{"image": "a.png"}\n{"image": "a.png", "prompt": "x"}', "two rows have the id"),
        ('{"image": "a.png"}\n{"image": "a.png", "prompt": "\\ud83d"}', "two rows have the id"),
        ('{"image": "gone.png"}', "no such file: gone.png (l.jsonl line 1)"),
    ],
)
def test_messages_name_the_list_and_the_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(here)
    Path("l.jsonl").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UsageError) as failed:
        read("l.jsonl")
    said = str(failed.value)
    assert len(said) <= 300 and said.isprintable() and any(part in said for part in message.split("|"))
    assert "l.jsonl line" in said or "list l.jsonl" in said


def test_an_error_row_names_the_list_and_the_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "l.csv").write_text("file_name\na.png\ngone.png\n")
    assert main(["caption", str(here / "l.csv"), "--model", "tiny", "--max-new-tokens", "2", "--drafter", "none"]) == 1
    rows = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert rows[1]["error"]["message"].endswith("l.csv line 3)") and not rows[0]["error"]


def test_columns_of_a_list_can_be_named(here: Path) -> None:
    (here / "l.csv").write_text("key,pic,q\n7,a.png,what ?\n")
    (row,) = read(here / "l.csv", image_column="pic", prompt_column="q", id_column="key")
    assert (row.id, row.file_name, row.prompt) == ("7", "a.png", "what ?")
    with pytest.raises(UsageError, match="names no file: give 'nothing'"):
        read(here / "l.csv", image_column="nothing")


def test_a_missing_prompt_is_no_text(here: Path) -> None:
    (here / "l.jsonl").write_text('{"image": "a.png", "prompt": NaN}\n{"image": "sub/b.png", "prompt": null}\n')
    assert [row.prompt for row in read(here / "l.jsonl")] == [None, None]
