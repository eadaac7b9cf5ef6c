"""What `make demo` runs: pictures made here, captioned by the tiny random model, compared with plain `generate`.

Needs no network and no model. Shows the machinery on real files; the words themselves are noise.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mmspec.app.cli import main as mmspec
from mmspec.app.jsonl import Row
from mmspec.app.pictures import write_pictures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; more arguments are passed on to `mmspec caption`. Exit code 0 if all captions are identical."""
    more = list(sys.argv[1:] if argv is None else argv)
    options = ["--model", "tiny", "--max-new-tokens", "48", "--batch-size", "4", "--compare", *more]
    with tempfile.TemporaryDirectory(prefix="mmspec-demo-") as name:
        folder, out = Path(name), Path(name, "captions.jsonl")
        files = write_pictures(folder, 8)
        print(f"{len(files)} pictures made. Running, in their folder:\n")
        print(f"  mmspec caption . --out {out.name} {shlex.join(options)}\n", flush=True)
        code = mmspec(["caption", str(folder), "--out", str(out), *options])
        text = out.read_text(encoding="utf-8") if out.exists() else ""
        show([json.loads(line) for line in text.splitlines()])
    return code


def show(rows: Sequence[Row]) -> None:
    """Print the rows, and what they add up to."""
    print("\nThe model is tiny and its weights are random: its words are noise, and noise cannot be guessed.\n")
    for row in rows:
        verdict = {True: "identical", False: "DIFFERENT", None: ""}[row["identical"]]
        text = row["caption"] if row["error"] is None else row["error"]["message"]
        print(f"{row['file_name']:<50} {row['n_new_tokens'] or 0:>3} tokens  tau {row['tau'] or 0:.2f}  {verdict}")
        print(f"    {text[:100]}{'...' if len(text) > 100 else ''}")
    good = [row for row in rows if row["error"] is None]
    if good:
        tokens, rounds = sum(row["n_new_tokens"] for row in good), sum(row["n_rounds"] for row in good)
        speed, tau = tokens / sum(row["seconds"] for row in good), (tokens - len(good)) / max(1, rounds)
        same = sum(row["identical"] is True for row in good)
        print(f"\n{same} of {len(rows)} captions identical to plain generate, {speed:.0f} tokens/s, tau {tau:.2f}")


if __name__ == "__main__":
    raise SystemExit(main())
