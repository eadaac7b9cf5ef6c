"""Files of a training run after failures, data-parallel training, and losses over a draft vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_target import HEAD_CONFIG, LAYERS, NUM_LAYERS, FakeTarget, build_layers_batch
from spies import spy_on
from torch import Tensor, nn

from mmspec.app.train.heads import init_head
from mmspec.drafters.checkpoints import format as checkpoint
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.heads.registry import TrainSizes, recipes
from mmspec.drafters.training.batch import DraftModel, TrainBatch
from mmspec.drafters.training.losses import LossInputs, LossWeights
from mmspec.drafters.training.trainer import DistributedContext, TrainConfig, Trainer
from mmspec.interfaces import SharedEmbeddings

CONFIG = EagleConfig(16, 24, 2, 2, 40)
FULL = (OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file"))


def build_trainer(folder: Path, has_response: bool = True, distributed: DistributedContext | None = None) -> Trainer:
    """A run over five tokens; `has_response` False: none of them is part of a response."""
    embeddings = SharedEmbeddings(nn.Embedding(40, 16).requires_grad_(False), nn.Linear(16, 40).requires_grad_(False))
    ids = torch.tensor([[3, 5, 7, 9, 11]])
    batch = TrainBatch(
        ids, ids > 0, ids < 0, (ids > 3) & has_response, embeddings.embed_tokens(ids), torch.randn(1, 5, 16)
    )
    draft_models = {"a": DraftModel(EagleHead(CONFIG), "decoupled")}
    return Trainer(
        folder, draft_models, TrainConfig(2, 1), embeddings, lambda step: batch, torch.zeros(16), {}, distributed
    )


def files(folder: Path) -> dict[str, bytes]:
    """Contents by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def half(error: Exception) -> Callable[..., None]:
    """A writer that fails on the way, or a renaming that fails."""

    def write(what: object, file: Path, **options: object) -> None:
        if not isinstance(what, Path):
            file.write_bytes(b"half")
        raise error

    return write


@pytest.mark.parametrize("error", FULL)
def test_a_full_disk_preserves_the_checkpoint_and_is_reported(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_trainer(tmp_path)
    assert run.run()
    before = files(tmp_path)
    monkeypatch.setattr(torch, "save", half(error))
    with pytest.raises(OSError, match="the checkpoint before it stays") as failed:
        run.save()
    assert str(error) in str(failed.value) and files(tmp_path) == before


@pytest.mark.parametrize("fails", ["save_file", "os.replace"])
def test_saving_a_head_is_atomic(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save_head(tmp_path, EagleHead(CONFIG), checkpoint.HeadMetadata(CONFIG, "decoupled", 2))
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"mmspec.drafters.checkpoints.format.{fails}", half(FULL[0]))
        with pytest.raises(OSError, match="No space"):
            checkpoint.save_head(tmp_path, EagleHead(CONFIG), checkpoint.HeadMetadata(CONFIG, "coupled", 2))
    assert files(tmp_path) == before


@pytest.mark.parametrize("has_response", [False, True])
def test_every_process_joins_every_all_reduce(has_response: bool, tmp_path: Path) -> None:
    """A process whose sequences have no response must not leave the others waiting."""
    reduced: list[torch.Size] = []

    def mean(value: Tensor) -> Tensor:
        reduced.append(value.shape)
        return value

    run = build_trainer(tmp_path, has_response, DistributedContext(0, 2, mean))
    step_metrics = run._train_step()
    assert (step_metrics["norm"] > 0) is has_response
    assert reduced == [weight.shape for weight in run.draft_models["a"].parameters()]


def test_depth_and_top_k_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="max_depth must be at least 1; got 0"):
        EagleDrafter(EagleHead(CONFIG), num_layers=2, max_depth=0)
    with pytest.raises(ValueError, match=r"top_k must be at least 1.*; got 0"):
        EagleDrafter(EagleHead(CONFIG), num_layers=2, top_k=0)
    with pytest.raises(ValueError, match="ttt_steps must be at least 1; got 0"):
        LossWeights(ttt_steps=0)


@pytest.mark.parametrize("native", [True, False])
def test_autocast_only_on_devices_with_bfloat16(native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.drafters.training.trainer.bf16_is_faster", lambda device: native)
    found = spy_on(monkeypatch, torch.nn.functional, "linear", lambda result, *_: result.dtype == torch.bfloat16)
    assert build_trainer(tmp_path).run(60)
    assert set(found) == {native}


@pytest.mark.parametrize("name", [name for name, (method, _) in recipes().items() if not method.is_of_target])
def test_losses_over_a_draft_vocabulary_are_those_without_the_other_ids(name: str, target: FakeTarget) -> None:
    """Of every head: the same loss and gradients as over all ids where the others have no probability."""
    method, recipe = recipes()[name]
    ids, others = torch.arange(0, 40, 2), torch.arange(1, 40, 2)
    batch = replace(build_layers_batch(target), next_ids=torch.full((2, 14), 4))  # draftable everywhere

    def loss_and_gradients(draft_ids: Tensor | None, embeddings: SharedEmbeddings) -> list[Tensor]:
        size = None if draft_ids is None else len(draft_ids)
        layers = LAYERS if method.reads_layers else None
        config = method.train_config(HEAD_CONFIG, recipe, TrainSizes(NUM_LAYERS, layers=layers, draft_vocab=size))
        if config.draft_vocab_size:
            pytest.skip("it has an LM head of its own")
        model = DraftModel(init_head(config, 0, method), "text_only", method.name)
        for weight in model.parameters():
            weight.data += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        model.draft_ids = draft_ids
        loss, _ = method.loss()(LossInputs(model, batch, embeddings, torch.zeros(32), LossWeights(logits=1.0)))
        loss.backward()
        return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    lm_head = nn.Linear(32, 40)
    lm_head.weight.data, lm_head.bias.data = target.shared_embeddings.lm_head.weight.data, torch.zeros(40)
    lm_head.bias.data[others] = -1e4
    without = loss_and_gradients(None, replace(target.shared_embeddings, lm_head=lm_head))
    for found, expected in zip(loss_and_gradients(ids, target.shared_embeddings), without, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-5)
