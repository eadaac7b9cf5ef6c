"""Compare greedy calls in half precision, where near-ties may fall the other way."""

from __future__ import annotations

import adversarial as adversarial
import fuzz as fuzz
import tiny_models as tiny
import torch
from transformers import PreTrainedModel

import mmspec
from mmspec.targets.agreement import HALF_MARGIN


def assert_equal_up_to_near_ties(model: PreTrainedModel, num_requests: int = 6) -> int:
    """Assert that rows differ only from a near-tie of the plain logits on; the number of draft tokens.

    A near-tie is a margin of the best two tokens, relative to the range of the logits, within `HALF_MARGIN` units of
    the model's resolution: the bound of the self-test.
    """
    mode = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True, "output_logits": True}
    bound = HALF_MARGIN * torch.finfo(model.dtype).eps
    drafted = 0
    for seed in range(num_requests):
        inputs = tiny.build_inputs(model, seed, 2, images=[1, 1])
        plain = model.generate(**inputs, **mode)
        with fuzz.patch_model(model, adversarial.BranchingDrafter(seed), tree_size=8):
            ours = model.generate(**inputs, **mode)
            drafted += mmspec.stats(model, last=True).num_draft_tokens
        start = inputs["input_ids"].shape[1]
        for row, (expected, found) in enumerate(zip(plain.sequences, ours.sequences, strict=True)):
            length = min(len(expected), len(found))
            different = (expected[:length] != found[:length]).nonzero()
            if len(different) == 0:
                continue
            logits = plain.logits[int(different[0]) - start][row].float()
            best = logits.topk(2).values
            margin = float((best[0] - best[1]) / (logits.max() - logits.min()))
            assert margin <= bound, (
                f"row {row} of request {seed} differs at a margin of {margin:.1e} (bound {bound:.1e})"
            )
    return drafted
