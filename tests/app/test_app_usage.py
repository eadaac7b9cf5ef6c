"""Wrong usage of every command, in one table: one line, code 2, nothing written, no model loaded."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmspec.app.cli.main import main

MODEL = "no-such-model/of-this-name"
"""That nothing loads, since the line would be another one."""
TINY, NOWHERE = "caption in --model tiny", f"caption in --model {MODEL}"
WRONG: dict[str, tuple[str, ...]] = {
    # command line: what the line says
    "": ("",),
    "dance": ("",),
    "captoin a.png": ("did you mean 'caption'?",),
    "compar": ("did you mean 'compare'?",),
    "bench": ("bench is no command any more: use mmspec compare, or python -m research.bench",),
    "bench --help": ("bench is no command any more",),
    "bench --model tiny": ("bench is no command any more",),
    "env --drafter msd": ("--drafter goes with --model",),
    "compare --model tiny --new-tokens 0": ("",),
    "compare --drafters ' , '": ("must be names separated by commas",),
    "train --out run --drafter msd,eagle3 --set block=4": ("--set block goes with drafters of several tokens per",),
    "train --out run --set blocks=4": ("--set blocks is no setting", "did you mean 'block'?"),
    "train --out run --set block=0": ("--set block must be a whole number above 0, got '0'",),
    "train --out run --set visual_mode=coupld": ("did you mean 'coupled'?",),
    "train --out run --set text_first=maybe": ("--set text_first is true or false, got 'maybe'",),
    "train --out run --block 4": ("--block is no option any more: use --set block=VALUE",),
    "train --out run --answer-batch 4": ("--answer-batch is no option any more: use --batch-size",),
    "train --out run --drafter magic": ("unknown drafter 'magic'; known are ", " msd, "),
    "train --out run --drafter draft-lm": ("draft-lm is not trained any more: ", "drafter=FOLDER"),
    "train --out run --target tiny": ("--target tiny needs --data",),
    "train --out run --target tiny --data nowhere": ("no such file or folder: nowhere",),
    "caption in --model": ("",),
    "caption nowhere --model tiny": ("no such file or folder: nowhere",),
    "caption empty --model tiny": ("no images or videos in",),
    "caption --model tiny --compare in": ("put paths before it",),
    "caption in": ("--model llava-hf/llava-1.5-7b-hf", "--model scenes"),
    "caption in --compare": ("--model llava-hf/llava-1.5-7b-hf", "--model scenes"),
    "caption in --out x.jsonl": ("--model llava-hf/llava-1.5-7b-hf", "--model scenes"),
    "caption in --model no/such/model": ("--model no/such/model: no such folder",),
    "caption in --model no-owner/model": ("cannot load the processor of --model no-owner/model",),
    "caption in --model empty": ("cannot load",),
    f"{TINY} --xyzzy=3": ("unknown option --xyzzy (see",),
    f"{TINY} --formt parquet": ("unknown option --formt; did you mean '--format'?",),
    f"{TINY} --format parqet": ("did you mean 'parquet'?",),
    f"{TINY} --format parquet": ("--format parquet writes a folder of shards: give --out FOLDER",),
    f"{TINY} --drafter hybird": ("did you mean 'hybrid'?",),
    f"{TINY} --drafter ./gone": ("'./gone': no such folder",),
    f"{TINY} --drafter magic": ("unknown drafter 'magic'; known are none, lookup",),
    f"{TINY} --out no/such/folder/x.jsonl": ("no folder",),
    f"{TINY} --out empty": ("is a folder",),
    f"{TINY} --overwrite": ("--overwrite and --retry-errors need --out FILE",),
    f"{TINY} --retry-errors": ("need --out FILE",),
    f"{TINY} --fields foo": ("--fields: no column 'foo'",),
    f"{TINY} --device cuda:99": ("--device cuda:99",),
    f"{TINY} --prompt 'the <image>'": ("must not contain <image>",),
    f"{TINY} --prompt ' '": ("--prompt must not be empty",),
    f"{TINY} --shard 2/2": ("I from 0 to N-1",),
    f"{TINY} --batch-size 0": ("above 0",),
    f"{TINY} --temperature nan": ("0 (greedy) or more",),
    f"{TINY} --top-k 5": ("--top-k is for sampling",),
    f"{NOWHERE} --num-captions 3": ("--num-captions 3 without sampling", "add --temperature 1"),
    f"{NOWHERE} --top-p 0.9": ("--temperature above 0",),
    f"{NOWHERE} --top-k 5": ("--temperature above 0",),
    f"{NOWHERE} --temperature 1 --top-p 1.5": ("at most 1",),
    f"{NOWHERE} --temperature 1 --top-k -1": ("whole number",),
    f"{NOWHERE} --repetition-penalty 0": ("above 0",),
    f"{NOWHERE} --chat-template-kwargs enable_thinking=false": ("JSON object",),
    f"{NOWHERE} --chat-template-kwargs '{{\"tokenize\": false}}'": ("cannot set tokenize",),
    f"{NOWHERE} --system-prompt ' '": ("must not be empty",),
    f"{NOWHERE} --max-pixels 0": ("above 0",),
    f"{NOWHERE} --prompts prompts.txt --prompt one": ("give one of the two",),
    f"{NOWHERE} --prompts prompts.txt --format txt": ("use --format jsonl",),
    f"{NOWHERE} --hide-start": ("--hide-start goes with --start",),
    f"{NOWHERE} --actors 2": ("--actors goes with --ray",),
    f"{NOWHERE} --rows-per-shard 2": ("--rows-per-shard goes with --format parquet or webdataset",),
    f"{NOWHERE} --start ' '": ("--start must not be empty",),
    f"{NOWHERE} --format csv": ("--format csv writes a file: give --out FILE",),
    f"{NOWHERE} --limit 0": ("--limit: must be a whole number above 0",),
    f"{NOWHERE} --fps 0": ("must be frames per second, a number above 0, got '0'",),
    f"{NOWHERE} --fps nan": ("number above 0",),
    f"{NOWHERE} --frames 300": ("at most 256 frames of a clip are read; got --frames 300",),
    f"{NOWHERE} --sampler differing": ("--sampler is no option any more: use --fps",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pictures in `in`, an empty folder, and prompts."""
    found = tmp_path_factory.mktemp("usage")
    for name in ("in", "empty"):
        (found / name).mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 30)).save(found / "in" / name)
    (found / "prompts.txt").write_text("one\ntwo\n")
    return found


@pytest.mark.parametrize("command", WRONG)
def test_wrong_usage_is_one_line_and_code_2(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        code = main([*shlex.split(command), *(["--no-progress"] if " --model " in command else [])])
    except SystemExit as error:  # argparse's way
        code = int(error.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("mmspec: error: ") and err.count("\n") == 1 and len(err) < 330
    assert all(text in err for text in WRONG[command])
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "in", "prompts.txt"]
