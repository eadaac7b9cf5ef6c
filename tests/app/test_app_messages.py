"""Text of others in messages: nothing that a terminal obeys is printed or logged."""

from __future__ import annotations

import logging
import unicodedata

import pytest
from input_table import line

from mmspec.app.caption.progress import print_stderr
from mmspec.app.cli.main import main
from mmspec.app.io.left_out import LeftOut
from mmspec.messages import one_line, printable

EVIL = "\x1b]0;title\x07\x1b[2J\rmmspec: 0 failed\nfake\x9b31m\u202egnp.\u2028\udcff\x7f\u200b"


def test_what_terminals_obey_is_escaped_and_names_of_people_are_not() -> None:
    shown = printable(EVIL)
    assert shown.startswith(r"\x1b]0;title\x07\x1b[2J\rmmspec: 0 failed\nfake\x9b31m\u202egnp.\u2028\udcff\x7f")
    names = "Fête d'été.jpg", "写真　1.png", "می‌خواهم.jpg", "👨‍👩‍👧.png", "क्‍ष"
    assert [printable(name) for name in names] == list(names)
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(chr(code)) in (
            "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
        ):  # fmt: skip
            assert printable(chr(code)).isascii(), hex(code)
    assert printable("a\tb\nc\x1b", lines=True) == "a\\tb\nc\\x1b"
    long = one_line(ValueError(f"{EVIL} {'x' * 900} got 7"))
    assert len(long) == 300 and " ... x" in long and long.endswith("got 7") and one_line(OSError("\x1b")) == r"\x1b"


@line("a name with terminal escapes, line breaks or marks that reverse the text")
def test_every_way_to_the_terminal(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    print_stderr(f"mmspec: {EVIL}")
    assert main(["caption", f"no{EVIL}.json", "--model", f"m{EVIL}"]) == 2
    assert main(["--debug", "caption", f"no{EVIL}", "--model", "m"]) == 2
    with pytest.raises(SystemExit):
        main(["caption", "--no\x1b]0;x\x07\u202e"])
    found = LeftOut()
    for kind in ("formats", "hidden", "links", "unreadable", "several", "archive_links"):
        found.add(kind, EVIL, where=EVIL)
    for text in found.lines():
        print_stderr(text)
    err = capsys.readouterr().err
    assert err.count(r"\x1b") >= 8 and err.encode("utf-8").isascii() and not set(map(ord, err)) & {*range(10), 13, 27}
    logging.getLogger("mmspec").warning("%s crashed on %s", EVIL, ValueError(EVIL))
    assert caplog.messages == [f"{printable(EVIL)} crashed on {printable(EVIL)}"]
