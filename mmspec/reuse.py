"""`reuse_prefix`: which calls share what they compute of their prompts, and how (`mmspec.engine.prefix`)."""

from __future__ import annotations

from typing import Any

from mmspec.arguments import media_inputs
from mmspec.call import PrefixUse
from mmspec.config import SpecConfig
from mmspec.cpu.interception import operators_are_intercepted
from mmspec.engine.prefix import PrefixStore
from mmspec.targets.base import ModelAdapter
from mmspec.targets.model_state import describe_calls, is_plain_class
from mmspec.targets.module_scan import ModuleScan
from mmspec.targets.prompt_rows import describe_rows


def find_prefix(
    store: PrefixStore, adapter: ModelAdapter, config: SpecConfig, arguments: dict[str, Any], modules: ModuleScan
) -> PrefixUse | None:
    """What earlier calls of known code have computed of this call's prompts; None if it shares nothing with others.

    Args:
        store: of the patched model.
        adapter: of the model.
        config: options of the call.
        arguments: of `generate`, by name.
        modules: result of the scan over the model's modules.
    """
    model = adapter.model
    if config.reuse_prefix is False:
        return None
    if not all(map(is_plain_class, modules.kinds)) or operators_are_intercepted():
        return None  # adapters and users' own modules or operators: what they compute may change without a trace
    scope = "" if config.reuse_prefix is True else str(config.reuse_prefix)
    rows = describe_rows(adapter, arguments, media_inputs(arguments, model), scope)
    if rows is None:
        return None
    revision = store.check(model, describe_calls)
    prefix = store.find(rows, config.drafter.requirements.hidden_state_indices)
    verdict = store.verdicts.get(any(rows.digests))
    return PrefixUse(store, rows, revision, None if verdict is False else prefix, verdict is True)


class _AfterPrompt:
    """A streamer that has the prompt already, for a call that is begun again."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._has_prompt = streamer, False

    def put(self, value: Any) -> None:
        """Pass on all but the first, which is the prompt."""
        if self._has_prompt:
            self._streamer.put(value)
        self._has_prompt = True

    def end(self) -> None:
        """Pass on."""
        self._streamer.end()


def after_prompt(streamer: Any) -> Any:
    """The streamer of a call whose prompt it has been given before; None for None."""
    return None if streamer is None else _AfterPrompt(streamer)
