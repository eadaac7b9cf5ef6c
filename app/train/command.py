"""`mmspec train`: a draft head for a target, from requests alone. Goes on where it was cut."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from mmspec.app.caption.command import MODELS, positive, quiet
from mmspec.app.caption.config import DTYPES, MODEL, Place
from mmspec.app.errors import UsageError, one_line
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.app.train.heads import RECIPES, config_of, kept_of, parts_of
from mmspec.app.versions import commit, mmspec_version, version

RULES = ("decoupled", "coupled", "placeholder", "text_only")
RUN = "run.json"
"""Tells what the answers in a folder are of."""

EPILOG = """\
drafters
  msd             visual tokens enter as their projected embeddings alone (MSD)
  eagle           visual tokens are fused with the target's states like text (EAGLE-2)
  eagle-textual   no visual tokens at all: only the text, with the target's states
  eagle-blind     visual tokens are placeholders (EAGLE as it is for text)
  flash           5 tokens from one pass, by a wide feed-forward (FLASH), each corrected by the word before it
  flash-free      the same without the correction, as in the paper
  parallel        5 tokens from one pass over learned rows, each corrected by the word before it (ParallelSpec, Hydra)
  parallel-free   the same without the correction
  falcon          2 tokens from every pass, several passes (Falcon)
  Several, with commas, learn side by side from the same teacher: the dear part is done once.

data
  For --target scenes the requests come from the scenes world (--count of them). Else --data names pictures, folders or
  manifests as `mmspec caption` reads them; a manifest may bring "prompt" and "answer" per row. Where there is no answer
  the target gives its own, so that the drafter learns the target's words. They are kept in OUT/answers.jsonl. The last
  of the requests (--evaluate of them, a tenth of all at most) are never learned from: tau is measured on them.

OUT holds answers.jsonl, run.json (what they are answers to), state.pt (the checkpoint), log.jsonl, curves.png if
matplotlib is there, and at the end a folder per drafter with config.json, model.safetensors and provenance.json:
`mmspec.patch(model, drafter="OUT/msd")`.
Run the same command again to go on after a cut.

