"""The model of lmms-eval: the same answers and score patched and plain. Without lmms-eval, against its interface."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from types import ModuleType
from typing import Any

import pytest

from research.scenes.tasks import generate_requests


@dataclass
class Request:
    """What lmms-eval passes: (context, generation_kwargs, images of a document, id, task, split)."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def module() -> Any:
    if find_spec("lmms_eval") is None:
        base = type("lmms", (), {"__init__": lambda self: setattr(self, "task_dict", {})})
        for name in ("lmms_eval", "lmms_eval.api", "lmms_eval.api.model"):
            sys.modules[name] = ModuleType(name)
        sys.modules["lmms_eval.api.model"].lmms = base  # type: ignore[attr-defined]
    yield importlib.import_module("mmspec.app.lmms_eval_model")
    for name in [name for name in sys.modules if name.startswith("lmms_eval") or name.endswith("lmms_eval_model")]:
        del sys.modules[name]


def test_the_score_is_the_same_patched_and_plain(module: Any) -> None:
    documents = list(islice(generate_requests("answer", 50_200_000), 4))
    requests = [
        Request(
            (f"<image>\n{one.question}", {"max_new_tokens": 24}, lambda doc: list(doc.images), index, "scenes", "test")
        )
        for index, one in enumerate(documents)
    ]
    answers, scores = {}, {}
    for drafter in ("plain", "flash"):
        model = module.MmspecHf(pretrained="scenes", drafter=drafter, max_batch_size=None)
        model.task_dict = {"scenes": {"test": documents}}
        answers[drafter] = model.generate_until(requests)
        scores[drafter] = sum(a.strip() == one.answer for a, one in zip(answers[drafter], documents, strict=True))
    assert answers["plain"] == answers["flash"] and scores["plain"] == scores["flash"] >= 3
    assert model.stats.calls == 4 and model.stats.fallback_calls == 0
    stopped = Request((documents[0].question, {"until": [answers["plain"][0][3]]}, *requests[0].args[2:]))
    assert model.generate_until([stopped]) == [answers["plain"][0].split(answers["plain"][0][3])[0]]
    video = Request(("what", {}, lambda doc: ["clip.mp4"], 0, "scenes", "test"))
    with pytest.raises(ValueError, match="reads images"):
        model.generate_until([video])
    for method in (model.loglikelihood, model.generate_until_multi_round):
        with pytest.raises(NotImplementedError, match="mmspec_hf"):
            method([])


def test_bad_arguments_are_refused(module: Any) -> None:
    with pytest.raises(ValueError, match="got use_flash"):
        module.MmspecHf(pretrained="tiny", use_flash=True)
    with pytest.raises(ValueError, match="one request at a time"):
        module.MmspecHf(pretrained="tiny", batch_size=4)
    options = module._generation_options({"temperature": 0.7, "max_new_tokens": 5})
    assert options["do_sample"] and options["temperature"] == 0.7 and options["max_new_tokens"] == 5
    assert module._generation_options({"temperature": 0})["temperature"] is None
