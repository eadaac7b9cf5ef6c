"""Every published layout drafts as its own code does: chains and logits of whole calls beside a slow reader of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from draft_rounds import DraftedCall, read_text, run_call
from parity import get_model
from published_heads import LAYOUTS, write_head
from slow_heads import SlowEagle, SlowEagle3Head, SlowHead, SlowVispec
from transformers import PreTrainedModel

from mmspec.cpu.native import load_kernel

READERS: dict[str, type[SlowHead]] = {
    "eagle": SlowEagle,
    "msd": SlowEagle,
    "vispec": SlowVispec,
    "eagle3": SlowEagle3Head,
}
NUM_TOKENS = 60


def build_target(family: str) -> PreTrainedModel:
    """A target of eight layers, so that the three hidden states of EAGLE-3 differ."""
    return get_model(family, layers=8)


def assert_drafts_as_read(call: DraftedCall, reader: SlowHead, row: int = 0) -> None:
    """Whole chains in every round, and logits where the head ran in its own forward."""
    rounds = call.rows[row]
    for drafted in rounds:
        is_known = len(drafted.logits) > 0
        allowed = drafted.logits[0].isfinite() if is_known else torch.ones(len(reader.token_ids()), dtype=torch.bool)
        tokens, logits = reader.chain(drafted.num_known, len(drafted.tokens), allowed)
        assert tokens == drafted.tokens, f"with {drafted.num_known} tokens known"
        if is_known:
            assert int(allowed.sum()) > 0.75 * len(allowed)
            difference = (logits - drafted.logits)[:, allowed].abs().max()
            assert float(difference) < 1e-4, f"with {drafted.num_known} tokens known"


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_of_a_call_equal_the_slow_reader(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    model, folder = build_target(layout.family), write_head(tmp_path, layout)
    inputs = tiny.build_inputs(model, 5, images=[2], num_text_tokens=(9, 12))
    call = run_call(model, folder, inputs, num_tokens=NUM_TOKENS, native=False)
    assert len(call.rows[0]) >= 50
    assert_drafts_as_read(call, READERS[layout.kind](folder, read_text(model, inputs, call)))
    if "M-RoPE" in name and load_kernel() is not None:  # positions after the prompt are on one axis
        compiled = run_call(model, folder, inputs, num_tokens=NUM_TOKENS, native=True)
        assert compiled.num_native == 1
        assert [one.tokens for one in compiled.rows[0]] == [one.tokens for one in call.rows[0]]
