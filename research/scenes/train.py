"""`python -m research.scenes.train`: train the scenes model from random weights, in five stages.

*see*: the vision tower alone, with one classification head per patch label (object kind, region, size, count,
  letters of a sign).
*talk*: projector and lower half of the text model, with the tower at a tenth of the learning rate. Auxiliary losses:
  the name of the thing at each visual token through the model's own lm_head; the other patch labels through discarded
  heads; after the first layers, the region of the thing that each token of the text names, and the action at each
  visual token of a clip. Answers to questions by name then need not discover the grounding from the text loss alone.
*settle*: the upper half is added at a reduced rate and the learning rate decays to nearly 0.
*polish*: the whole model trains on.
*even*: scenes follow the world's distribution, with more and balanced counting questions and more clips.

In three of four samples the questions are independent: each follows the images and attends to no other turn, so no
answer can be copied from an earlier one. Samples are functions of their seeds; an interrupted run resumes from its last
checkpoint.
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
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.cpu.bf16 import bf16_is_faster
from mmspec.files import atomic_write
from research.arguments import module_parser
from research.scenes.build_model import init_scenes_model, train_tokenizer
from research.scenes.data import ChatDataset, PatchDataset, collate_chats, generate_corpus
from research.scenes.export import export_model
from research.scenes.models import VisionPretrainer, VlmTrainer, aux_head_weights
from research.scenes.stages import STAGES, MuonAdamW, TrainingStage, learning_rate_at

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerBase

EPILOG = """\
The run folder holds state.pt (checkpoint), log.jsonl, the tokenizer, tower.safetensors after the first stage and, at
the end, the model in bfloat16. Repeat the command to resume an interrupted run; other settings in the same folder are
an error.

examples
  # all stages: about nine hours on two cores with native bfloat16
  python -m research.scenes.train --out run
  # stop after 40 minutes; repeat to resume
  python -m research.scenes.train --out run --minutes 40
