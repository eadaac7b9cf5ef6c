"""Options of `mmspec caption`: how answers begin and end, banned words, files of options, tables and text files."""

from __future__ import annotations

import csv
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from caption_jobs import Fake, run_config
from fuzz import patch_model
from test_app_prompts import THINKING_TEMPLATE
from test_app_variants import rows

import mmspec
from mmspec.app.caption.command import build_config, build_output
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.loops import without_loop
from mmspec.app.cli.main import build_parser, main
from mmspec.app.errors import UsageError
from mmspec.app.io.decode import decode_item
from mmspec.app.io.text import escaped
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.chat import build_inputs, check_chat
from mmspec.app.modeling.prompt_format import ChatFormat
from mmspec.app.modeling.random_models import random_model
from mmspec.app.modeling.sampling import Sampling, banned_tokens
from research.synthetic_images import write_images

NOWHERE = "no-such-model/of-this-name"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three pictures in `p`, below the current folder."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "p", 3)
    return tmp_path


def config(*words: object) -> CaptionConfig:
    return build_config(build_parser().parse_args(["caption", *map(str, words)]))


def run_fake(*words: object) -> tuple[int, Fake]:
    """A job with a stand-in for the model, configured as the command line does it."""
    fake, options = Fake(), config("p", "--model", "m", *words)
    return run_config(options, fake), fake


def refused(capsys: Any, *words: object) -> str:
    """The one line with which a command is refused, before its model is loaded."""
    try:
        code = main(["caption", *map(str, words), "--no-progress"])
    except SystemExit as error:
        code = int(error.code or 0)
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and len(lines[0]) < 320
    return str(lines[0])


# --- how answers begin


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    model, processor = random_model("tiny")
    processor.chat_template = THINKING_TEMPLATE.replace(
        "{% endfor %}{% endfor %}",
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}",
    ) + "{% endif %}"  # fmt: skip
    return Captioner(model.eval(), processor, max_new_tokens=10)


QUESTIONS = ["what is it ?", "where is the small red ball that somebody has left on the table ?"]
START = "a photo of"


@pytest.fixture
def media(folder: Path) -> list[Any]:
    from mmspec.app.io.item import Item
    from mmspec.vision.video.decoder_pool import DecoderPool
    from mmspec.vision.video.samplers import Uniform

    with DecoderPool() as pool:
        files = sorted((folder / "p").iterdir())[:2]
        return [decode_item(Item(file), Uniform(1), 1 << 20, pool) for file in files]


def expected(captioner: Captioner, media: list[Any], **options: Any) -> tuple[torch.Tensor, int]:
    """[B, L] tokens of plain `generate` after the prompt as transformers renders it, and where the answer begins."""
    messages = [
        [
            {"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": question}]},
            {"role": "assistant", "content": [{"type": "text", "text": START}]},
        ]
        for one, question in zip(media, QUESTIONS, strict=True)
    ]
    inputs = captioner.processor.apply_chat_template(
        messages, continue_final_message=True, tokenize=True, return_dict=True, return_tensors="pt",
        enable_thinking=False, processor_kwargs={"padding": True},
    )  # fmt: skip
    with mmspec.disabled(captioner.model):
        output = captioner.model.generate(**inputs, max_new_tokens=10, do_sample=False, **options)
    return output, inputs["input_ids"].shape[1]


@pytest.mark.parametrize("ban", [False, True])
def test_a_start_and_banned_words_are_those_of_generate(captioner: Captioner, media: list[Any], ban: bool) -> None:
    """Prompts of different lengths, with drafts; what was generated without the ban is not there with it."""
    tokenizer = captioner.processor.tokenizer
    with patch_model(captioner.model, "hybrid", processor=captioner.processor):
        free, begin = expected(captioner, media)
        words = [tokenizer.decode([free[0, begin]]).strip(), tokenizer.decode([free[1, begin + 1]]).strip()]
        banned = banned_tokens(tokenizer, words, "m") if ban else []
        captioner.sampling, captioner.chat = Sampling(bad_words_ids=banned), ChatFormat(start=START)
        output, begin = expected(captioner, media, **({"bad_words_ids": banned} if ban else {}))
        for captioner.hide_start in (False, True):
            found = captioner.caption(media, QUESTIONS, 0)
            for row, caption in enumerate(found):
                ids = output[row, begin:].tolist()
                whole = tokenizer.decode(output[row, : begin + caption.n_new_tokens], skip_special_tokens=True)
                text = START + whole.rpartition(START)[2].rstrip()
                assert caption.caption == (text.removeprefix(START).strip() if captioner.hide_start else text)
                assert not ban or not {tuple(one) for one in banned} & {(token,) for token in ids}
        assert any(one.n_rounds for one in found)
        captioner.sampling, captioner.chat, captioner.hide_start = Sampling(), ChatFormat(), False


