"""The AVX-512 and AMX variants of the C code, run by the instructions that there are.

`python tests/helpers/emulated_avx512.py [arguments of pytest]` compiles few_rows.c with every instruction that this
processor lacks replaced by a function of the same result (emulated_avx512.h, emulated_tiles.h), and runs the tests of
mmspec/cpu (or those named) on it: the variants that are skipped here else. What it cannot show: that a
compiler emits these instructions right, and how fast they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mmspec.cpu import c_library

HEADER = Path(__file__).with_suffix(".h")
TILES = HEADER.with_name("emulated_tiles.h")
TESTS = ("tests/cpu", "tests/targets/test_c_rounds.py", "tests/drafters/heads/test_c_draft.py")
LEFT_OUT = ("-k", "not test_a_library_is_built_from_the_sources_that_were_imported")
TARGET = re.compile(rb"avx512[a-z0-9]+,")
TILES_TARGET = re.compile(rb"amx-[a-z0-9]+,")
ASKED = re.compile(rb'__builtin_cpu_supports\("avx512\w*"\)')
CALLED = re.compile(rb"_mm512_(\w+)")


def emulated_sources(sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same sources {name: text} without AVX-512 instructions.

    Raises:
        ValueError: one calls an instruction that has no emulation.
    """
    header = HEADER.read_bytes()
    own = {name for name in CALLED.findall(header) if b"#define _mm512_" + name in header}
    called = {name for text in sources.values() for name in CALLED.findall(text)} - own
    if missing := sorted(name.decode() for name in called if not re.search(rb"\b(emulated_|, )%b\b" % name, header)):
        raise ValueError(f"{HEADER.name} must have every AVX-512 instruction of the C code; missing are {missing}")
    aliases = b"".join(b"#define _mm512_%b emulated_%b\n" % (name, name) for name in sorted(called))
    found = {name: ASKED.sub(b"1", TARGET.sub(b"", text)) for name, text in sources.items()}
    main = found[c_library.MAIN_SOURCE]
    begin = main.index(b"#define EXPORT")
    found[c_library.MAIN_SOURCE] = main[:begin] + f'#include "{HEADER.name}"\n'.encode() + aliases + main[begin:]
    return found | {HEADER.name: header}


def with_tiles(sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same sources without instructions of AMX."""
    found = {name: TILES_TARGET.sub(b"", text) for name, text in sources.items()}
    begin, main = b"#define EXPORT", found[c_library.MAIN_SOURCE]
    found[c_library.MAIN_SOURCE] = main.replace(begin, f'#include "{TILES.name}"\n'.encode() + begin, 1)
    return found | {TILES.name: TILES.read_bytes()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    level = c_library.processor_level()
    if level < 4:
        c_library.SOURCES.update(with_tiles(c_library.SOURCES))
    if level < 3:
        c_library.SOURCES.update(emulated_sources(c_library.SOURCES))
    c_library.processor_level = lambda: 4
    c_library.FLAGS = ("-O1", *c_library.FLAGS[1:])  # of functions that are inlined thousands of times
    c_library.BUILD_TIMEOUT_S = 3600.0
    return int(pytest.main([*(sys.argv[1:] if argv is None else argv)] or ["-q", *LEFT_OUT, *TESTS]))


if __name__ == "__main__":
    raise SystemExit(main())