examples
  mmspec train --out run                                       msd for the scenes model
  mmspec train --drafter msd,eagle,eagle-textual --steps 600 --out study
  mmspec train --target llava-hf/llava-1.5-7b-hf --data photos/ --dtype bfloat16 --out run
  mmspec train --drafter flash --compressor latent:64 --out run
  mmspec train --start-from msd --steps 500 --out run          on from the one that ships
  accelerate launch --num_processes 4 -m mmspec train --target ... --data ... --out run     each takes a part of a batch
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "train",
        parents=[common],
        help="train a drafter for a model",
        description="Train draft heads on a target's own answers and states.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument_group("what").add_argument
    add("--target", default=MODEL, metavar="M", help=MODELS)
    add("--drafter", type=kinds, default=["msd"], metavar="D,D", help=f"of {', '.join(RECIPES)} (default msd)")
    add(
        "--data", nargs="+", default=[], metavar="PATH", help="pictures, folders, manifests (default: the scenes world)"
    )
    add("--out", type=Path, required=True, metavar="FOLDER", help="of the run")
    add("--dtype", default="auto", choices=DTYPES, help="of the target; default as for caption")
    add("--device", default="auto", metavar="DEV", help="default auto: the GPU if there is one")
    how = parser.add_argument_group("how")
    add = how.add_argument
    add("--count", type=positive, default=2000, metavar="N", help="requests of the scenes world (default 2000)")
    add("--first-seed", type=int, default=10_000_000, metavar="S", help="of the scenes (default 10,000,000)")
    add("--max-new-tokens", type=positive, default=160, metavar="N", help="of an answer (default 160)")
    add("--steps", type=positive, default=1000, metavar="N", help="default 1000")
    add("--batch-size", type=positive, default=16, metavar="N", help="texts in a step (default 16)")
    add("--answer-batch", type=positive, default=None, metavar="N", help="texts answered at once (default: a step's)")
    add("--keep-states", type=float, default=4.0, metavar="GIB", help="of the target's states in memory (default 4)")
    add("--lr", type=float, default=1e-3, metavar="R", help="highest learning rate (default 1e-3)")
    add("--states-weight", type=float, default=1.0, metavar="W", help="of smooth L1 on the states (default 1)")
    add("--words-weight", type=float, default=0.1, metavar="W", help="of soft cross-entropy (default 0.1)")
    add("--rollout", type=int, default=2, metavar="N", help="further steps over the head's own outputs (default 2)")
    text = how.add_mutually_exclusive_group().add_argument
    text("--text-first", action="store_true", help="MSD's schedule: text alone for half the steps, then more pictures")
    text("--text-only", action="store_true", help="questions without their pictures in all steps")
    add("--noise", type=float, default=0.0, metavar="W", help="width of noise on the states (EAGLE: 0.2; default 0)")
    add("--ffn", type=positive, default=None, metavar="N", help="width of the feed-forward (default: the target's)")
    add("--block", type=positive, default=None, metavar="K", help="tokens of a pass (flash, parallel: 5; falcon: 2)")
    add(
        "--rule",
        default=None,
        type=visual_mode,
        choices=RULES,
        help="how visual tokens enter the head (default: as the drafter defines)",
    )
    add("--compressor", type=shrinking, default=None, metavar="NAME:N", help="show it N visual tokens (latent:64)")
    add("--start-from", metavar="FOLDER", help="go on from trained weights: a run's folder, a drafter's, or one's name")
    add("--draft-vocab", type=positive, default=None, metavar="N", help="draft the N commonest ids only (VocabTrim)")
    add("--evaluate", type=natural, default=24, metavar="N", help="requests to measure tau on (default 24; 0 none)")
    add("--seed", type=int, default=0, metavar="N")
    add("--minutes", type=float, default=math.inf, metavar="T", help="stop after this long; run again to go on")
    add("--progress", action=argparse.BooleanOptionalAction, default=None, help="default: if on a terminal")


