"""Protocols between targets, drafters and compressors, and the data that they exchange.

| module | protocols, the main one first | data |
|---|---|---|
| `target` | `Target` | `VerifyResult`, `TargetInfo`, `SharedEmbeddings` |
| `draft_target` | `DraftTarget`, `LayerSubsets`, `DraftModelSource` | |
| `own_head` | `TargetKeys`, `HeadBlock`, `HeadCache` | `OwnHead`, `HeadFiles`, `AssistantParts` |
| `drafter` | `Drafter` | `DrafterRequirements`, `Prompt` |
| `observer` | `Observer` | `ObservedRound` |
| `compressor` | `Compressor`, `SizedCompressor`, ... | `VisualTokens`, `VisualGrid` |
| `video` | `FrameSampler`, `EvenSampler` | |

Depends on neither transformers, a KV cache nor the decode loop. Shape symbols used in the whole project: B batch rows,
L prompt length, S committed length, N nodes of a draft tree, A accepted nodes, V vocabulary size, D hidden size,
M visual tokens before compression, K visual tokens after it.
"""

from mmspec.interfaces.compressor import (
    NO_LIMIT,
    Compressor,
    GatedCompressor,
    GateObservation,
    GridCompressor,
    SizedCompressor,
    VisualGrid,
    VisualTokens,
)
from mmspec.interfaces.draft_target import DraftModelSource, DraftTarget, LayerSubsets
from mmspec.interfaces.drafter import (
    Drafter,
    DrafterRequirements,
    Prompt,
)
from mmspec.interfaces.observer import ObservedRound, Observer
from mmspec.interfaces.own_head import AssistantParts, HeadCache, HeadFiles, OwnHead, OwnHeadError, TargetKeys
from mmspec.interfaces.target import SharedEmbeddings, Target, TargetInfo, VerifyResult
from mmspec.interfaces.video import EvenSampler, FrameSampler

__all__ = [
    "NO_LIMIT",
    "AssistantParts",
    "Compressor",
    "DraftModelSource",
    "DraftTarget",
    "Drafter",
    "DrafterRequirements",
    "EvenSampler",
    "FrameSampler",
    "GateObservation",
    "GatedCompressor",
    "GridCompressor",
    "HeadCache",
    "HeadFiles",
    "LayerSubsets",
    "ObservedRound",
    "Observer",
    "OwnHead",
    "OwnHeadError",
    "Prompt",
    "SharedEmbeddings",
    "SizedCompressor",
    "Target",
    "TargetInfo",
    "TargetKeys",
    "VerifyResult",
    "VisualGrid",
    "VisualTokens",
]
