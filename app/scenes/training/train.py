"""`python -m mmspec.app.scenes.training.train`: from nothing to the weights of the scenes model.

Five stages. *see*: the vision tower alone learns to say per patch what is there. *talk*: with the tower slowed to a
tenth, the projector and the lower half of the text model learn to answer; further losses ask that each visual token
says the name of the thing it belongs to, read by the model's own head, and by heads that are thrown away where that
thing is, how large, whether its centre is here, how many there are of its kind and in all, which of its sign's a letter
is, and how a sign is spelled; that after a few layers each word of a text that names a thing says where that is, and
each visual token of a clip what its thing has done since the picture before. That saves the text model from having to
find it out by itself, and what a word has found out early, the layers above can read: so questions by name are
answered. Of three samples in four every question is asked apart: it follows the pictures at once and sees no other
turn, so none can be answered from what was said before.
*settle*: the upper half is added, gently, and the rate falls to nothing. *polish*: all learn on. *even*: pictures and
questions as the world has them, where before those with much in them came more often, and more clips.

Sample n is the same in every run, and a run that is cut goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmspec.app.scenes import CHECKSUMS_FILE, compute_checksums
from mmspec.app.scenes.model_card import TRAINING_FILE, write_card
from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.training.build_model import build_scenes_processor, init_scenes_model, train_tokenizer
from mmspec.app.scenes.training.data import ChatDataset, PatchDataset, collate_chats, generate_corpus
from mmspec.app.scenes.training.models import VisionPretrainer, VlmTrainer
from mmspec.app.scenes.training.stages import STAGES, MuonAdamW, TrainingStage, learning_rate_at
from mmspec.app.versions import version
from mmspec.cpu.bf16 import bf16_is_faster
from mmspec.files import atomic_write

EPILOG = """\
The folder holds state.pt (the checkpoint), log.jsonl, the tokenizer, tower.safetensors after the first stage and, at
the end, the model in bfloat16. Run the same command again to go on after a cut; other settings in the same folder are
refused.

examples
  python -m mmspec.app.scenes.training.train --out run            # all stages, some nine hours on two cores fast in bfloat16
  python -m mmspec.app.scenes.training.train --out run --minutes 40   # as far as that, then stop; go on later