def test_a_start_without_a_template(media: list[Any]) -> None:
    model, processor = random_model("tiny")
    processor.chat_template = None
    inputs = build_inputs(model, processor, media, QUESTIONS, chat=ChatFormat(start=START))
    texts = processor.tokenizer.batch_decode(inputs["input_ids"])
    assert all(text.endswith(f"assistant: {START}") for text in texts)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content[-1].text }}{% endfor %}", "drops or changes it"),
        ("{% for m in messages %}{{ m.content[-1].text | trim }}{% endfor %}", "without the space at its end"),
        ("{% for m in messages %}{{ m.content[-1].text | upper }}{% endfor %}", "drops or changes it"),
        ("{{ raise_exception('no assistant') }}", "refuses it"),
    ],
)
def test_a_start_that_the_template_eats(template: str, message: str) -> None:
    _, processor = random_model("tiny")
    processor.chat_template = template
    with pytest.raises(UsageError) as error:
        check_chat(processor, "M", None, ChatFormat(start="a photo of "))
    assert message in str(error.value) and "--start" in str(error.value)


def test_words_that_cannot_be_banned_are_found_before_the_weights(folder: Path, capsys: Any) -> None:
    _, processor = random_model("tiny")
    found = [processor.tokenizer.decode(ids).strip() for ids in banned_tokens(processor.tokenizer, ["red"], "m")]
    assert found and set(found) == {"red"}
    with pytest.raises(UsageError, match="is no token of m"):  # which generate would not ban, and no caption shows
        banned_tokens(processor.tokenizer, ["red", processor.tokenizer.eos_token], "m")
    (folder / "w.txt").write_text("red\n漢字\n")
    assert main(["caption", "p", "--model", "tiny", "--ban-words", "w.txt", "--no-progress"]) == 2
    assert "--ban-words: '漢字' is no token of --model tiny, nor several" in capsys.readouterr().err
    (folder / "w.txt").write_text("red\n\n")
    assert "line 2 is empty: each line is a word" in refused(capsys, "p", "--model", NOWHERE, "--ban-words", "w.txt")


# --- how they end


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A cat, a man, a man, a man, a man, a m", "A cat, a man"),
        ("The dog runs. The dog runs. The dog runs. The", "The dog runs."),
        ("It is very very very big.", None),
        ("ha ha ha", None),
        ("......" * 6, "."),
        ("一只猫和一只狗。" * 5, "一只猫和一只狗。"),
        ("", None),
        ("A dog\nA dog\nA dog\nA dog\nA dog\n", "A dog"),
        ("one two three four five six seven", None),
        ("x" * 23, None),
        ("In the van" + " man" * 9, "In the van man"),
        ("I see a cat" + ", and a bat" * 4, "I see a cat, and a bat"),
        ("A red bus." + " It is big." * 4 + " It", "A red bus. It is big."),
        ("It is 3.2" + " 2.2" * 9, "It is 3.2 2.2"),
        ("你好。" + "一只狗。" * 8, "你好。一只狗。"),
    ],
)
def test_a_loop_at_the_end_is_found(text: str, found: str | None) -> None:
    assert without_loop(text) == found


