"""Images per second of caption jobs on the scenes model: the simple loop, one process, two ranks, Ray actors.

    python -m research.job_throughput --count 200 --repeats 3 --systems simple,none-8,none,auto
    python -m research.job_throughput --count 1000 --systems one-thread,ray1,ray2,ranks2

The simple loop is what a user writes first: processor, `generate` in batches of 8, write. Whole commands are timed
(`wall_s`, with loading) and the captioning alone (`images_s`, with Ray's start); `cpu_s` is the processor time of the
command and its children. Systems take turns, `--repeats` times. The last lines are ratios within a turn, medians of
turns: images/s over the simple loop, and whole commands over one process of one thread. `ranks2` is the ceiling of two
Ray actors: two independent processes of one thread, which share the memory's bandwidth and the cache of the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene

SIMPLE_LOOP = """
import sys, time
from pathlib import Path
from PIL import Image
from mmspec.app.modeling.load import load_model
folder, max_new_tokens, out = sys.argv[1:]
model, processor = load_model("scenes")
files, began = sorted(Path(folder).glob("*.png")), time.perf_counter()
with open(out, "w") as rows:
    for start in range(0, len(files), 8):
        images = [Image.open(file).convert("RGB") for file in files[start : start + 8]]
        question = {"type": "text", "text": "Describe the image."}
        chats = [[{"role": "user", "content": [{"type": "image", "image": image}, question]}] for image in images]
        inputs = processor.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=True,
                                               return_tensors="pt", processor_kwargs={"padding": True})
        ids = model.generate(**inputs, max_new_tokens=int(max_new_tokens), do_sample=False)
        texts = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rows.writelines(text + "\\n" for text in texts)
print(f"{len(files) / (time.perf_counter() - began):.3f} images/s", file=sys.stderr)
"""
JOBS: dict[str, tuple[dict[str, str], list[str]]] = {
    "none-8": ({}, ["--drafter", "none", "--batch-size", "8"]),
    "none": ({}, ["--drafter", "none"]),
    "auto": ({}, []),
    "auto-32": ({}, ["--batch-size", "32"]),
    "one-thread": ({"OMP_NUM_THREADS": "1"}, []),
    "ray1": ({}, ["--ray", "--actors", "1"]),
    "ray2": ({}, ["--ray", "--actors", "2"]),
}
"""System -> environment and options of `mmspec caption`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--systems", default="simple,none-8,none,auto")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "pictures"
        pictures.mkdir()
        for number in range(args.count):
            render_scene(generate_scene(900_000 + number)).save(pictures / f"{number:05d}.png")
        names = args.systems.split(",")
        for turn in range(args.repeats):
            for name in names:
                row = measure(name, pictures, args.max_new_tokens, Path(folder) / f"{name}{turn}")
                found.append({"system": name, "turn": turn, "count": args.count, **row})
                print(json.dumps(found[-1]), flush=True)
    for line in ratio_lines(found):
        print(line)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def ratio_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each system against the simple loop and against one process of one thread, by medians over turns."""
    turns = {(row["system"], row["turn"]): row for row in rows}
    systems = list(dict.fromkeys(row["system"] for row in rows))
    for base, key, what in (("simple", "images_s", "images/s"), ("one-thread", "wall_s", "whole command")):
        for system in systems if base in systems else []:
            pairs = [(turns[base, turn][key], row[key]) for (name, turn), row in turns.items() if name == system]
            ratios = sorted(mine / other if key == "images_s" else other / mine for other, mine in pairs)
            yield f"{system}: {median(ratios):.2f}x of {base} [{ratios[0]:.2f}, {ratios[-1]:.2f}] ({what})"


def measure(name: str, pictures: Path, max_new_tokens: int, out: Path) -> dict[str, float]:
    """Times of one run of a system."""
    caption = [sys.executable, "-m", "mmspec", "caption", str(pictures), "--model", "scenes", "--no-progress",
               "--max-new-tokens", str(max_new_tokens), "--out", f"{out}.jsonl"]  # fmt: skip
    if name == "simple":
        commands: list[tuple[dict[str, str], list[str]]] = [
            ({}, [sys.executable, "-c", SIMPLE_LOOP, str(pictures), str(max_new_tokens), str(out)])
        ]
    elif name == "ranks2":
        ranks = [{"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"} for rank in range(2)]
        commands = [(environ, caption) for environ in ranks]
    else:
        commands = [(JOBS[name][0], caption + JOBS[name][1])]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    runs = [
        subprocess.Popen(command, env=os.environ | environ, stderr=subprocess.PIPE, text=True, cwd=pictures)
        for environ, command in commands
    ]
    errors = [run.communicate()[1] for run in runs]
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert all(run.returncode == 0 for run in runs), errors
    rates = [float(re.findall(r"([\d.]+) images/s", text)[-1]) for text in errors]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"images_s": sum(rates), "wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1)}


if __name__ == "__main__":
    main()
