"""`python -m mmspec.app.scenes.train`: from nothing to the weights of the scenes model.

Three stages. *see*: the vision tower alone learns to say per patch what is there. *talk*: with the tower slowed to a
tenth, the projector and the lower half of the text model learn to answer; further losses ask that each visual token
says the name of the thing it belongs to, read by the model's own head, and by heads that are thrown away where that
thing is, how large, whether its centre is here, and how a sign is spelled; and that after a few layers each word of a
text that names a thing says where that is. That saves the text model from having to find it out by itself, and what a
word has found out early, the layers above can read: so questions by name are answered.
*settle*: the upper half is added, gently, and the rate falls to nothing.

Sample n is the same in every run, and a run that is cut goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from mmspec.app.scenes import SUMS, sums_of
from mmspec.app.scenes.atlas import LETTERS
from mmspec.app.scenes.card import FACTS, write_card
from mmspec.app.scenes.data import CLASSES, GROUND, IGNORE, LONGEST, MEANINGS, SIGN, Looking, Talking, collate, corpus
from mmspec.app.scenes.kinds import KINDS
from mmspec.app.scenes.model import LOWER, new_model, processor_of, train_tokenizer
from mmspec.app.scenes.world import COLOURS, SIZES, TEXTURES
from mmspec.app.versions import version

EPILOG = """\
The folder holds state.pt (the checkpoint), log.jsonl, the tokenizer, tower.safetensors after the first stage and, at
the end, the model in bfloat16. Run the same command again to go on after a cut; other settings in the same folder are
refused.

examples
  python -m mmspec.app.scenes.train --out run            # all stages, hours on a few cores
  python -m mmspec.app.scenes.train --out run --minutes 40   # as far as that, then stop; go on later
"""


@dataclass(frozen=True)
class Stage:
    """One part of the training.

    Attributes:
        first: the seed of its first sample. eyes: learning rate of the tower, in shares of `rate`; 0 freezes it.
        last: the learning rate falls to this share of `rate`. named: weight of the losses on visual tokens.
        layers: how many layers of the text model are there; those that are added later begin as doing nothing, so that
            much is learned at a fraction of the cost.
        upper: learning rate of the layers from `LOWER` on, in shares of `rate`. Their first steps are large and blind.
        clips: share of the batches that are clips, which are several times as long.
    """

    name: str
    steps: int
    batch: int
    rate: float
    first: int
    warmup: int = 100
    eyes: float = 0.0
    last: float = 0.02
    named: float = 0.3
    layers: int = 10
    upper: float = 1.0
    clips: float = 0.1


STAGES = (
    Stage("see", 5000, 32, 1e-3, first=0, eyes=1.0),
    Stage("talk", 1400, 16, 1e-3, first=1_000_000, last=0.3, layers=LOWER, eyes=0.1, clips=0.04),
    Stage("settle", 700, 16, 4e-4, first=3_000_000, warmup=20, named=0.2, eyes=0.04, upper=0.3, clips=0.06),
)


ASKED = {"bulk": (), "place": (), "centre": (), "letter": (), "spelled": (LONGEST,)}
"""What a patch of the tower, and later each visual token, is asked besides its kind -> how many questions that is."""
ANSWERS = {"bulk": len(SIZES), "place": 9, "centre": 2, "letter": len(LETTERS) + 1, "spelled": len(LETTERS) + 1}
READ = 3
"""After so many layers of the text model words are asked what they know: those above can read it from them, and what a
word finds out in the last layer, no later word can read."""


def head_of(name: str, width: int) -> nn.Linear:
    """What answers one of the questions of `ASKED`."""
    return nn.Linear(width, math.prod(ASKED[name]) * ANSWERS[name])


def asked(name: str, said: Tensor, answers: Tensor) -> Tensor:
    """The loss of what such a head said: [n, questions x answers], [n, *questions]; 0 if nothing is known.

    Centres are rare, so they count more.
    """
    if not (answers != IGNORE).any():
        return said.new_zeros(())
    weight = said.new_tensor((1.0, 8.0)) if name == "centre" else None
    said = said.reshape(-1, ANSWERS[name])
    return functional.cross_entropy(said, answers.flatten(), weight, ignore_index=IGNORE)


class Eyes(nn.Module):
    """The tower with heads that say what each patch shows. The heads are thrown away afterwards."""

    def __init__(self, tower: Any, width: int) -> None:
        super().__init__()
        self.tower = tower
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleDict({name: head_of(name, width) for name in ASKED})
        self.heads.update({"kind": nn.Linear(width, CLASSES), "offset": nn.Linear(width, 2)})
        self.ground = nn.ModuleDict(
            {"colour": nn.Linear(width, len(COLOURS)), "texture": nn.Linear(width, len(TEXTURES))}
        )

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss, and figures for the log."""
        states = self.tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-1]
        states = self.norm(states.float())
        said = {name: head(states) for name, head in self.heads.items()}
        kind = batch["kind"]
        thing = (kind >= 0) & (kind < GROUND)
        owned, sign = (kind >= 0) & (kind != GROUND), kind == SIGN
        losses = {
            "kind": functional.cross_entropy(said["kind"].flatten(0, 1), kind.flatten(), ignore_index=IGNORE),
            "offset": functional.smooth_l1_loss(said["offset"][owned], batch["offset"][owned], beta=0.1),
            "letter": functional.cross_entropy(said["letter"][sign], batch["letter"][sign]) if sign.any() else 0.0,
        }
        for name in ("bulk", "place", "centre", "spelled"):
            losses[name] = asked(name, said[name].flatten(0, 1), batch[name].flatten(0, 1))
        pooled = states.mean(1)
        for name, head in self.ground.items():
            losses[name] = functional.cross_entropy(head(pooled), batch[name])
        weights = {"kind": 1.0, "offset": 2.0, "bulk": 0.3, "letter": 0.5, "colour": 0.2, "texture": 0.2}
        weights |= {"place": 0.3, "centre": 0.5, "spelled": 0.5}
        loss = torch.stack([weights[name] * torch.as_tensor(part) for name, part in losses.items()]).sum()
        with torch.no_grad():
            right = (said["kind"].argmax(-1) == kind)[thing].float().mean()
            read = (said["letter"].argmax(-1) == batch["letter"])[sign].float().mean() if sign.any() else torch.nan
        figures = {"things": float(right), "letters": float(read)}
        return loss, figures | {name: float(torch.as_tensor(part).detach()) for name, part in losses.items()}


