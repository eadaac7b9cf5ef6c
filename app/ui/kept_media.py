"""What is kept of a visitor's picture or clip between the turns of a conversation, and under which name.

Per visitor: time would show what others have uploaded. Both answers get the encoded picture; the prompt that was
computed before (`reuse_prefix`) is mmspec's alone. Used in the worker's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mmspec.app.modeling.chat import PIXELS, encode_media
from mmspec.targets.prompt_rows import media_digests, nested_tensors

MAX_ENCODED_BYTES = 1 << 28
"""Largest memory of all encoded pictures; those that were used longest ago go first."""


TEXTS = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids"))
"""Inputs that differ from question to question about the same picture."""


@dataclass
class KeptMedia:
    """The last encoded picture or clip of each visitor: the digest of its pixels, and `mm_encoder_outputs`."""

    max_bytes: int = MAX_ENCODED_BYTES
    _kept: dict[str, tuple[bytes, dict[str, Any]]] = field(default_factory=dict)

    def encode(self, visitor: str, model: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """As `encode_media`; 0 seconds where the visitor's last picture is this one."""
        # All but the text: grids and sizes change what the tower makes of the same pixels.
        media = {name: value for name, value in inputs.items() if name not in TEXTS and isinstance(value, torch.Tensor)}
        (digest,) = media_digests(media, torch.ones(1, 1, dtype=torch.bool)) or [b""]
        kept = self._kept.pop(visitor, None)
        if kept is not None and kept[0] == digest:
            self._kept[visitor] = kept
            texts = {name: value for name, value in inputs.items() if name not in PIXELS}
            return texts | {"mm_encoder_outputs": kept[1]}, 0.0
        request, seconds = encode_media(model, inputs)
        if visitor and digest and "mm_encoder_outputs" in request:
            self._kept[visitor] = digest, request["mm_encoder_outputs"]
            while sum(map(_num_bytes, self._kept.values())) > self.max_bytes:
                self._kept.pop(next(iter(self._kept)))
        return request, seconds


def _num_bytes(kept: tuple[bytes, dict[str, Any]]) -> int:
    return sum(tensor.nbytes for tensor in nested_tensors(kept[1]) or ())