@pytest.mark.parametrize("between", [" ", ", ", ". "])
def test_what_stays_of_a_loop_ends_with_a_word(between: str) -> None:
    """Words that begin and end alike before the loop and in it, and a last time that is there in part."""
    rng = random.Random(1)
    for _ in range(500):
        before, loop = (rng.choices(["ban", "man", "an", "nan", "a"], k=rng.randint(1, 4)) for _ in range(2))
        text = between.join([*before, *loop * 20])[: -rng.randint(1, 9)]
        found = without_loop(text)
        assert found is not None and text.startswith(found) and not text[len(found)].isalpha()
        assert len(found.split()) <= len(before) + len(loop)


def test_the_row_says_that_a_loop_was_cut(folder: Path) -> None:
    options = ("--prompt", "so it is, " * 9, "--out", "o.jsonl", "--prefix", "x ")
    assert run_fake(*options, "--cut-loops")[0] == 0
    found = rows(Path("o.jsonl"))
    assert {row["finish_reason"] for row in found.values()} == {"loop"}
    assert all(row["caption"].endswith("so it is") and row["caption"].startswith("x ") for row in found.values())
    with pytest.raises(UsageError, match="cut_loops"):
        run_fake(*options)


# --- which rows, and again


def test_a_limit_can_be_raised(folder: Path) -> None:
    for limit, count in ((2, 2), (1, 0)):
        code, fake = run_fake("--limit", limit, "--out", "o.jsonl")
        assert code == 0 and sum(map(len, fake.calls)) == count
    _, fake = run_fake("--out", "o.jsonl", "--batch-size", 1)
    assert len(fake.calls) == 1 and [row["index"] for row in rows(Path("o.jsonl")).values()] == [0, 1, 2]


@pytest.mark.parametrize("form", ["jsonl", "csv", "webdataset"])
def test_a_job_is_run_again_from_its_file(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "q.txt").write_text("{name}?\n\U0001f600 {answer1} \"'\\\n")
    words = ("--prompts", "q.txt", "--stop", "\n", "--stop", "é", "--max-new-tokens", 7, "--limit", 2, "--cut-loops")
    more = ("--chat-template-kwargs", '{"x": "\\u007f"}', "--shard", "0/1", "--batch-size", "5", "--compare", "all")
    first = config("p", "--model", "m", "--out", f"o.{form}", "--format", form, *words, *more)
    code, _ = run_fake("--out", f"o.{form}", "--format", form, *words, *more)
    assert code == 0
    (file,) = folder.rglob("*.job.toml")
    monkeypatch.chdir(folder / "p")
    again = config("--config", file)
    assert again.fingerprint(1) == first.fingerprint(1) and again.prompts == first.prompts
    assert (again.limit, again.batch_size, again.compare, again.format) == (2, first.batch_size, -1, form)
    fake = Fake()
    assert run_config(again, fake) == 0 and not fake.calls
    assert config("--config", file, "--limit", 3, "--stop", "x").stop == ("x",)
    assert tomllib.loads(file.read_text())["paths"] == [str(folder / "p")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "cp1252"])
def test_files_of_options_as_editors_write_them(folder: Path, encoding: str, capsys: Any) -> None:
    """Notepad and PowerShell end lines with CR LF, and write UTF-16 or a byte order mark; Excel saves both as text."""
    texts = {
        "job.toml": 'paths = "p"\r\nmodel = "m"\r\nstart = "Ein Café"\r\nlimit = 2\r\n',
        "q.txt": "what is at the café?\r\nso {answer1}?\r\n",
        "w.txt": "café \r\nred\r\n",
        "s.json": '{"type": "object",\r\n "title": "Café"}',
    }
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode(encoding))
    flags = {"--config": "job.toml", "--prompts": "q.txt", "--ban-words": "w.txt", "--json-schema": "s.json"}
    if encoding == "cp1252":
        for flag, name in flags.items():
            assert "is not UTF-8: save the file as UTF-8" in refused(capsys, "p", "--model", NOWHERE, flag, name)
        return
    found = config(*(word for pair in flags.items() for word in pair))
    assert (found.paths, found.start, found.limit) == (("p",), "Ein Café", 2)
    assert found.prompts == ("what is at the café?", "so {answer1}?") and found.ban_words == ("café", "red")
    assert json.loads(found.json_schema or "") == {"type": "object", "title": "Café"}