class Mouth(nn.Module):
    """The whole model, learning to answer. The tower's gradient is cut unless it is to learn."""

    def __init__(self, model: Any, names: Tensor, stage: Stage) -> None:
        """
        Args:
            names: [kinds] the token that begins each kind's name.
        """
        super().__init__()
        self.names: Tensor
        self.model, self.named, self.frozen, self.layers = model, stage.named, stage.eyes == 0, stage.layers
        self.register_buffer("names", names, persistent=False)
        width = model.config.text_config.hidden_size
        self.heads = nn.ModuleDict({name: head_of(name, width) for name in ASKED})
        self.heads["about"] = nn.Linear(width, MEANINGS)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss, and figures for the log."""
        core = self.model.model
        text = core.language_model
        with torch.set_grad_enabled(not self.frozen):
            states = core.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-1]
        visual = core.multi_modal_projector(states)
        embedded = core.get_input_embeddings()(batch["input_ids"])
        place = batch["input_ids"] == self.model.config.image_token_index
        embedded = embedded.masked_scatter(place[:, :, None], visual.to(embedded.dtype))
        early, hidden = self._read(text, embedded)
        labels = batch["labels"][:, 1:]
        learn = labels != IGNORE
        logits = self.model.lm_head(hidden[:, :-1][learn]).float()
        told = functional.cross_entropy(logits, labels[learn])
        kinds = batch["kind"]
        thing = (kinds >= 0) & (kinds < GROUND)
        read = self.model.lm_head(visual[thing]).float()
        names = self.names[kinds[thing]]
        named = functional.cross_entropy(read, names)
        with torch.no_grad():
            right = (logits.argmax(-1) == labels[learn]).float()
            is_name = torch.isin(labels[learn], self.names)
            figures = {
                "told": float(told.detach()),
                "named": float(named.detach()),
                "tokens": float(right.mean()),
                "names": float(right[is_name].mean()) if is_name.any() else math.nan,
                "patches": float((read.argmax(-1) == names).float().mean()),
            }
        further = torch.stack([self._asked(name, visual, batch[name], kinds) for name in ASKED]).sum()
        figures["asked"] = float(further.detach())
        # Every word that names a thing says where that is: questions need to find by name, and text teaches that late.
        where = batch["about"]
        meant = self.heads["about"](early[where != IGNORE]).float()
        found = functional.cross_entropy(meant, where[where != IGNORE]) if len(meant) else told.new_zeros(())
        if len(meant):
            figures["about"] = float((meant.argmax(-1) == where[where != IGNORE]).float().mean())
        return told + self.named * (named + further + found), figures

    def _read(self, text: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What the text model has found out after `READ` layers and after all, both normed; [B, n, D]."""
        every, norm = text.layers, text.norm
        try:  # padded on the right: what is causal needs no mask
            if self.layers > READ:
                text.layers, text.norm = every[:READ], nn.Identity()
                rows = text(inputs_embeds=rows).last_hidden_state
            text.layers, text.norm = every[READ if self.layers > READ else 0 : self.layers], norm
            hidden = text(inputs_embeds=rows).last_hidden_state
        finally:
            text.layers, text.norm = every, norm
        return (norm(rows) if self.layers > READ else hidden), hidden

    def _asked(self, name: str, visual: Tensor, answers: Tensor, kinds: Tensor) -> Tensor:
        """The loss on what visual tokens say of their patches besides the name, by heads that are thrown away."""
        if name == "letter":  # there are none but on signs
            answers = answers.masked_fill(kinds != SIGN, IGNORE)
        known = (answers != IGNORE).flatten(2).any(-1) if answers.ndim > 2 else answers != IGNORE
        return asked(name, self.heads[name](visual[known]).float(), answers[known])


