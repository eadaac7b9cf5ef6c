"""Protocols between targets, drafters and compressors, and the data that they exchange.

| module | protocols, the main one first | data |
|---|---|---|
| `target` | `Target` | `VerifyResult`, `TargetInfo`, `SharedEmbeddings` |
| `draft_target` | `DraftTarget`, `LayerSubsets`, `DraftModelSource` | |
| `own_head` | `TargetKeys`, `HeadCache` | `OwnHead`, `HeadFiles`, `AssistantParts` |
| `drafter` | `Drafter` | `DrafterRequirements`, `Prompt` |
| `observer` | `Observer` | `ObservedRound` |
| `compressor` | `Compressor`, `GatedCompressor` | `VisualTokens`, `VisualGrid` |
| `video` | `FrameSampler` | |

Depends on neither transformers, a KV cache nor the decode loop. Shape symbols used in the whole project: B batch rows,
L prompt length, S committed length, N nodes of a draft tree, A accepted nodes, V vocabulary size, D hidden size,
M visual tokens before compression, K visual tokens after it.
"""

from mmspec.interfaces.compressor import NO_LIMIT as NO_LIMIT
from mmspec.interfaces.compressor import Compressor as Compressor
from mmspec.interfaces.compressor import GatedCompressor as GatedCompressor
from mmspec.interfaces.compressor import GateObservation as GateObservation
from mmspec.interfaces.compressor import VisualGrid as VisualGrid
from mmspec.interfaces.compressor import VisualTokens as VisualTokens
from mmspec.interfaces.draft_target import DraftModelSource as DraftModelSource
from mmspec.interfaces.draft_target import DraftTarget as DraftTarget
from mmspec.interfaces.draft_target import LayerSubsets as LayerSubsets
from mmspec.interfaces.drafter import Drafter as Drafter
from mmspec.interfaces.drafter import DrafterRequirements as DrafterRequirements
from mmspec.interfaces.drafter import Prompt as Prompt
from mmspec.interfaces.observer import ObservedRound as ObservedRound
from mmspec.interfaces.observer import Observer as Observer
from mmspec.interfaces.own_head import AssistantParts as AssistantParts
from mmspec.interfaces.own_head import HeadCache as HeadCache
from mmspec.interfaces.own_head import HeadFiles as HeadFiles
from mmspec.interfaces.own_head import OwnHead as OwnHead
from mmspec.interfaces.own_head import OwnHeadError as OwnHeadError
from mmspec.interfaces.own_head import TargetKeys as TargetKeys
from mmspec.interfaces.target import SharedEmbeddings as SharedEmbeddings
from mmspec.interfaces.target import Target as Target
from mmspec.interfaces.target import TargetInfo as TargetInfo
from mmspec.interfaces.target import VerifyResult as VerifyResult
from mmspec.interfaces.video import FrameSampler as FrameSampler