@pytest.mark.parametrize("name", ["p/*.png", "{p,q}", "./p", "s3://bucket/{a,b}.tar", "hf://datasets/a/b", "p\udcff/"])
def test_paths_of_a_file_do_not_depend_on_the_folder(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Globs and braces are no files, and a name may be no text; of a report the folder is not there yet."""
    options = config(name, "--model", "m", "--report", "r", "--out", "o.jsonl")
    output = build_output(options, ProcessInfo())
    output.open()
    output.begin(False)
    text = (folder / "o.job.toml").read_text(encoding="utf-8")
    output.close([], complete=False)
    (path,) = tomllib.loads(text)["paths"]
    (folder / "o.job.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder / "p")
    again = config("--config", folder / "o.job.toml")
    assert again.paths == (path,) and again.report == str(folder / "r") and again.out == str(folder / "o.jsonl")
    assert path == (name if "://" in name else f"{folder}/{escaped(name)}")


@pytest.mark.parametrize(
    ("first", "out", "form"),
    [
        ("o.jsonl", "x.csv", "csv"),
        ("o.csv", "x.jsonl", "jsonl"),
        ("o.csv", "x", "csv"),
        ("o.jsonl", "x.tar", "webdataset"),
    ],
)
def test_another_output_has_the_format_of_its_suffix(folder: Path, first: str, out: str, form: str) -> None:
    assert run_fake("--out", first)[0] == 0
    (file,) = folder.glob("*.job.toml")
    assert config("--config", file, "--out", out).format == form
    assert config("--config", file, "--out", out, "--format", "txt").format == "txt"


def test_settings_have_flags_too(folder: Path) -> None:
    job = ("p", "--model", "m", "--temperature", "1")
    flags = config(*job, "--top-p", "0.9", "--threads", "2", "--cut-loops")
    assert config(*job, "--set", "top_p=0.9", "threads=2", "cut_loops") == flags
    with pytest.raises(UsageError, match=r"--set top_q is no setting.*did you mean 'top_p'"):
        config(*job, "--set", "top_q=1")


def test_values_of_toml(folder: Path) -> None:
    lines = ['paths = "p"', 'model = "m"', 'ban_words = ["red ", " blue"]', 'fields = ["gen", "index"]']
    (folder / "job.toml").write_text("\n".join([*lines, "[chat_template_kwargs]", "date = 2026-01-02", "n = [1]"]))
    found = config("--config", "job.toml")
    assert (found.ban_words, found.fields) == (("red", "blue"), ("gen", "index"))
    assert found.chat_template_kwargs == {"date": "2026-01-02", "n": [1]}


def test_the_command_line_has_precedence(folder: Path) -> None:
    lines = ['paths = "p"', 'model = "m"', "temperature = 0.5", "max-new-tokens = 9", 'stop = ["a", "b"]', "ray = true"]
    (folder / "job.toml").write_text("\n".join(lines))
    found = config("--config", "job.toml", "--temperature", "0")
    assert (found.temperature, found.max_new_tokens, found.stop, found.ray) == (0.0, 9, ("a", "b"), "")
    assert config("other", "--config", "job.toml").paths == ("other",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_new_token = 3", "no option 'max_new_token'; did you mean 'max_new_tokens'?"),
        ("overwrite = true", "no option 'overwrite'"),
        ("temperature = 'warm'", "temperature must be 0 (greedy) or more, got 'warm'"),
        ("format = 'xml'", "format is one of jsonl, csv, parquet"),
        ("cut_loops = 1", "cut_loops is true or false, got 1"),
        ("stop = [1]", "stop is a text or a list of texts"),
        ("max_pixels = true", "max_pixels takes a text or a number, got True"),
        ("prompt = ['a']", "prompt takes a text or a number, got ['a']"),
        ("shard = [0, 2]", "shard takes a text or a number, got [0, 2]"),
        ("a = [", "cannot read --config job.toml: "),
        ("[captions]\nseed = 1", "no option 'captions'"),
        (None, "cannot read --config job.toml: No such file"),
        ("# nothing", "nothing to caption: name files"),
    ],
)
def test_a_bad_file_of_options(folder: Path, text: str | None, message: str, capsys: Any) -> None:
    if text is not None:
        (folder / "job.toml").write_text(text)
    assert message in refused(capsys, "--model", NOWHERE, "--config", "job.toml")


@pytest.mark.parametrize(
    "options",
    [{"start": "a"}, {"start": "a", "hide_start": True}, {"ban_words": ("a",)}, {"cut_loops": True}, {"prompt": "{a}"},
     {"limit": 2, "temperature": 1.0}],
)  # fmt: skip
def test_what_decides_captions_is_in_the_identity_of_a_job(options: dict[str, Any]) -> None:
    plain = CaptionConfig((), "m", temperature=options.get("temperature", 0.0))
    assert plain.fingerprint(1) != CaptionConfig((), "m", **options).fingerprint(1)
    assert CaptionConfig((), "m", limit=2).fingerprint(1) == CaptionConfig((), "m").fingerprint(1)


# --- tables and text files


def test_a_table_for_excel(folder: Path) -> None:
    (folder / "p" / "broken.png").write_bytes(b"no picture")
    code, _ = run_fake("--out", "o.csv", "--prompt", 'a "quoted"; é,\nb', "--fields", "file_name,gen", "--limit", 2)
    assert code == 0 and Path("o.csv").read_bytes().startswith(b"\xef\xbb\xbf")
    assert run_fake("--out", "o.csv", "--prompt", 'a "quoted"; é,\nb', "--fields", "file_name,gen")[0] == 1
    with Path("o.csv").open(encoding="utf-8-sig", newline="") as stream:
        table = list(csv.DictReader(stream))
    whole = list(rows(Path("o.rows.jsonl")).values())
    assert [row["caption"] or None for row in table] == [row["caption"] for row in whole] and len(table) == 4
    assert json.loads(table[0]["gen"]) == whole[0]["gen"] and "NotAnImage" in table[3]["error"]
    expected = ["id", "file_name", "caption", "prompt_sha1", "gen", "error", "index", "file_stamp"]
    assert list(table[0]) == expected
    assert run_fake("--out", "o.csv", "--prompt", 'a "quoted"; é,\nb', "--fields", "file_name,gen")[1].calls == []
    Path("mine.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match="not the output of a caption job"):
        run_fake("--out", "mine.csv")
    assert Path("mine.csv").read_text() == "a,b\n"


def test_a_table_that_excel_saved_is_a_list_again(folder: Path) -> None:
    """Another program's delimiter, encoding and number; the caption in it is a field of the next prompt."""
    assert run_fake("--out", "o.csv", "--fields", "file_name", "--prompt", "é; it")[0] == 0
    with Path("o.csv").open(encoding="utf-8-sig", newline="") as stream:
        table = list(csv.reader(stream))
    with Path("saved.csv").open("w", encoding="cp1252", newline="") as stream:
        csv.writer(stream, delimiter=";", lineterminator="\r\n").writerows(table)
    options = config("saved.csv", "--model", "m", "--prompt", "Shorten: {Caption}", "--limit", 2, "--out", "s.jsonl")
    assert run_config(options) == 0
    captions = [dict(zip(table[0], row, strict=True))["caption"] for row in table[1:3]]
    assert [row["prompt"] for row in rows(Path("s.jsonl")).values()] == [f"Shorten: {text}" for text in captions]


def test_text_files_of_another_suffix(folder: Path) -> None:
    """As kohya's scripts read captions, beside tags in .txt files, which are left alone and may be in the prompt."""
    for file in (folder / "p").glob("*.png"):
        file.with_suffix(".txt").write_text("tag")
    options = ("--format", "caption", "--prompt", "{txt}!")
    assert run_fake(*options)[0] == 0 and run_fake(*options)[1].calls == []
    assert [file.read_text().partition(" ")[2] for file in (folder / "p").glob("*.caption")] == ["tag!"] * 3
    assert {file.read_text() for file in (folder / "p").glob("*.txt")} == {"tag"}