def rate_at(stage: Stage, step: int) -> float:
    """Warm-up, then a cosine down to the last."""
    if step < stage.warmup:
        return stage.rate * (step + 1) / stage.warmup
    done = (step - stage.warmup) / max(1, stage.steps - stage.warmup)
    return stage.rate * (stage.last + (1 - stage.last) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def share_of(name: str, stage: Stage) -> float:
    """The learning rate of a weight, in shares of the stage's."""
    if "vision_tower" in name or name.startswith("tower"):
        return stage.eyes
    layer = re.search(r"language_model\.layers\.(\d+)\.", name)
    return stage.upper if layer is not None and int(layer[1]) >= LOWER else 1.0


class Optimisers:
    """Muon for the matrices of the layers, AdamW for all else; the tower's share of the learning rate may be smaller.

    Muon (K. Jordan et al. 2024, scaled as in arXiv 2502.16982) makes the update of a matrix orthogonal; it needs fewer
    steps than AdamW at the same rates.
    """

    def __init__(self, stage: Stage, part: nn.Module) -> None:
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for name, weight in part.named_parameters():
            share = share_of(name, stage)
            weight.requires_grad_(share > 0)
            if share:
                groups.setdefault((weight.ndim == 2 and ".layers." in name, share), []).append(weight)
        made: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for (matrix, share), weights in groups.items():
            made[matrix].append({"params": weights, "share": share})
        self.all: list[torch.optim.Optimizer] = [
            torch.optim.Muon(made[True], lr=stage.rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(made[False], lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.02),
        ]

    def step(self, rate: float) -> None:
        """One step at this learning rate."""
        for optimiser in self.all:
            for group in optimiser.param_groups:
                group["lr"] = rate * group["share"]
            optimiser.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimiser in self.all:
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps."""
        return [optimiser.state_dict() for optimiser in self.all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint."""
        for optimiser, state in zip(self.all, states, strict=True):
            optimiser.load_state_dict(state)


def _heads_of(part: nn.Module) -> dict[str, Tensor]:
    """The weights that are trained along and thrown away."""
    return {n: value for n, value in part.state_dict().items() if n.split(".")[0] in ("heads", "ground", "norm")}


class Training:
    """One run in a folder: knows where it is, does a step, writes checkpoints."""

    def __init__(
        self,
        out: Path,
        stages: Sequence[Stage],
        device: str,
        seed: int,
        make: Callable[[int], Any] = new_model,
        compiled: bool = False,
    ) -> None:
        """
        Args:
            seed: of the first weights. make: makes the model from it.
            compiled: give the layers of the text model to torch.compile; a quarter faster after a minute or two.
        """
        self.compiled = compiled
        self.out, self.stages, self.device, self.seed = out, tuple(stages), torch.device(device), seed
        out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = self._tokenizer()
        self.model = make(seed).to(self.device)
        if self.device.type == "cpu":  # faster there, backward above all
            self.model.set_attn_implementation({"vision_config": "eager"})
        self.at, self.step = 0, 0
        self.heads: dict[str, Tensor] = {}
        self._optimiser_state: list[dict[str, Any]] | None = None
        if (out / "state.pt").exists():
            self._resume()
        self.started = time.monotonic()

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if (self.out / "tokenizer.json").exists():
            return AutoTokenizer.from_pretrained(self.out)
        made = train_tokenizer(corpus(6000))
        made.save_pretrained(self.out)
        return made

    def _resume(self) -> None:
        state = torch.load(self.out / "state.pt", map_location=self.device, weights_only=True)
        if state["stages"] != [asdict(stage) for stage in self.stages] or state["seed"] != self.seed:
            raise SystemExit(f"{self.out} holds a run with other settings; name another folder with --out")
        self.model.load_state_dict(state["model"])
        self.at, self.step, self.heads = state["at"], state["step"], state["heads"]
        self._optimiser_state = state["optimiser"]

    def save(self, heads: dict[str, Tensor], optimiser: Optimisers | None) -> None:
        """Write the checkpoint under another name first, so that a cut never leaves half of one."""
        state = {
            "stages": [asdict(stage) for stage in self.stages],
            "seed": self.seed,
            "at": self.at,
            "step": self.step,
            "model": self.model.state_dict(),
            "heads": heads,
            "optimiser": optimiser.state_dict() if optimiser is not None else None,
        }
        torch.save(state, self.out / "state.tmp")
        os.replace(self.out / "state.tmp", self.out / "state.pt")

    def part(self, stage: Stage) -> nn.Module:
        """What is trained in a stage."""
        if stage.name == "see":
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.seed)
                eyes = Eyes(self.model.model.vision_tower, self.model.config.vision_config.hidden_size)
            eyes.to(self.device)
            if self.heads:
                eyes.load_state_dict(self.heads, strict=False)
            return eyes
        names = [self.tokenizer(" " + kind.name, add_special_tokens=False).input_ids[0] for kind in KINDS]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            mouth = Mouth(self.model, torch.tensor(names), stage)
        mouth.to(self.device)
        if self.compiled:
            for layer in self.model.model.language_model.layers[: stage.layers]:
                layer.compile(dynamic=True)
        if self.heads:
            mouth.load_state_dict(self.heads, strict=False)
        return mouth

    def optimiser(self, stage: Stage, part: nn.Module) -> Optimisers:
        """A fresh one, or the one that was saved."""
        made = Optimisers(stage, part)
        if self._optimiser_state is not None:
            made.load_state_dict(self._optimiser_state)
            self._optimiser_state = None
        return made

    def batches(self, stage: Stage) -> Iterator[dict[str, Tensor]]:
        """From the current step to the stage's last."""
        first, count = stage.first + self.step * stage.batch, (stage.steps - self.step) * stage.batch
        workers = 1 if (os.cpu_count() or 1) < 8 else 6
        data: Any = (
            Looking(first, count)
            if stage.name == "see"
            else Talking(self.tokenizer, first, count, stage.batch, stage.clips)
        )
        loader = DataLoader(
            data,
            stage.batch,
            num_workers=workers,
            collate_fn=None if stage.name == "see" else collate,
            prefetch_factor=4,
            drop_last=True,
        )
        yield from loader

    def run(self, seconds: float, progress: bool, every: float = 240.0) -> bool:
        """Train until all is done (True) or the time is up (False)."""
        from tqdm import tqdm

        while self.at < len(self.stages):
            stage = self.stages[self.at]
            part = self.part(stage)
            optimiser = self.optimiser(stage, part)
            saved = time.monotonic()
            with tqdm(
                total=stage.steps, initial=self.step, desc=stage.name, disable=not progress, file=sys.stderr
            ) as bar:
                for batch in self.batches(stage):
                    figures = self._step(stage, part, optimiser, batch)
                    self.step += 1
                    bar.update()
                    bar.set_postfix({name: f"{value:.3f}" for name, value in list(figures.items())[:4]})
                    if self.step % 20 == 0:
                        self._log({"stage": stage.name, "step": self.step, **figures})
                    over = time.monotonic() - self.started > seconds
                    if over or time.monotonic() - saved > every:
                        self.save(_heads_of(part), optimiser)
                        saved = time.monotonic()
                    if over:
                        return False
            optimiser.zero_grad()  # or the next stage would clip by gradients that are none of its own
            if stage.name == "see":
                self._keep_tower()
            self.at, self.step = self.at + 1, 0
            self.heads = {} if stage.name == "see" else _heads_of(part)  # the tower's are of another width
            self._optimiser_state = None
            self.save(self.heads, None)
        return True

    def _keep_tower(self) -> None:
        """In a file of its own, for `begin_with_tower`."""
        tower = self.model.model.vision_tower
        rounded = {name: value.to(torch.bfloat16).contiguous() for name, value in tower.state_dict().items()}
        save_file(rounded, self.out / "tower.safetensors", metadata={"format": "pt"})

    def begin_with_tower(self, file: Path) -> None:
        """Leave out the first stage: the tower was trained before."""
        if (self.at, self.step) == (0, 0):
            tower = {name: value.float() for name, value in load_file(file).items()}
            self.model.model.vision_tower.load_state_dict(tower)
            self.at = 1

    def begin_with_model(self, folder: Path, stage: str) -> None:
        """Take the weights of an exported model, and begin with that stage."""
        if (self.at, self.step) == (0, 0):
            from transformers import LlavaForConditionalGeneration

            # Read by transformers, since the names in the file are not those in the model.
            made = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
            self.model.load_state_dict(made.state_dict())
            self.at = [one.name for one in self.stages].index(stage)

    def _step(self, stage: Stage, part: nn.Module, optimiser: Optimisers, batch: dict[str, Tensor]) -> dict[str, float]:
        began = time.monotonic()
        rate = rate_at(stage, self.step)
        part.train()
        batch = {name: value.to(self.device) for name, value in batch.items()}
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss, figures = part(batch)
        optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([w for w in part.parameters() if w.grad is not None], 1.0)
        if torch.isfinite(norm):
            optimiser.step(rate)
        return figures | {
            "loss": float(loss.detach()),
            "norm": float(norm),
            "rate": rate,
            "s": time.monotonic() - began,
        }

    def _log(self, row: dict[str, Any]) -> None:
        row = {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def export(self, folder: Path) -> None:
        """The model in bfloat16 on disk and float32 in use, with its processor, a card and checksums."""
        rounded = {name: value.to(torch.bfloat16) for name, value in self.model.state_dict().items()}
        self.model.load_state_dict({name: value.float() for name, value in rounded.items()})
        self.model.eval().to(torch.bfloat16).save_pretrained(folder)
        self.model.to(torch.float32)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for part in (config, config["text_config"], config["vision_config"]):
            part["dtype"] = "float32"
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        processor_of(self.tokenizer).save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
        facts = {
            "command": "python -m mmspec.app.scenes.train --out run",
            "seed": self.seed,
            "torch": str(torch.__version__),
            "transformers": version("transformers"),
            "stages": [asdict(stage) for stage in self.stages],
        }
        (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        write_card(folder, sum(weight.numel() for weight in self.model.parameters()))
        (folder / SUMS).write_text(json.dumps(sums_of(folder), indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mmspec.app.scenes.train",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the run")
    add("--minutes", type=float, default=math.inf, help="stop after this long; run again to go on")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0, help="of the first weights")
    add("--tower", type=Path, help="tower.safetensors of an earlier run: leave out the stage that makes it")
    names = [stage.name for stage in STAGES]
    add("--model", type=Path, help="folder of an exported model: begin with its weights, at --stage")
    add("--stage", choices=names, default=names[-1], help=f"with --model (default {names[-1]})")
    add("--compile", action="store_true", help="a quarter faster after a minute or two; needs a C++ compiler")
    add("--scale", type=float, default=1.0, help="share of the steps of every stage (1)")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    args = parser.parse_args(argv)
    stages = [Stage(**(asdict(stage) | {"steps": max(1, round(stage.steps * args.scale))})) for stage in STAGES]
    training = Training(args.out, stages, args.device, args.seed, compiled=args.compile)
    if args.tower is not None:
        training.begin_with_tower(args.tower)
    if args.model is not None:
        training.begin_with_model(args.model, args.stage)
    done = training.run(60 * args.minutes, args.progress)
    if done:
        training.export(args.out / "model")
        print(f"done: {args.out / 'model'}")
    else:
        stage = training.stages[training.at]
        print(f"stopped in stage {stage.name} after {training.step} of {stage.steps} steps; run again to go on")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
