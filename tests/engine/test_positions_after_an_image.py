"""Positions after an image: text behind one has those of the model, not slots of the cache, in heads too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_heads as own
import pytest
import tiny_models as tiny
import zoo
from fuzz import patch_model
from parity import assert_parity, build_cached_model, generate_plain, get_model
from tiny_heads import build_drafter
from torch import Tensor

from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.targets.registry import find_adapter

FAMILIES = sorted(name for name, row in zoo.ROWS.items() if row.images is not None)
HEADS = [f"mtp of {family}" for family in own.FAMILIES] + ["assistant of gemma4", "msd of gemma3", "eagle3 of llava"]
LIMITS = {"max_new_tokens": 17, "do_sample": False, "eos_token_id": None}


@pytest.mark.every(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_after_an_image(family: str) -> None:
    """Whatever is drafted right behind images is accepted, in rows of different lengths, but for placeholders."""
    model = get_model(family)
    given = tiny.build_inputs(model, 3, 2, images=[2, 1], padding="left")
    stats = assert_parity(model, given, **LIMITS)
    if stats.fallback_reason is None:
        assert stats.num_accepted_tokens >= 0.9 * stats.num_draft_tokens > 12


def drafter_of(kind: str, model: Any, folder: Path) -> HeadDrafter:
    """A head with random weights."""
    method = kind.partition(" of ")[0]
    if method in ("mtp", "assistant"):
        return own.new_drafter(model, folder, echo=0.0, max_depth=3)
    return build_drafter({"msd": "decoupled"}.get(method, method), model.tiny_spec)


@pytest.mark.parametrize("kind", HEADS)
def test_positions_after_an_image_in_heads(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head counts on from the model's positions: equally far from them in a row with an image and in one without."""
    family = kind.partition(" of ")[2]
    if kind.startswith("assistant"):
        own.needs_family(family)
    model = build_cached_model(tiny.ModelSpec(family, seed=3, layers=3))
    given = tiny.build_inputs(model, 5, 2, images=[2, 0], padding="none")
    seen, emitted, distances = list[list[int]](), [0, 0], set[int]()

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids: Tensor = kwargs["position_ids"]
        if ids.shape[-1] == 1:
            axes = ids[1:] if len(ids) == 4 else ids.reshape(-1, *ids.shape[-2:])  # the first of four is for masks
            seen.append(axes.amax(0)[:, 0].expand(2).tolist())

    hook = find_adapter(model).text_model.register_forward_pre_hook(note, with_kwargs=True)
    generate_plain(model, given, **LIMITS)
    hook.remove()
    drafter = drafter_of(kind, model, tmp_path)
    draft_tree, observe = drafter.draft_tree, drafter.observe

    def watched_draft(state: Any, *sizes: int) -> Any:
        for row, count in enumerate(emitted):
            if 0 < count <= len(seen):
                distances.add(state.next_positions[row] - seen[count - 1][row])
        return draft_tree(state, *sizes)

    def watched_observe(state: Any, result: Any, hidden_states: Any) -> None:
        emitted[:] = [n + len(ids) for n, ids in zip(emitted, result.emitted_ids, strict=True)]
        observe(state, result, hidden_states)

    monkeypatch.setattr(drafter, "draft_tree", watched_draft)
    monkeypatch.setattr(drafter, "observe", watched_observe)
    with patch_model(model, drafter, tree_size=4):
        model.generate(**given, **LIMITS)
    assert len(seen) == 16 and len(distances) == 1
