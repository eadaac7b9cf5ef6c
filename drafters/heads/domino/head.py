"""The network of Domino (SpecForge): a DFlash head with a GRU over the tokens of a path, and drafts with it.

The GRU reads the anchor and the drafted tokens. From its state and the feature of a position come numbers that are
added to the position's logits. Its own code walks one path; here each node of a tree has a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.draft_types import CorrectionWeights
from mmspec.drafters.heads.base.expand import LevelExpander
from mmspec.drafters.heads.base.markov import CorrectionExpander
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter, anchors_of
from mmspec.drafters.heads.dspark.head import DsparkConfig, DsparkHead, DsparkLayer


@dataclass(frozen=True)
class DominoConfig(DsparkConfig):
    """Shape of a `DominoHead`.

    Attributes:
        gru_hidden_dim: R, size of the GRU's state.
        emb_dim: size between the two layers of the correction.
        pure_draft_prefix_len: first tokens of a block that are not corrected.
    """

    gru_hidden_dim: int = 1024
    emb_dim: int = 256
    pure_draft_prefix_len: int = 0


class PathGru(nn.Module):
    """A GRU without biases, one step at a time; the parameters are those of `nn.GRU`."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.randn(3 * hidden_size, input_size) * input_size**-0.5)
        self.weight_hh_l0 = nn.Parameter(torch.randn(3 * hidden_size, hidden_size) * hidden_size**-0.5)

    def forward(self, inputs: Tensor, state: Tensor) -> Tensor:
        """[..., R] state after inputs [..., D] behind a state [..., R]."""
        reset_in, keep_in, new_in = functional.linear(inputs, self.weight_ih_l0).chunk(3, dim=-1)
        reset, keep, new = functional.linear(state, self.weight_hh_l0).chunk(3, dim=-1)
        candidate = (new_in + (reset_in + reset).sigmoid() * new).tanh()
        return candidate + (keep_in + keep).sigmoid() * (state - candidate)


class DominoHead(DsparkHead):
    """DFlash's network with the GRU and the correction of logits."""

    config: DominoConfig

    def __init__(self, config: DominoConfig, has_table: bool = False) -> None:
        super().__init__(config, has_table)
        self.prefix_gru = PathGru(config.hidden_size, config.gru_hidden_dim)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.draft_vocab_size or config.vocab_size, bias=False),
        )


class DominoDrafter(DsparkDrafter):
    """Drafts a block as `DsparkDrafter` does, each node corrected by the tokens of its path."""

    head: DominoHead
    c_classes = (DominoHead, nn.ModuleList, DsparkLayer, PathGru, nn.Sequential, nn.SiLU)
    records_drafts = True

    def expander(self, state: DraftState, top_k: int) -> LevelExpander | None:
        return PathExpander(self, state)

    def correction_weights(self, ids: Tensor | None) -> CorrectionWeights:
        head, rows = self.head, self.head.embed_proj[2].weight
        assert isinstance(rows, Tensor)
        return CorrectionWeights(
            token_proj=head.embed_proj[0].weight,  # type: ignore[arg-type]
            vocab_proj=rows if ids is None else rows[ids],
            gru_in=head.prefix_gru.weight_ih_l0,
            gru_state=head.prefix_gru.weight_hh_l0,
            first_corrected=head.config.pure_draft_prefix_len,
        )


class PathExpander(CorrectionExpander):
    """Corrects by the GRU's states, of which each node has one."""

    def __init__(self, drafter: DominoDrafter, state: DraftState) -> None:
        weights = drafter.correction_weights(drafter.corrected_ids(state))
        super().__init__(drafter, state, weights.vocab_proj, None, weights.first_corrected)
        self.drafter, self.head = drafter, drafter.head
        anchor = drafter.embed_ids(state, anchors_of(state))[:, None]
        self.root_hidden = self.head.prefix_gru(
            anchor, anchor.new_zeros(len(anchor), 1, self.head.config.gru_hidden_dim)
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W, D]."""
        return self.drafter.embed_ids(self.state, self.state.target_ids(tokens))

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W, S]."""
        states: Tensor = self.head.prefix_gru(inputs_embeds, parent_hidden)
        return states

    def mix(self, level: int, hidden_states: Tensor) -> Tensor:
        features = self.features[:, level, None].expand(-1, hidden_states.shape[1], -1)
        mixed: Tensor = self.head.embed_proj[:2](torch.cat((features, hidden_states), dim=-1))
        return mixed