"""


def _aux_head_weights(part: nn.Module) -> dict[str, Tensor]:
    """The weights that are trained along and thrown away."""
    return {n: value for n, value in part.state_dict().items() if n.split(".")[0] in ("heads", "ground", "norm")}


class ScenesTrainer:
    """One run in a folder: knows where it is, does a step, writes checkpoints."""

    def __init__(
        self,
        run_folder: Path,
        stages: Sequence[TrainingStage],
        device: str,
        seed: int,
        build_model: Callable[[int], Any] = init_scenes_model,
        use_compile: bool = False,
    ) -> None:
        """
        Args:
            seed: of the first weights. make: makes the model from it.
            compiled: give the layers of the text model to torch.compile; a quarter faster after a minute or two.
        """
        self.use_compile = use_compile
        self.run_folder, self.stages, self.device, self.seed = run_folder, tuple(stages), torch.device(device), seed
        run_folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = self._tokenizer()
        self.model = build_model(seed).to(self.device)
        if self.device.type == "cpu":  # faster there, backward above all
            self.model.set_attn_implementation({"vision_config": "eager"})
        self.stage_index, self.step = 0, 0
        self.aux_heads: dict[str, Tensor] = {}
        self._optimizer_state: list[dict[str, Any]] | None = None
        if (run_folder / "state.pt").exists():
            self._resume()
        self.start_time = time.monotonic()

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if (self.run_folder / "tokenizer.json").exists():
            return AutoTokenizer.from_pretrained(self.run_folder)
        made = train_tokenizer(generate_corpus(6000))
        made.save_pretrained(self.run_folder)
        return made

    def _resume(self) -> None:
        state = torch.load(self.run_folder / "state.pt", map_location=self.device, weights_only=True)
        if state["stages"] != [asdict(stage) for stage in self.stages] or state["seed"] != self.seed:
            raise SystemExit(f"{self.run_folder} holds a run with other settings; name another folder with --out")
        self.model.load_state_dict(state["model"])
        self.stage_index, self.step, self.aux_heads = state["at"], state["step"], state["heads"]
        self._optimizer_state = state["optimiser"]

    def save_checkpoint(self, heads: dict[str, Tensor], optimizer: MuonAdamW | None) -> None:
        """Write the checkpoint under another name first, so that a cut never leaves half of one."""
        state = {
            "stages": [asdict(stage) for stage in self.stages],
            "seed": self.seed,
            "at": self.stage_index,
            "step": self.step,
            "model": self.model.state_dict(),
            "heads": heads,
            "optimiser": optimizer.state_dict() if optimizer is not None else None,
        }
        with atomic_write(self.run_folder / "state.pt") as part:
            torch.save(state, part)

    def build_module(self, stage: TrainingStage) -> nn.Module:
        """What is trained in a stage."""
        if stage.name == "see":
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.seed)
                eyes = VisionPretrainer(self.model.model.vision_tower, self.model.config.vision_config.hidden_size)
            eyes.to(self.device)
            if self.aux_heads:
                eyes.load_state_dict(self.aux_heads, strict=False)
            return eyes
        names = [self.tokenizer(" " + kind.name, add_special_tokens=False).input_ids[0] for kind in OBJECT_KINDS]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            mouth = VlmTrainer(self.model, torch.tensor(names), stage)
        mouth.to(self.device)
        if self.use_compile:
            for layer in self.model.model.language_model.layers[: stage.layers]:
                layer.compile(dynamic=True)
        if self.aux_heads:
            mouth.load_state_dict(self.aux_heads, strict=False)
        return mouth

    def build_optimizer(self, stage: TrainingStage, module: nn.Module) -> MuonAdamW:
        """A fresh one, or the one that was saved."""
        made = MuonAdamW(stage, module)
        if self._optimizer_state is not None:
            made.load_state_dict(self._optimizer_state)
            self._optimizer_state = None
        return made

    def iter_batches(self, stage: TrainingStage) -> Iterator[dict[str, Tensor]]:
        """From the current step to the stage's last."""
        first, count = stage.first + self.step * stage.batch, (stage.steps - self.step) * stage.batch
        workers = 1 if (os.cpu_count() or 1) < 8 else 6
        data: Any = (
            PatchDataset(first, count)
            if stage.name == "see"
            else ChatDataset(self.tokenizer, first, count, stage.batch, stage.clips, stage.full)
        )
        loader = DataLoader(
            data,
            stage.batch,
            num_workers=workers,
            collate_fn=None if stage.name == "see" else collate_chats,
            prefetch_factor=4,
            drop_last=True,
        )
        yield from loader

    def run(self, max_seconds: float, show_progress: bool, save_interval_s: float = 240.0) -> bool:
        """Train until all is done (True) or the time is up (False)."""
        from tqdm import tqdm

        while self.stage_index < len(self.stages):
            stage = self.stages[self.stage_index]
            part = self.build_module(stage)
            optimiser = self.build_optimizer(stage, part)
            saved = time.monotonic()
            with tqdm(
                total=stage.steps, initial=self.step, desc=stage.name, disable=not show_progress, file=sys.stderr
            ) as bar:
                for batch in self.iter_batches(stage):
                    figures = self._step(stage, part, optimiser, batch)
                    self.step += 1
                    bar.update()
                    bar.set_postfix({name: f"{value:.3f}" for name, value in list(figures.items())[:4]})
                    if self.step % 20 == 0:
                        self._log({"stage": stage.name, "step": self.step, **figures})
                    over = time.monotonic() - self.start_time > max_seconds
                    if over or time.monotonic() - saved > save_interval_s:
                        self.save_checkpoint(_aux_head_weights(part), optimiser)
                        saved = time.monotonic()
                    if over:
                        return False
            optimiser.zero_grad()  # or the next stage would clip by gradients that are none of its own
            if stage.name == "see":
                self._save_tower()
            self.stage_index, self.step = self.stage_index + 1, 0
            self.aux_heads = {} if stage.name == "see" else _aux_head_weights(part)  # the tower's are of another width
            self._optimizer_state = None
            self.save_checkpoint(self.aux_heads, None)
        return True

    def _save_tower(self) -> None:
        """In a file of its own, for `begin_with_tower`."""
        tower = self.model.model.vision_tower
        rounded = {name: value.to(torch.bfloat16).contiguous() for name, value in tower.state_dict().items()}
        save_file(rounded, self.run_folder / "tower.safetensors", metadata={"format": "pt"})

    def start_from_tower(self, file: Path) -> None:
        """Leave out the first stage: the tower was trained before."""
        if (self.stage_index, self.step) == (0, 0):
            tower = {name: value.float() for name, value in load_file(file).items()}
            self.model.model.vision_tower.load_state_dict(tower)
            self.stage_index = 1

    def start_from_model(self, folder: Path, stage: str) -> None:
        """Take the weights of an exported model, and begin with that stage."""
        if (self.stage_index, self.step) == (0, 0):
            from transformers import LlavaForConditionalGeneration

            # Read by transformers, since the names in the file are not those in the model.
            made = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
            self.model.load_state_dict(made.state_dict())
            self.stage_index = [one.name for one in self.stages].index(stage)

    def _step(
        self, stage: TrainingStage, part: nn.Module, optimiser: MuonAdamW, batch: dict[str, Tensor]
    ) -> dict[str, float]:
        began = time.monotonic()
        rate = learning_rate_at(stage, self.step)
        part.train()
        batch = {name: value.to(self.device) for name, value in batch.items()}
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16_is_faster(self.device)):
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
        with (self.run_folder / "log.jsonl").open("a", encoding="utf-8") as file:
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
        build_scenes_processor(self.tokenizer).save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
        facts = {
            "command": "python -m mmspec.app.scenes.training.train --out run",
            "seed": self.seed,
            "torch": str(torch.__version__),
            "transformers": version("transformers"),
            "stages": [asdict(stage) for stage in self.stages],
        }
        (folder / TRAINING_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        write_card(folder, sum(weight.numel() for weight in self.model.parameters()))
        (folder / CHECKSUMS_FILE).write_text(json.dumps(compute_checksums(folder), indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mmspec.app.scenes.training.train",
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
    stages = [TrainingStage(**(asdict(stage) | {"steps": max(1, round(stage.steps * args.scale))})) for stage in STAGES]
    training = ScenesTrainer(args.out, stages, args.device, args.seed, use_compile=args.compile)
    if args.tower is not None:
        training.start_from_tower(args.tower)
    if args.model is not None:
        training.start_from_model(args.model, args.stage)
    done = training.run(60 * args.minutes, args.progress)
    if done:
        training.export(args.out / "model")
        print(f"done: {args.out / 'model'}")
    else:
        stage = training.stages[training.stage_index]
        print(f"stopped in stage {stage.name} after {training.step} of {stage.steps} steps; run again to go on")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