def natural(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, got {text!r}")
    return int(text)


def visual_mode(text: str) -> str:
    """A visual mode; the names of the first release are accepted."""
    return {"blind": "placeholder", "textual": "text_only"}.get(text, text)


def kinds(text: str) -> list[str]:
    """Comma-separated drafters."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in RECIPES:
            raise argparse.ArgumentTypeError(f"unknown drafter {name!r}; known are {', '.join(RECIPES)}")
    return list(dict.fromkeys(names))


def shrinking(text: str) -> str:
    """A compressor and how many tokens it keeps."""
    from mmspec.vision.registry import parse

    try:
        parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from mmspec.app.modeling.load import load
    from mmspec.app.train.data import Teacher, WithText

    quiet(args.progress)
    place = Place.of(os.environ)
    if args.batch_size % place.world:
        raise UsageError(f"--batch-size {args.batch_size} cannot be shared by {place.world} processes")
    data, held = data_of(args)
    meet, party = party_of(args, place)
    model, processor = load(args.target, args.dtype, args.device, place.local)
    model.requires_grad_(False)
    room = round(args.keep_states * (1 << 30)) // place.world
    teacher = Teacher(model, processor, WithText(data) if args.text_first or args.text_only else data, room)
    asked = asked_of(args, data, held)
    facts = asked | facts_of(args)
    training = training_of(args, teacher, len(data), facts, party)  # first: it may refuse, and answers take long
    items = {"items": data.data.digest} if args.data else {}  # a folder may have got other pictures since
    begin(args.out, asked | items, party)
    since = len(data) if args.text_only else 0
    with bar(args, len(teacher.data) - since, "answers", "text") as shown:
        batch, share = args.answer_batch or args.batch_size, (party.rank, party.world_size)
        teacher.answer_all(args.out, batch, args.max_new_tokens, shown.update, share, since)
    meet()
    teacher.read_answers(args.out)
    with bar(args, args.steps, "train", "step") as shown:
        shown.update(training.step)

        def tick(figures: dict[str, float]) -> None:
            shown.set_postfix({k: f"{v:.3f}" for k, v in list(figures.items())[1:4]}, refresh=False)
            shown.update(1)

        done = training.run(60 * args.minutes, on_step=tick)
    if party.rank:
        return 0
    curves(args.out)
    if not done:
        print(f"stopped after {training.step} of {args.steps} steps; run again to go on")
        return 0
    if args.evaluate and not len(held):
        print(f"mmspec: tau is not measured: of {len(data)} requests none can be kept back for it", file=sys.stderr)
    for name, pupil in training.draft_models.items():
        folder = args.out / name
        export(args, folder, pupil, teacher, facts)
        figures = evaluate(args, folder, teacher, held) if len(held) else {}
        print(folder, *(f"{key} {value}" for key, value in figures.items() if key == "tau"))
    return 0


def asked_of(args: argparse.Namespace, data: Any, held: Any) -> dict[str, Any]:
    """The settings that decide what is answered, by which answers can be used again."""
    asked = {"target": args.target, "data": list(args.data), "count": len(data), "first_seed": args.first_seed}
    asked |= {"max_new_tokens": args.max_new_tokens}
    return asked | ({"held_back": len(held)} if args.data and len(held) else {})


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Further settings that must be the same for a run to go on; what is new is told only where it is used."""
    facts: dict[str, Any] = {"text_first": args.text_first}
    facts |= {"text_only": True} if args.text_only else {}
    return facts | ({} if args.start_from is None else {"start_from": args.start_from})


def begin(folder: Path, asked: dict[str, Any], party: Any) -> None:
    """Note in the folder what its answers are of, or refuse to mix them with those of another run."""
    import json

    from mmspec.app.io.jsonl import replace
    from mmspec.drafters.training.trainer import SettingsError, check_resume

    file = folder / RUN
    if not file.exists():
        if not party.rank:
            replace(file, json.dumps(asked, indent=1).encode() + b"\n")
        return
    try:
        check_resume(folder, json.loads(file.read_text(encoding="utf-8")), asked)
    except SettingsError as error:
        raise UsageError(str(error)) from error


def party_of(args: argparse.Namespace, place: Place) -> tuple[Any, Any]:
    """(wait for everyone, who trains together), as `accelerate launch` has set it up."""
    from mmspec.drafters.training.trainer import DistributedContext

    if place.world == 1:
        return (lambda: None), DistributedContext()
    from accelerate import PartialState
    from accelerate.utils import reduce

    state = PartialState(cpu=args.device == "cpu")
    return state.wait_for_everyone, DistributedContext(place.rank, place.world, lambda value: reduce(value, "mean"))


def training_of(args: argparse.Namespace, teacher: Any, count: int, facts: dict[str, Any], party: Any) -> Any:
    """The run in the folder, begun or gone on with."""
    import torch

    from mmspec.app.train.data import Order, share_of_pictures
    from mmspec.drafters.training.batch import DraftModel
    from mmspec.drafters.training.losses import LossWeights
    from mmspec.drafters.training.trainer import SettingsError, TrainConfig, Trainer
    from mmspec.interfaces import SharedEmbeddings

    model = teacher.model
    words = SharedEmbeddings(model.get_input_embeddings(), model.get_output_embeddings())
    config = config_of(model, args.ffn)
    pupils = {}
    for name in args.drafter:
        recipe, (head, shrinks) = RECIPES[name], parts_of(args, name, config, teacher)
        pupils[name] = DraftModel(head, args.rule or recipe.rule, recipe.kind, shrinks)
        pupils[name].modules().to(model.device)
    weights = LossWeights(args.states_weight, args.words_weight, args.rollout)
    plan = TrainConfig(args.steps, args.batch_size, args.lr, hidden_noise=args.noise, seed=args.seed, weights=weights)
    placeholder = words.embed_tokens(torch.tensor(teacher.placeholders[0], device=model.device)).float()

    order = Order(count, plan.batch_size, plan.seed, teacher.sizes)

    def lesson(step: int) -> Any:
        shown = share_of_pictures(step / plan.max_steps) if args.text_first else float(not args.text_only)
        return teacher.lesson(order.numbers(step, shown)[party.rank :: party.world_size])

    try:
        return Trainer(args.out, pupils, plan, words, lesson, placeholder, facts, party)
    except SettingsError as error:
        raise UsageError(str(error)) from error


def data_of(args: argparse.Namespace) -> tuple[Any, Any]:
    """(requests to learn from, others to measure on)."""
    from mmspec.app.train.data import FileData, Part, ScenesData

    if args.data:
        whole = FileData(args.data)
        last = len(whole) - min(args.evaluate, len(whole) // 10)
        return Part(whole, range(last)), Part(whole, range(last, len(whole)))
    if args.target != MODEL:
        raise UsageError(f"--target {args.target} needs --data: pictures, folders or manifests")
    if args.first_seed + 2 * args.count > FIRST_HELD_OUT_SEED:
        raise UsageError(
            f"seeds from {FIRST_HELD_OUT_SEED} on are held out: --first-seed {args.first_seed} is too high"
        )
    return ScenesData(args.count, args.first_seed), ScenesData(args.evaluate, FIRST_HELD_OUT_SEED)


def export(args: argparse.Namespace, place: Path, pupil: Any, teacher: Any, facts: dict[str, Any]) -> None:
    """The head with its config, and how it came to be."""
    import json

    from mmspec.drafters.checkpoints.format import HeadMetadata, save_head

    model = teacher.model
    family = teacher.family
    made = HeadMetadata(
        pupil.head.config,
        pupil.visual_mode,
        family.num_layers,
        family.model_type,
        teacher.fingerprint,
        teacher.commonest(args.draft_vocab) if args.draft_vocab else None,
        facts={"target": named(args.target)},
        architecture=pupil.architecture,
        compressor=kept_of(pupil.compressor),
    )
    save_head(place, pupil.head, made)
    provenance = {
        "command": args.command,
        "seed": args.seed,
        "mmspec": mmspec_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "commit": commit(),
        "device": model.device.type,
    }
    (place / "provenance.json").write_text(json.dumps(provenance | facts, indent=1) + "\n", encoding="utf-8")


def named(target: str) -> str:
    """A target's name, of a folder the last part: where it lies on this machine is nobody's business."""
    return os.path.basename(os.path.abspath(target)) if os.path.isdir(target) else target


def evaluate(args: argparse.Namespace, place: Path, teacher: Any, held: Any) -> dict[str, Any]:
    """Decode held-out requests with the drafter: tau, and the share of rounds that go on at each depth."""
    import json

    import mmspec

    mmspec.patch(teacher.model, str(place), processor=teacher.maker.processor, nodes=16)
    try:
        for number in range(len(held)):
            one = held[number]
            inputs = teacher.maker.inputs([one.shown], [one.question])
            teacher.model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
        stats = mmspec.stats(teacher.model)
    finally:
        mmspec.unpatch(teacher.model)
    figures = {
        "requests": len(held),
        "held_out": True,
        "nodes": 16,
        "tau": round(stats.tau, 3),
        "kept_at_depth": [round(share, 3) for share in stats.acceptance_by_depth],
    }
    (place / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def bar(args: argparse.Namespace, total: int, what: str, unit: str) -> Any:
    """A progress bar on standard error."""
    from tqdm import tqdm

    hide = not (sys.stderr.isatty() if args.progress is None else args.progress)
    hide = hide or Place.of(os.environ).rank > 0
    return tqdm(total=total, desc=what, unit=unit, disable=hide, file=sys.stderr)


def curves(out: Path) -> None:
    """The log as a picture, if matplotlib is there."""
    try:
        from mmspec.app.bench.plot import plot_log
    except ImportError:
        return
    try:
        plot_log(out / "log.jsonl", out / "curves.png")
    except Exception as error:  # a picture is no reason to lose a training
        print(f"mmspec: no curves.png: {one_line(error)}", file=sys.stderr)


__all__ = ["add_parser", "run"]
