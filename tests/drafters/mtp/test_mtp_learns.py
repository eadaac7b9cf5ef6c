"""A tiny Qwen3.5-like model and its head, trained on a text that does not change: the wiring learns, and drafts.

Acceptance of the right head, and how much each wrong switch costs. As a script, with `tests/helpers` in PYTHONPATH, it
prints the table.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import learned
import own_heads as own
import pytest
import tiny_models as tiny
import torch
import zoo
from learned import DEPTH, LENGTH, VOCAB
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from mmspec.drafters.mtp.drafter import MTPDrafter
from mmspec.drafters.mtp.head import MTPHead
from mmspec.targets.own_head import read_own_head
from mmspec.targets.registry import find_adapter

SPEC = tiny.ModelSpec("qwen3_5", hidden=64, layers=3, calm=True, seed=1, vocab=VOCAB)


def head_states(slow: own.SlowHead, embeds: Tensor, hidden: Tensor) -> Tensor:
    """[B, n, D] z of rows with embeddings of the next tokens and hidden states [B, n, D]."""
    joined = torch.cat((slow.norm("e", embeds), slow.norm("h", hidden)), dim=-1)
    inputs, n = joined @ slow.weights["fc"].T, embeds.shape[1]
    rotary: Callable[..., Any] = slow.model.get_decoder().rotary_emb
    mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    positions = rotary(inputs, torch.arange(n).expand(3, len(inputs), n))
    outputs = slow.layer(inputs, position_embeddings=positions, attention_mask=mask)
    return outputs[0] if isinstance(outputs, tuple) else outputs


def train(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train the model, and the head on its hidden states, then on its own outputs; returns the head's tensors."""
    slow = own.SlowHead(model, tensors)
    slow.weights = {name: torch.nn.Parameter(value.clone()) for name, value in slow.weights.items()}
    slow.layer.train()

    def loss_of(ids: Tensor) -> Tensor:
        outputs = model(input_ids=ids[:, :LENGTH], output_hidden_states=True, use_cache=False)
        loss = functional.cross_entropy(outputs.logits.flatten(0, 1), ids[:, 1 : LENGTH + 1].flatten())
        hidden, lm_head = outputs.hidden_states[-1].detach(), model.get_output_embeddings().weight.detach()
        embeds = model.get_input_embeddings()(ids).detach()
        for depth in range(DEPTH):
            carry = slow.norm("o", head_states(slow, embeds[:, 1 + depth : LENGTH + 1 + depth], hidden))
            labels = ids[:, 2 + depth : LENGTH + 2 + depth].flatten()
            loss = loss + functional.cross_entropy((carry @ lm_head.T).flatten(0, 1), labels)
            hidden = carry
        return loss

    learned.train([*model.parameters(), *slow.weights.values(), *slow.layer.parameters()], loss_of)
    prefix, names = own.head_prefix(model), own.names_of(model)
    trained = {f"{names[part]}.weight": value for part, value in slow.weights.items()}
    trained |= {names["block"] + name: value for name, value in slow.layer.state_dict().items()}
    return {prefix + name: value.detach().contiguous() for name, value in trained.items()}


@contextmanager
def wrong(kind: str, monkeypatch: pytest.MonkeyPatch, drafter: MTPDrafter) -> Iterator[None]:
    """Context with one rule of the head broken."""
    drafter.fix_visual_mode("coupled")
    with monkeypatch.context() as patch:
        if kind == "hidden state before the norm":  # up to its scale, which the head's own norm takes away
            weight = 1 + find_norm(drafter)
            select = drafter.select_hidden_states
            patch.setattr(drafter, "select_hidden_states", lambda states: select(states) / weight)
        if kind == "carry of z":
            patch.setattr(MTPHead, "carried", lambda self, states: states)
        if kind == "hidden state first":
            fuse = MTPHead.fuse
            patch.setattr(MTPHead, "fuse", lambda self, embeds, hidden: fuse(self, hidden, embeds))
        yield


def find_norm(drafter: MTPDrafter) -> Tensor:
    """The weight of the target's final norm, which the test has stored in the drafter."""
    weight: Tensor = vars(drafter)["target_norm"]
    return weight


def acceptance(model: PreTrainedModel, kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """See `learned.acceptance`; with something wrong."""

    def build() -> MTPDrafter:
        drafter = MTPDrafter(read_own_head(find_adapter(model)))
        vars(drafter)["target_norm"] = model.get_decoder().norm.weight.detach()
        return drafter

    return learned.acceptance(model, build, lambda drafter: wrong(kind, monkeypatch, drafter))


KINDS = ("right", "carry of z", "hidden state before the norm", "hidden state first", "another head")


def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float]]:
    """{what is wrong: `acceptance`}."""
    torch.manual_seed(0)
    model = tiny.build_model(SPEC).train()
    random = own.head_tensors(model)
    rng = torch.Generator().manual_seed(3)
    for weight in (model.get_decoder().norm.weight.data, random[f"{own.head_prefix(model)}norm.weight"]):
        weight.copy_(torch.randn(weight.shape, generator=rng).exp() - 1)  # as uneven as those of large models
    tensors = train(model, random)
    model.eval()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        own.write_checkpoint(model, Path(folder), tensors)
        for kind in KINDS[:-1]:
            found[kind] = acceptance(model, kind, monkeypatch)
        own.write_checkpoint(model, Path(folder), own.head_tensors(model))
        found[KINDS[-1]] = acceptance(model, "right", monkeypatch)
    return found


def test_an_edit_of_the_text_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text itself is as it was; line ends of another system are no edit."""
    assert len(learned.corpus()) > 30_000
    content = learned.TEXT.read_bytes().replace(b"\r\n", b"\n")
    monkeypatch.setattr(learned, "TEXT", tmp_path / "text.md")
    learned.TEXT.write_bytes(content.replace(b"\n", b"\r\n"))
    assert torch.equal(learned.corpus.__wrapped__(), learned.corpus())
    learned.TEXT.write_bytes(content + b"One more line.\n")
    with pytest.raises(AssertionError, match=r"text\.md was edited, but slow tests train on it"):
        learned.corpus.__wrapped__()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes of training
@pytest.mark.skipif("qwen3_5" not in zoo.ROWS, reason="this transformers has no Qwen3.5")
def test_the_head_learns_and_each_wrong_switch_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = table(monkeypatch)
    first, length = found["right"]
    assert first > 0.5 and length > 2.0, found
    assert found["hidden state before the norm"][1] < length - 0.1, found
    assert found["hidden state first"][0] < 0.2 and found["another head"][0] < 0.2, found
    assert found["carry of z"][1] < length + 0.05, found  # its loss is small: the head's norm undoes most of it


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as context:
        for name, (share, tokens) in table(context).items():
            sys.stdout.write(f"{name:30} first tokens {100 * share:5.1f}%, tokens a round {tokens:.2f}\n")