"""


class ScenesTrainer:
    """One training run in a folder: stages, checkpoints, log and export.

    Attributes:
        stage_index: Index of the current stage; `len(stages)` once the run is complete.
        step: Steps done in the current stage.
    """

    def __init__(
        self,
        run_folder: Path,
        stages: Sequence[TrainingStage],
        device: str,
        seed: int,
        build_model: Callable[[int], LlavaForConditionalGeneration] = init_scenes_model,
        use_compile: bool = False,
    ) -> None:
        """
        Args:
            run_folder: Folder of the run, created if needed; a checkpoint in it is resumed.
            stages: Stages in order.
            device: torch device.
            seed: Seed of the initial weights.
            build_model: Returns the untrained model for a seed.
            use_compile: Compile the text layers with torch.compile: about 25% faster after one to two minutes.

        Raises:
            SystemExit: The folder holds a run with other settings.
        """
        self.use_compile = use_compile
        self.run_folder = run_folder
        self.stages = tuple(stages)
        self.device = torch.device(device)
        self.seed = seed
        run_folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = self._load_or_train_tokenizer()
        self.model = build_model(seed).to(self.device)
        if self.device.type == "cpu":  # faster on CPU, the backward pass above all
            self.model.set_attn_implementation({"vision_config": "eager"})
        self.stage_index = 0
        self.step = 0
        self.aux_heads: dict[str, Tensor] = {}
        self._optimizer_state: list[dict[str, Any]] | None = None
        if (run_folder / "state.pt").exists():
            self._resume()
        self.start_time = time.monotonic()

    def _load_or_train_tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        if (self.run_folder / "tokenizer.json").exists():
            return AutoTokenizer.from_pretrained(self.run_folder)
        tokenizer = train_tokenizer(generate_corpus(6000))
        tokenizer.save_pretrained(self.run_folder)
        return tokenizer

    def _resume(self) -> None:
        state = torch.load(self.run_folder / "state.pt", map_location=self.device, weights_only=True)
        if state["stages"] != [asdict(stage) for stage in self.stages] or state["seed"] != self.seed:
            raise SystemExit(
                f"{self.run_folder} holds a run with other settings (stages or seed); repeat them, or name another "
                "folder with --out"
            )
        self.model.load_state_dict(state["model"])
        self.stage_index = state["at"]
        self.step = state["step"]
        self.aux_heads = state["heads"]
        self._optimizer_state = state["optimiser"]

    def save_checkpoint(self, heads: dict[str, Tensor], optimizer: MuonAdamW | None) -> None:
        """Write the checkpoint to a temporary file and rename it, so that an interruption leaves the previous one."""
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
        """Return the module that a stage trains, with the auxiliary heads of the checkpoint."""
        if stage.name == "see":
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.seed)
                pretrainer = VisionPretrainer(
                    self.model.model.vision_tower, self.model.config.vision_config.hidden_size
                )
            pretrainer.to(self.device)
            if self.aux_heads:
                pretrainer.load_state_dict(self.aux_heads, strict=False)
            return pretrainer
        name_ids = [self.tokenizer(" " + kind.name, add_special_tokens=False).input_ids[0] for kind in OBJECT_KINDS]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            trainer = VlmTrainer(self.model, torch.tensor(name_ids), stage)
        trainer.to(self.device)
        if self.use_compile:
            for layer in self.model.model.language_model.layers[: stage.layers]:
                layer.compile(dynamic=True)
        if self.aux_heads:
            trainer.load_state_dict(self.aux_heads, strict=False)
        return trainer

    def build_optimizer(self, stage: TrainingStage, module: nn.Module) -> MuonAdamW:
        """Return the optimizer, with the state of the checkpoint if there is one."""
        optimizer = MuonAdamW(stage, module)
        if self._optimizer_state is not None:
            optimizer.load_state_dict(self._optimizer_state)
            self._optimizer_state = None
        return optimizer

    def iter_batches(self, stage: TrainingStage) -> Iterator[dict[str, Tensor]]:
        """Yield the batches from the current step to the last step of the stage."""
        first = stage.first + self.step * stage.batch
        count = (stage.steps - self.step) * stage.batch
        num_workers = 1 if (os.cpu_count() or 1) < 8 else 6
        dataset: PatchDataset | ChatDataset = (
            PatchDataset(first, count)
            if stage.name == "see"
            else ChatDataset(self.tokenizer, first, count, stage.batch, stage.clips, stage.full)
        )
        loader = DataLoader(
            dataset,
            stage.batch,
            num_workers=num_workers,
            collate_fn=None if stage.name == "see" else collate_chats,
            prefetch_factor=4,
            drop_last=True,
        )
        yield from loader

    def run(self, max_seconds: float, show_progress: bool, save_interval_s: float = 240.0) -> bool:
        """Train, with a checkpoint at the end of each stage and every `save_interval_s` seconds.

        Args:
            max_seconds: Stop after the first step that ends later than this, in seconds since the trainer was created.
            show_progress: Show a progress bar on stderr.
            save_interval_s: Seconds between checkpoints.

        Returns:
            True if all stages are complete, False if the time is up.
        """
        from tqdm import tqdm

        while self.stage_index < len(self.stages):
            stage = self.stages[self.stage_index]
            module = self.build_module(stage)
            optimizer = self.build_optimizer(stage, module)
            saved_at = time.monotonic()
            with tqdm(
                total=stage.steps, initial=self.step, desc=stage.name, disable=not show_progress, file=sys.stderr
            ) as bar:
                for batch in self.iter_batches(stage):
                    metrics = self._step(stage, module, optimizer, batch)
                    self.step += 1
                    bar.update()
                    bar.set_postfix({name: f"{value:.3f}" for name, value in list(metrics.items())[:4]})
                    if self.step % 20 == 0:
                        self._log({"stage": stage.name, "step": self.step, **metrics})
                    time_is_up = time.monotonic() - self.start_time > max_seconds
                    if time_is_up or time.monotonic() - saved_at > save_interval_s:
                        self.save_checkpoint(aux_head_weights(module), optimizer)
                        saved_at = time.monotonic()
                    if time_is_up:
                        return False
            optimizer.zero_grad()  # stale gradients would enter the next stage's gradient norm
            if stage.name == "see":
                self._save_tower()
            self.stage_index += 1
            self.step = 0
            # The heads of the tower have another width than those of the text model.
            self.aux_heads = {} if stage.name == "see" else aux_head_weights(module)
            self._optimizer_state = None
            self.save_checkpoint(self.aux_heads, None)
        return True

    def _save_tower(self) -> None:
        """Write the tower to tower.safetensors, for `start_from_tower`."""
        tower = self.model.model.vision_tower
        weights = {name: value.to(torch.bfloat16).contiguous() for name, value in tower.state_dict().items()}
        save_file(weights, self.run_folder / "tower.safetensors", metadata={"format": "pt"})

    def start_from_tower(self, file: Path) -> None:
        """Load a trained tower and skip the first stage; no effect on a resumed run.

        Args:
            file: tower.safetensors of another run.
        """
        if (self.stage_index, self.step) == (0, 0):
            tower = {name: value.float() for name, value in load_file(file).items()}
            self.model.model.vision_tower.load_state_dict(tower)
            self.stage_index = 1

    def start_from_model(self, folder: Path, stage: str) -> None:
        """Load the weights of an exported model and start with a stage; no effect on a resumed run.

        Args:
            folder: Folder of the exported model.
            stage: Name of the stage.
        """
        if (self.stage_index, self.step) == (0, 0):
            from transformers import LlavaForConditionalGeneration

            # Loaded by transformers, which maps the parameter names of the file to those of the model.
            exported = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
            self.model.load_state_dict(exported.state_dict())
            self.stage_index = [candidate.name for candidate in self.stages].index(stage)

    def _step(
        self, stage: TrainingStage, module: nn.Module, optimizer: MuonAdamW, batch: dict[str, Tensor]
    ) -> dict[str, float]:
        start_time = time.monotonic()
        learning_rate = learning_rate_at(stage, self.step)
        module.train()
        batch = {name: value.to(self.device) for name, value in batch.items()}
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16_is_faster(self.device)):
            loss, metrics = module(batch)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([weight for weight in module.parameters() if weight.grad is not None], 1.0)
        if torch.isfinite(norm):
            optimizer.step(learning_rate)
        return metrics | {
            "loss": float(loss.detach()),
            "norm": float(norm),
            "rate": learning_rate,
            "s": time.monotonic() - start_time,
        }

    def _log(self, row: dict[str, Any]) -> None:
        row = {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}
        with (self.run_folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def export(self, folder: Path) -> None:
        """Write the model to a folder (`export.export_model`)."""
        export_model(self.model, self.tokenizer, folder, self.seed, self.stages)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = module_parser("research.scenes.train", __doc__, EPILOG)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the run; created if needed")
    add(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after this many minutes (default: no limit); repeat the command to resume",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    add("--seed", type=int, default=0, help="seed of the initial weights (default 0)")
    add("--tower", type=Path, help="tower.safetensors of an earlier run; skips the stage that trains the tower")
    names = [stage.name for stage in STAGES]
    add("--model", type=Path, help="folder of an exported model; start with its weights at --stage")
    add("--stage", choices=names, default=names[-1], help=f"first stage with --model (default {names[-1]})")
    add(
        "--compile",
        action="store_true",
        help="torch.compile the text layers: about 25%% faster after one to two minutes; needs a C++ compiler",
    )
    add("--scale", type=float, default=1.0, help="factor on the steps of every stage (default 1)")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    args = parser.parse_args(argv)
    stages = [TrainingStage(**(asdict(stage) | {"steps": max(1, round(stage.steps * args.scale))})) for stage in STAGES]
    trainer = ScenesTrainer(args.out, stages, args.device, args.seed, use_compile=args.compile)
    if args.tower is not None:
        trainer.start_from_tower(args.tower)
    if args.model is not None:
        trainer.start_from_model(args.model, args.stage)
    if trainer.run(60 * args.minutes, args.progress):
        trainer.export(args.out / "model")
        print(f"done: {args.out / 'model'}")
    else:
        stage = trainer.stages[trainer.stage_index]
        print(
            f"stopped in stage {stage.name} after {trainer.step} of {stage.steps} steps; repeat the command to resume"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
