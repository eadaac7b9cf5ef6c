"""Lists as other programs write them: no row is lost without a word, and nothing is refused for what is not read."""

from __future__ import annotations

import base64
import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_table import line
from PIL import Image
from test_app_inputs import content_of, picture

from mmspec.app.errors import UsageError
from mmspec.app.io import list_json
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item, SourceOptions

NAMES = ("a.png", "b.png", "c.png")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        Path(name).write_bytes(picture())
    return tmp_path


def look(name: str, text: str | bytes, **options: Any) -> tuple[list[Item], list[str]]:
    """The rows of a list, and what is said of it."""
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    inputs = Inputs([name], SourceOptions(**options))
    inputs.check()
    return list(inputs.rows(lambda ident: False)), inputs.left_out()


def pairs(name: str, text: str | bytes) -> list[tuple[str, str | None]]:
    return [(item.file_name, item.prompt) for item in look(name, text)[0]]


def refusal(name: str, text: str | bytes) -> str:
    with pytest.raises(UsageError) as failed:
        look(name, text)
    assert len(str(failed.value)) <= 300 and str(failed.value).isprintable() and name in str(failed.value)
    return str(failed.value)


PANDAS = {
    "columns": '{"file_name":{"0":"a.png","1":"b.png","2":"c.png"},"prompt":{"0":"x","1":"y","2":null}}',
    "index": '{"0":{"file_name":"a.png","prompt":"x"},"1":{"file_name":"b.png","prompt":"y"},'
    '"2":{"file_name":"c.png","prompt":null}}',
    "split": '{"columns":["file_name","prompt"],"index":[0,1,2],"data":[["a.png","x"],["b.png","y"],["c.png",null]]}',
    "table": '{"schema":{"fields":[{"name":"index","type":"integer"},{"name":"file_name","type":"string"}],'
    '"primaryKey":["index"],"pandas_version":"1.4.0"},"data":[{"index":0,"file_name":"a.png","prompt":"x"},'
    '{"index":1,"file_name":"b.png","prompt":"y"},{"index":2,"file_name":"c.png","prompt":null}]}',
    "records": '[{"file_name":"a.png","prompt":"x"},{"file_name":"b.png","prompt":"y"},'
    '{"file_name":"c.png","prompt":null}]',
    "lines": '{"file_name":"a.png","prompt":"x"}\n{"file_name":"b.png","prompt":"y"}\n'
    '{"file_name":"c.png","prompt":null}',
}
"""What `DataFrame.to_json` writes, by `orient`."""


@line("a JSON file as pandas writes it, with any `orient`")
@pytest.mark.parametrize("name", ["l.json", "l.jsonl"])
@pytest.mark.parametrize("orient", PANDAS)
def test_json_of_pandas(orient: str, name: str) -> None:
    assert pairs(name, PANDAS[orient]) == [("a.png", "x"), ("b.png", "y"), ("c.png", None)]
    assert pairs(name, json.dumps(json.loads(PANDAS[orient]), indent=2) if orient != "lines" else PANDAS[orient])[2:]


def test_the_json_of_pandas_is_what_pandas_writes() -> None:
    pandas = pytest.importorskip("pandas", reason="comes with datasets: mmspec[data]")
    table = pandas.DataFrame({"file_name": NAMES, "prompt": ["x", "y", None]})
    for orient in ("columns", "index", "split", "records"):
        assert json.loads(table.to_json(orient=orient)) == json.loads(PANDAS[orient])
    assert pairs("l.json", table.to_json(orient="table"))[1] == ("b.png", "y")


def test_an_object_that_is_one_row_or_several_is_refused() -> None:
    assert "one row or several" in refusal("l.json", '{"image": ["a.png", "b.png"]}')
    assert "orient='records'" in refusal("l.json", '{"info": {}, "images": ["a.png", "b.png"]}')
    assert "is not a JSON object: list" in refusal("l.json", '[["a.png"], ["b.png"]]')
    by_column = {"file_name": NAMES, "prompt": ["x", "y", "z"]}
    assert pairs("l.json", json.dumps(by_column))[1:] == [("b.png", "y"), ("c.png", "z")]
    one = {"image": ["a.png", "b.png"], "prompt": "Which ?"}
    assert [(len(item.content.parts), item.prompt) for item in look("l.json", json.dumps(one))[0]] == [(2, "Which ?")]  # type: ignore[union-attr]
    struct = {"image": {"path": "a.png", "bytes": None}}
    assert pairs("l.json", json.dumps(struct)) == [("a.png", None)]
    assert len(look("l.jsonl", json.dumps({"images": ["a.png", "b.png"]}))[0]) == 1, "a line is a row"


