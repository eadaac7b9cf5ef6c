"""An `Eagle3Head` in C (`mmspec.cpu.draft`)."""

from __future__ import annotations

from mmspec.cpu.draft_types import HeadWeights
from mmspec.drafters.heads.base.c_draft import shared_weights
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.c_weights import layer_weights
from mmspec.drafters.heads.eagle3.head import Eagle3Head


def eagle3_weights(head: Eagle3Head, state: DraftState) -> HeadWeights | None:
    """Weights of an EAGLE-3 head; None with settings that are not implemented there.

    Nor is one that reads one hidden state only, which its `fuse` does not project.
    """
    config = head.config
    others = (config.qk_norm, config.norm_before_fc, config.fc_norm, config.norm_output, config.target_hidden_size)
    if any(others) or config.is_layered or head.fc.in_features == config.hidden_size:
        return None
    ends = shared_weights(state) | {"lm_head": head.lm_head.weight, "lm_head_bias": None}
    return HeadWeights(
        head.fc.weight,
        None,
        [layer_weights(head.layer)],
        hidden_norm=head.layer.hidden_norm.weight,
        final_norm=head.norm.weight,
        adds_normed_state=head.config.norm_before_residual,
        **ends,
    )
