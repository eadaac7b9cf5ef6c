"""One call of `generate`: `CallPlan`, what is known before transformers prepares it, and `Call`, the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mmspec.config import SpecConfig
from mmspec.cpu.huge_pages import HugePages
from mmspec.cpu.linear import LinearAutotuner
from mmspec.economy.known import Economy
from mmspec.engine.criteria import StepCriteria
from mmspec.engine.prefix import Prefix, PrefixStore, PromptRows
from mmspec.engine.revision import Revision
from mmspec.metrics.stats import Stats
from mmspec.targets.base import ModelAdapter
from mmspec.targets.lanes import LanePool
from mmspec.targets.module_scan import ModuleScan


class FallbackRequired(Exception):
    """transformers must decode this call. Raised before anything of the call was changed."""


class PicturesRequired(Exception):
    """transformers must decode this call, which was prepared without its pictures."""


@dataclass
class PrefixUse:
    """What one call takes from earlier calls, and leaves to later ones.

    Attributes:
        store: of the patched model.
        rows: the prompts of the call.
        revision: of the whole model before the call, every bit of it.
        prefix: what is in store for this call, or None.
        is_known: whether it is known to serve this model. Then only the rest of the prompt is computed, and pictures
            that lie in the prefix are not even encoded; else both ways are, once.
    """

    store: PrefixStore
    rows: PromptRows
    revision: Revision
    prefix: Prefix | None = None
    is_known: bool = False

    @property
    def has_media(self) -> bool:
        """Whether the prompts have pictures or clips."""
        return any(self.rows.digests)

    @property
    def drops_media(self) -> bool:
        """Whether the model must not be given the pictures."""
        return self.is_known and self.prefix is not None


@dataclass(frozen=True)
class CallPlan:
    """What is known of a call before transformers prepares it.

    Attributes:
        adapter: the model and its family.
        config: the options of this call.
        tokenizer: the tokenizer, or None.
        autotuner: chooses the kernels of linear layers on CPU.
        economy: what is known of rounds with this drafter.
        lanes: what recorded rounds of the model share.
        start_time: `time.perf_counter()` at the start of `generate`.
        streamer: the `streamer` argument, which transformers does not pass to a custom loop.
        vision_inputs: the arguments in `adapter.vision_args`, which transformers drops as well.
        num_return_sequences: rows per prompt.
        warn: logs a message once per model.
        modules: result of the scan over the model's modules.
        revision: of the model at the start of the call, with what was derived from it.
        media_inputs: see `mmspec.interfaces.Prompt`.
        unknown_code: why it is not known what exactly the rounds run (`mmspec.targets.model_state`); None if it is.
        prefix_use: see `PrefixUse`; None if the call shares nothing with others.
        huge_pages: moves the model's weights into huge pages.
    """

    adapter: ModelAdapter
    config: SpecConfig
    tokenizer: Any
    autotuner: LinearAutotuner
    economy: Economy
    lanes: LanePool
    start_time: float
    streamer: Any
    vision_inputs: Mapping[str, Any]
    num_return_sequences: int
    warn: Callable[[str], None]
    modules: ModuleScan
    revision: Revision
    unknown_code: str | None
    media_inputs: Mapping[str, Any] = field(default_factory=dict)
    prefix_use: PrefixUse | None = None
    huge_pages: HugePages = field(default_factory=HugePages)


@dataclass(frozen=True)
class Call:
    """A call that the loop decodes: the plan, and the arguments of `GenerationMixin._sample`.

    Attributes:
        plan: of the call.
        input_ids: [B, L] int64, `num_return_sequences` rows per prompt.
        processors: the logits processors.
        criteria: the stopping criteria.
        generation_config: the prepared `GenerationConfig`.
        model_kwargs: the other arguments of the model's forward.
        stats: counters and times of this call.
        max_new_tokens: largest number of new tokens of any row, at least 1.
        runs_user_code: whether a streamer, a processor or a criterion is user code.
    """

    plan: CallPlan
    input_ids: Tensor
    processors: Any
    criteria: StepCriteria
    generation_config: Any
    model_kwargs: dict[str, Any]
    stats: Stats
    max_new_tokens: int
    runs_user_code: bool
