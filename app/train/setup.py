"""What `mmspec train` builds before the first step: data, settings to compare on resume, processes, the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mmspec.app.caption.config import ProcessInfo
from mmspec.app.errors import UsageError
from mmspec.app.io.jsonl import replace_file
from mmspec.app.modeling.text import is_text_model
from mmspec.app.train.config import TrainOptions
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import FileData, Requests, TextRequests, image_fraction, read_questions
from mmspec.app.train.heads import build_draft_model, target_head_config
from mmspec.app.train.sampler import LengthGroupedSampler
from mmspec.drafters.heads.registry import find_method
from mmspec.drafters.training.batch import TrainBatch
from mmspec.drafters.training.losses import LossWeights
from mmspec.drafters.training.trainer import DistributedContext, TrainConfig, Trainer, check_resume

RUN_FILE = "run.json"
"""Settings of the answers in a folder."""


def build_teacher(options: TrainOptions, process: ProcessInfo) -> tuple[Teacher, Requests]:
    """The target with its training requests, and the held-out requests.

    Raises:
        UsageError: no data, a target that cannot be loaded, or options about images for a language model.
    """
    from mmspec.app.modeling.load import load_model, load_text_model

    is_text = is_text_model(options.target)
    for name in ("text_first", "visual_mode", "compressor") if is_text else ():
        if getattr(options, name):
            raise UsageError(f"{name} is about images; --target {options.target} reads none")
    if not options.data:
        wanted = "text files, a request per line" if is_text else "images, folders or lists"
        raise UsageError(f"--target {options.target} needs --data: {wanted}")
    data: Requests
    if is_text:
        data = TextRequests(read_questions(options.data))
    else:
        data = FileData(options.data, options.source, options.prompt)
    load: Callable[..., Any] = load_text_model if is_text else load_model
    model, processor = load(options.target, options.dtype, options.device, process.local_rank)
    model.requires_grad_(False)
    tenth = len(data) // 10
    num_train = len(data) - min(options.evaluate, max(1, tenth) if is_text else tenth)
    cache_bytes = round(options.cache_gib * (1 << 30)) // process.world_size
    teacher = Teacher(model, processor, data.part(range(num_train), options.text_first), cache_bytes)
    return teacher, data.part(range(num_train, len(data)))


def data_settings(options: TrainOptions, count: int, held_out: Requests) -> dict[str, Any]:
    """Settings that determine the answers; answers of an earlier run are reused only if these are equal."""
    return {
        "target": options.target,
        "data": list(options.data),
        "count": count,
        "max_new_tokens": options.max_new_tokens,
        **({"held_back": len(held_out)} if len(held_out) else {}),
        **options.source.chosen(),
    }


def check_run_settings(folder: Path, settings: Mapping[str, Any], distributed: DistributedContext) -> None:
    """Write the settings of the answers to run.json, or compare them with those of the run in the folder.

    Raises:
        SettingsError: the folder holds the answers of a run with other settings.
    """
    file = folder / RUN_FILE
    if not file.exists():
        if not distributed.rank:
            replace_file(file, json.dumps(settings, indent=1).encode() + b"\n")
        return
    check_resume(folder, json.loads(file.read_text(encoding="utf-8")), settings)


def distributed_context(options: TrainOptions, process: ProcessInfo) -> tuple[Callable[[], None], DistributedContext]:
    """(barrier, the processes that train together), as `accelerate launch` has set them up."""
    if process.world_size == 1:
        return (lambda: None), DistributedContext()
    from accelerate import PartialState
    from accelerate.utils import reduce

    state = PartialState(cpu=options.device == "cpu")
    context = DistributedContext(process.rank, process.world_size, lambda value: reduce(value, "mean"))
    return state.wait_for_everyone, context


def build_trainer(
    options: TrainOptions,
    teacher: Teacher,
    num_requests: int,
    settings: Mapping[str, Any],
    distributed: DistributedContext,
) -> Trainer:
    """The trainer of the run in the folder, at its last checkpoint if there is one.

    Raises:
        SettingsError: the folder holds a run with other settings.
        UsageError: `--start-from` cannot be used.
    """
    model = teacher.model
    embeddings = teacher.adapter.shared_embeddings
    head_config = target_head_config(model, options.ffn)
    draft_models = {name: build_draft_model(options, name, head_config, teacher) for name in options.drafter}
    layers = [layer for one in draft_models.values() for layer in one.head.config.hidden_state_layers]
    teacher.aux_layers = tuple(sorted(set(layers)))
    teacher.has_axes = any(find_method(one.architecture).is_of_target for one in draft_models.values())
    config = TrainConfig(
        options.steps,
        options.batch_size,
        options.lr,
        seed=options.seed,
        weights=LossWeights(ttt_steps=options.ttt_steps, loss=options.loss),
    )
    placeholder_id = torch.tensor(next(iter(teacher.media_token_ids), 0), device=model.device)
    placeholder = embeddings.embed(placeholder_id).float()
    sampler = LengthGroupedSampler(num_requests, config.batch_size, config.seed, teacher.text_lengths)

    def get_batch(step: int) -> TrainBatch:
        """This process's share of the batch of a step."""
        with_images = image_fraction(step / config.max_steps) if options.text_first else 1.0
        indices = sampler.batch_indices(step, with_images)
        return teacher.make_batch(indices[distributed.rank :: distributed.world_size])

    return Trainer(options.out, draft_models, config, embeddings, get_batch, placeholder, settings, distributed)


def init_from_target(trainer: Trainer, teacher: Teacher, draft_vocab: int | None) -> None:
    """Before training, once the answers are known: draft vocabularies, and what a method starts its heads from.

    Args:
        trainer, teacher: of the run.
        draft_vocab: ids that heads without an LM head of their own may draft, at most; None for all.
    """
    embeddings, models = teacher.adapter.shared_embeddings, trainer.draft_models.values()
    for model in models:
        size = model.head.config.draft_vocab_size
        if size and model.draft_ids is None:
            model.draft_ids = teacher.draft_vocabulary(size) if size < model.head.config.vocab_size else None
        elif draft_vocab and not size and model.draft_ids is None:
            model.draft_ids = teacher.most_common_ids(draft_vocab)
        if model.draft_ids is not None:
            model.draft_ids, teacher.finds_next_ids = model.draft_ids.to(teacher.model.device), True
    if trainer.step or "start_from" in trainer.settings or not teacher.answers:
        return
    for model in models:
        size, ids = model.head.config.draft_vocab_size, model.draft_ids
        ids = teacher.draft_vocabulary(size).to(teacher.model.device) if size and ids is None else ids
        with torch.no_grad():
            batches = answer_batches(teacher, trainer.config.batch_size)
            find_method(model.architecture).init_from_target(model.head, batches, embeddings, ids)


def answer_batches(teacher: Teacher, batch_size: int) -> Iterator[TrainBatch]:
    """All answers in order, the same in every process."""
    numbers = sorted(teacher.answers)
    for start in range(0, len(numbers), batch_size):
        yield teacher.make_batch(numbers[start : start + batch_size])