def test_a_large_object_is_read_a_record_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_json, "MAX_LINE_CHARS", 1 << 20)
    notes = [{"id": 1, "image_id": 1, "segmentation": [[1.5] * 400]}] * 2000
    images = [{"id": number, "file_name": name, "license": 1} for number, name in enumerate(NAMES)]
    for order in (("info", "images", "annotations"), ("annotations", "info", "images")):
        values = {"info": {"url": "http://cocodataset.org"}, "images": images, "annotations": notes}
        text = json.dumps({key: values[key] for key in order})
        assert len(text) > 3 << 20
        assert [(item.id, item.file_name) for item in look("l.json", text)[0]] == [
            (str(number), name) for number, name in enumerate(NAMES)
        ]
    assert "longer than 1048576 characters" in refusal("l.json", json.dumps({"file_name": {"0": "x" * (3 << 20)}}))


@line("base64 and data URLs")
@pytest.mark.parametrize("name", ["l.csv", "l.tsv", "l.txt", "l.jsonl"])
def test_large_base64_in_a_list(name: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (260, 260, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    data = file.getvalue()
    text = base64.b64encode(data).decode()
    assert len(text) > 200_000
    between = {"l.csv": ",", "l.tsv": "\t", "l.txt": "|"}.get(name)
    rows = [json.dumps({"file_name": text, "prompt": "w"})] * 2 if between is None else []
    lines = rows or [f"file_name{between}prompt", *[f"{text}{between}w"] * 2]
    found, _ = look(name, "\r\n".join(lines))
    assert [(content_of(item), item.prompt) for item in found] == [(data, "w")] * 2


TEXTS = {
    "gbk": "图片里有什么",
    "cp932": "この絵は何ですか",
    "big5": "圖片裡有什麼",
    "cp949": "그림에 무엇이",
    "cp1251": "Что на картинке?",
    "koi8-r": "Что на картинке?",
    "cp1255": "מה בתמונה",
}


@line("a list that is not UTF-8: GBK, Shift-JIS, Cyrillic")
@pytest.mark.parametrize("encoding", TEXTS)
def test_encodings_are_not_guessed(encoding: str) -> None:
    text = f"file_name,prompt\r\na.png,{TEXTS[encoding]}\r\n"
    for name in ("l.csv", "l.tsv", "l.txt"):
        given = text.replace(",", "\t" if name == "l.tsv" else ",")
        assert "l" + name[1:] + " line 2 is not UTF-8" in refusal(name, given.encode(encoding))
    for name in ("l.json", "l.jsonl"):
        assert "is not UTF-8 text" in refusal(
            name, json.dumps([{"image": "a.png", "prompt": TEXTS[encoding]}], ensure_ascii=False).encode(encoding)
        )
    for wide in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        assert pairs("l.csv", text.encode(wide)) == [("a.png", TEXTS[encoding])]


def test_western_text_is_read_and_counted() -> None:
    texts = ["Größe ?", "créées", "«été»", "¿Qué?", "5 €"]
    data = "\r\n".join(["file_name;prompt", *(f"a.png;{text}" for text in texts)]).encode("cp1252")
    Path("l.csv").write_bytes(data)
    with pytest.raises(UsageError, match="two rows have the id"):
        look("l.csv", data)
    data = "\r\n".join(["file_name;id;prompt", *(f"a.png;{n};{text}" for n, text in enumerate(texts))]).encode("cp1252")
    rows, said = look("l.csv", data)
    assert [item.prompt for item in rows] == texts
    assert said == [
        "l.csv: 5 lines not in UTF-8 read as Windows-1252, as line 2; save the list as UTF-8 if that is wrong"
    ]


@line("an unclosed quotation mark in a CSV or TSV")
@pytest.mark.parametrize("between", ["\t", ",", ";"])
@pytest.mark.parametrize(
    ("first", "last"),
    [('"great film', '5"'), ('"great film', "x"), ('"great" film', "x"), ('5" wide', "x"), ('"', '"'), ('"a', '"b"')],
)
def test_a_stray_quotation_mark_takes_no_rows(between: str, first: str, last: str) -> None:
    rows = [("a.png", first), ("b.png", "y"), ("c.png", last)]
    text = "\n".join(between.join(row) for row in [("file_name", "prompt"), *rows])
    found, said = look("l.tsv", text)
    unquoted = {'"b"': "b"}
    assert [(item.file_name, item.prompt) for item in found] == [(a, unquoted.get(b, b)) for a, b in rows]
    strays = sum(cell.startswith('"') and cell != '"b"' for cell in (first, last))
    assert bool(said) == bool(strays) and all("quotation mark that is not closed" in one for one in said)


def test_cells_of_several_lines_stay_one() -> None:
    cell = 'Say "hi".\nFirst, colours.\nThen, shapes, and b'
    quoted = '"' + cell.replace('"', '""') + '"'
    found, said = look("l.csv", f'file_name,prompt\r\na.png,{quoted}\r\nb.png,"x\ty"\r\n')
    assert [item.prompt for item in found] == [cell, "x\ty"] and not said
    message = refusal("l.csv", 'file_name,prompt\na.png,"red, or blue\nb.png,y\n')
    assert "l.csv line 2: a quotation mark is not closed" in message


@line("names in a `.txt` that begin with `#`, end with spaces, or are not UTF-8")
def test_odd_names_in_a_text() -> None:
    names = [b"#sunset (1).png", b" s .png", b"latin\xe9.png", b"\xcd\xbc\xc6\xac.png", b"cafe.png"]
    for name in names:
        Path(os.fsdecode(name)).write_bytes(picture())
    rows, said = look("l.txt", b"\n".join([*names, b"# comment", b"#old.png", b"./#sunset (1).png"]))
    assert [os.fsencode(item.path.name) for item in rows] == names
    assert said[0] == "l.txt: 2 lines beginning with # taken for comments, as line 6; ./# begins the name of a file"
    (Path("caf\xe9.png")).write_bytes(picture())
    rows, said = look("l.txt", "caf\xe9.png\n".encode("cp1252"))
    assert rows[0].file_name == "caf\xe9.png" and "read as Windows-1252" in said[0]


TURNS = [{"role": "user", "content": "<image>What ?"}, {"role": "assistant", "content": "x"}]


@line("records with no picture: `[]`, `null`, an empty text")
@pytest.mark.parametrize("empty", [[], [""], "", " ", None, [None], {}, {"bytes": None, "path": None}])
def test_records_without_a_picture_are_counted(empty: Any) -> None:
    records = [
        {"messages": TURNS, "images": ["a.png"]},
        {"messages": TURNS, "images": empty},
        {"query": "Hi.", "images": empty},
        {"file_name": empty, "image": "b.png"},
        {"text": "no column"},
    ]
    for name, text in (("l.json", json.dumps(records)), ("l.jsonl", "\n".join(map(json.dumps, records)))):
        rows, said = look(name, text)
        assert [item.file_name for item in rows] == ["a.png", "b.png"]
        unit = "record" if name == "l.json" else "line"
        assert said == [f"{name}: skipped 3 records without a picture, as {unit} 2"]
    rows, said = look("l.csv", 'file_name,prompt\na.png,x\n,y\n"",z\n')
    assert len(rows) == 1 and said == ["l.csv: skipped 2 records without a picture, as line 3"]
    assert "line 1 names no file: give 'file_name'; got 'imgae', 'prompt'" in refusal(
        "l.jsonl", '{"imgae": "a.png", "prompt": "x"}\n{"imgae": "b.png"}\n'
    )


def test_all_rows_are_counted_of_a_list_that_is_read_in_part() -> None:
    text = "\n".join(
        [json.dumps({"file_name": "a.png", "id": number}) for number in range(2500)] + ['{"image": ""}'] * 3
    )
    Path("l.jsonl").write_text(text)
    inputs = Inputs(["l.jsonl"], SourceOptions())
    inputs.check()
    assert inputs.left_out(listed=True) == ["l.jsonl: skipped 3 records without a picture, as line 2501"]


@line("lists or archives that were joined by `cat`")
def test_marks_within_a_list() -> None:
    text = "\ufeff{}\n\ufeff{}\n"
    assert [item.id for item in look("l.txt", text.format("a.png", "b.png"))[0]] == ["a.png", "b.png"]
    assert len(look("l.jsonl", text.format('{"image": "a.png"}', '{"image": "b.png"}'))[0]) == 2


@line("kilobytes that unpack to millions of lines, JSON a thousand levels deep")
@pytest.mark.parametrize(("opened", "closed"), ["[]", ('{"a":', "}")])
def test_values_that_are_nested_too_deeply(opened: str, closed: str) -> None:
    for levels in (960, 20_000):  # what the parser of JSON reads, and what it does not
        deep = opened * levels + '"a.png"' + closed * levels
        for text in (f'[{{"image": {deep}}}]', f'{{"x": {deep}, "images": [{{"image": "a.png"}}]}}'):
            Path("l.json").write_text(text)
            with suppress(UsageError):  # and nothing else
                look("l.json", text)
        assert "l.json" in refusal("l.json", f'[{{"image": "a.png"}}, {{"image": {deep}}}]')


@line("equal rows")
def test_equal_rows_are_counted() -> None:
    rows, said = look("l.txt", "a.png\nb.png\n./a.png\na.png\n")
    assert len(rows) == 2 and said == ["l.txt: skipped 2 rows equal to an earlier one, as line 3"]


@line("several columns that name files: `file_name` and `image`, `image` and `video`")
@pytest.mark.parametrize(
    "others", [("file_name", "image"), ("image", "video"), ("path", "photo"), ("image", "Image Path")]
)
def test_two_columns_that_name_files(others: tuple[str, str]) -> None:
    for name, text in {
        "l.csv": ",".join(others) + "\na.png,b.png\nb.png,x\\b.png\nc.png,\nc.png,3\n",
        "l.jsonl": "\n".join(json.dumps(dict(zip(others, two, strict=True))) for two in
                             (("a.png", "b.png"), ("b.png", "/x/b.png"), ("c.png", ""), ("c.png", "http://h/d.png"))),
    }.items():  # fmt: skip
        rows, said = look(name, text)
        assert [row.file_name for row in rows] == ["a.png", "b.png", "c.png"]
        assert said[0] == (
            f"{name}: 1 record with several columns that name files, as line {1 + (name[-1] == 'v')}: one is read; "
            "--image-column chooses"
        )
        rows, said = look(name, text.replace("b.png", "a.png"), image_column=others[0])
        assert not any("columns" in one for one in said)


@line("fields that captions do not need: answers of any type")
@pytest.mark.parametrize("answer", [3, 2.5, ["yes", "no"], {"1": "a"}, True, None, "x" * 70_000, "\ud83d"])
def test_answers_are_not_read_for_captions(answer: Any) -> None:
    (row,), said = look("l.jsonl", json.dumps({"image": "a.png", "prompt": "How many ?", "answer": answer}))
    assert row.prompt == "How many ?" and row.content is None and not said


@line("requests of OpenAI's batches, tasks of Label Studio, rows of the hub's viewer")
def test_records_within_records() -> None:
    parts = [{"type": "text", "text": "What ?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    request = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    answer = {"model": "m", "input": [{"role": "user", "content": [
        {"type": "input_text", "text": "Why ?"}, {"type": "input_image", "image_url": "b.png"}]}]}  # fmt: skip
    lines = [request, request | {"custom_id": "r2", "url": "/v1/responses", "body": answer}]
    rows, _ = look("batch.jsonl", "\n".join(map(json.dumps, lines)))
    assert [(row.id, row.file_name, row.prompt) for row in rows] == [
        ("r1", "a.png", "What ?"),
        ("r2", "b.png", "Why ?"),
    ]
    task = [{"id": 7, "data": {"image": "a.png"}, "annotations": [{"result": []}]}]
    assert [(row.id, row.file_name) for row in look("l.json", json.dumps(task))[0]] == [("7", "a.png")]
    viewer = {"features": [], "rows": [{"row_idx": 3, "row": {"image": "b.png"}, "truncated_cells": []}]}
    assert [(row.id, row.file_name) for row in look("l.json", json.dumps(viewer))[0]] == [("3", "b.png")]


@line("a list from a pipe: `-`, `/dev/stdin`, `<(find ...)`")
def test_pipes_are_refused() -> None:
    reading, writing = os.pipe()
    os.mkfifo("list.txt")
    for name in ("-", f"/dev/fd/{reading}", "list.txt"):
        with pytest.raises(UsageError, match="is a pipe, and lists are read more than once: write it to a file"):
            Inputs([name], SourceOptions()).check()
    os.close(reading)
    os.close(writing)
