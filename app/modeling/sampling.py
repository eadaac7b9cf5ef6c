"""How tokens are chosen: options of a command, and what the model's own generation config adds to them.

Of a checkpoint's `generation_config.json` everything is used, as `generate` does, except values that leave a single
token: Qwen2.5-VL's `top_k=1, top_p=0.001` would make every temperature greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.app.errors import UsageError

if TYPE_CHECKING:
    from transformers import GenerationConfig

ONE_TOKEN: dict[str, Callable[[Any], bool]] = {
    "top_k": lambda value: value == 1,
    "top_p": lambda value: value <= 0.1,
    "min_p": lambda value: value >= 0.9,
    "typical_p": lambda value: value <= 0.1,
    "epsilon_cutoff": lambda value: value >= 0.5,
    "eta_cutoff": lambda value: value >= 0.5,
}
"""Setting -> whether a value leaves, as a rule, only the most likely token to sample from."""
NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
}
"""Setting of a generation config -> the value without effect."""
OTHER_SETTINGS = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty")
"""Settings that have an effect whatever their value."""
SAMPLING_ONLY = frozenset(ONE_TOKEN)
"""Settings without effect in greedy decoding."""
TRANSFORMERS_TOP_K = 50
"""transformers' own, where neither the checkpoint nor the call sets it."""


@dataclass(frozen=True)
class Sampling:
    """Options of sampling. None: as the model's own generation config says.

    Attributes:
        temperature: 0 is greedy; always that of the command, never the model's.
        top_p: smallest set of tokens with at least this probability.
        top_k: as many of the most likely tokens; 0 for all.
        repetition_penalty: above 1 makes tokens that are there already less likely; in greedy decoding too.
        bad_words_ids: sequences of tokens that are never generated, as `banned_tokens` finds them.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    bad_words_ids: Sequence[Sequence[int]] = ()

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings that are given, without the temperature and banned words."""
        named = {"top_p": self.top_p, "top_k": self.top_k, "repetition_penalty": self.repetition_penalty}
        return {name: value for name, value in named.items() if value is not None}

    def without_effect(self, own: GenerationConfig) -> dict[str, Any]:
        """Settings of the model's generation config that would leave one token to sample from, and are not used."""
        if self.temperature <= 0:
            return {}
        values = {name: getattr(own, name, None) for name in ONE_TOKEN if name not in self.chosen}
        return {name: value for name, value in values.items() if value is not None and ONE_TOKEN[name](value)}

    def inherited(self, own: GenerationConfig) -> dict[str, Any]:
        """Settings of the model's generation config that change the tokens of this call."""
        unused = self.chosen.keys() | self.without_effect(own) | (set() if self.temperature > 0 else SAMPLING_ONLY)
        values = {name: getattr(own, name, None) for name in (*NEUTRAL, *OTHER_SETTINGS) if name not in unused}
        return {name: value for name, value in values.items() if value not in (None, NEUTRAL.get(name))}

    def generation_kwargs(self, own: GenerationConfig) -> dict[str, Any]:
        """Keyword arguments of `generate` for a model with the generation config `own`."""
        chosen = self.chosen
        if self.bad_words_ids:  # besides those of the checkpoint, often placeholders of pictures
            chosen["bad_words_ids"] = [*(own.bad_words_ids or ()), *map(list, self.bad_words_ids)]
        if self.temperature <= 0:  # None: sampling options of a checkpoint would cause warnings
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None} | chosen
        neutral = {name: NEUTRAL[name] for name in self.without_effect(own)}
        return {"do_sample": True, "temperature": self.temperature} | neutral | chosen

    def settings(self, own: GenerationConfig) -> dict[str, Any]:
        """`top_p`, `top_k` and `repetition_penalty` as they are in effect, for the rows of an output."""
        values: dict[str, Any] = dict.fromkeys(("top_p", "top_k", "repetition_penalty"))
        if self.temperature > 0:
            values |= {"top_p": 1.0, "top_k": TRANSFORMERS_TOP_K}
        values |= {name: value for name, value in self.inherited(own).items() if name in values}
        values |= {name: NEUTRAL[name] for name in self.without_effect(own) if name in values}
        return values | self.chosen

    def describe(self, own: GenerationConfig) -> list[str]:
        """Lines about what is used of the model's own generation config and what is not; none if it sets nothing."""
        lines = []
        if inherited := self.inherited(own):
            lines.append(f"of the model's own generation config: {_listed(inherited)}")
        if unused := self.without_effect(own):
            lines.append(
                f"the model's own {_listed(unused)} would leave one token whatever the temperature: not used "
                "(--top-p and --top-k set others)"
            )
        return lines


GREEDY = Sampling()


def banned_tokens(tokenizer: Any, words: Sequence[str], name: str) -> list[list[int]]:
    """The sequences of tokens of words, as they are and capitalised: at the start of a text, after a space, in a word.

    Args:
        name: of the model, for messages.

    Raises:
        UsageError: a word that has no tokens of its own.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    found: list[list[int]] = []
    line, blank, others = encode("\n"), encode(" "), set(tokenizer.all_special_ids)  # the unknown token among them
    for word in words:
        forms = dict.fromkeys((word, word[:1].upper() + word[1:]))
        sequences = [encode(f"{start}{form}") for form in forms for start in ("", " ", "\n")]
        sequences = [ids[len(line) :] if ids[: len(line)] == line else ids for ids in sequences]
        known = [ids for ids in sequences if ids not in (blank, []) and others.isdisjoint(ids)]
        if not known:
            raise UsageError(
                f"--ban-words: {word!r:.60} is no token of {name}, nor several: leave it out, or write it another way"
            )
        found += [ids for ids in known if ids not in found]
    return found


def _listed(settings: dict[str, Any]) -> str:
    texts = {name: str(value) for name, value in settings.items()}
    return ", ".join(f"{name} {text if len(text) <= 40 else text[:37] + '...'}" for name, text in texts.items())
