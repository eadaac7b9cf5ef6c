"""What messages suggest: misspelt names, missing folders, commands that install packages, what a drafter is."""
# ruff: noqa: ANN201  (drafters as users write them, without annotations)

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from packaging.requirements import Requirement
from torch import Tensor
from transformers import PreTrainedModel

import mmspec
from mmspec import hints
from mmspec.engine.tree import DraftTree, root_only
from mmspec.interfaces import DrafterRequirements, Prompt, VerifyResult
from mmspec.interfaces.drafter import DRAFTER_CONTRACT

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("data", "s3", "gs", "ray", "video", "app", "llama-cpp")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.build_model(tiny.ModelSpec("llava", seed=6))


class UserDrafter:
    """A drafter as a user writes one, without annotations."""

    name: Any = "own"
    requirements: Any = DrafterRequirements()
    vocab_size: Any = None
    begun = 0

    def begin(self, prompt: Any):  # type: ignore[no-untyped-def]
        self.begun += 1
        return {}

    def propose(self, state: Any, max_nodes: Any, active: Any):  # type: ignore[no-untyped-def]
        return root_only(len(active))

    def observe(self, state: Any, result: Any, hidden_states: Any):  # type: ignore[no-untyped-def]
        pass


class NoPropose:
    """Everything else that a drafter has."""

    name, requirements, vocab_size = "no", DrafterRequirements(), None
    begin = observe = staticmethod(lambda *args: None)


BAD: dict[str, dict[str, Any]] = {
    "propose returned list": {"propose": lambda self, state, max_nodes, active: [[1, 2]]},
    "propose returned NoneType": {"propose": lambda self, state, max_nodes, active: None},
    "propose returned generator": {"propose": lambda self, state, max_nodes, active: (root_only(1) for _ in active)},
    "propose is 'a tree'": {"propose": "a tree"},
    "requirements is None": {"requirements": None},
    "requirements is {'top_k': 1}": {"requirements": {"top_k": 1}},
    "name is 3": {"name": 3},
    "vocab_size is '100'": {"vocab_size": "100"},
    "has no 'propose'": {},
}
"""What is said, and what of a drafter is replaced."""


@pytest.mark.parametrize("said", BAD)
def test_what_a_drafter_is_is_said_at_patch(model: PreTrainedModel, said: str) -> None:
    drafter = type("Bad", (UserDrafter if BAD[said] else NoPropose,), BAD[said])()
    state = torch.get_rng_state()
    with pytest.raises(TypeError) as error:
        mmspec.patch(model, drafter)
    message = str(error.value)
    assert "mmspec.Drafter" in DRAFTER_CONTRACT and DRAFTER_CONTRACT in message
    assert said in message and len(message) <= 300
    assert not mmspec.is_patched(model) and torch.equal(torch.get_rng_state(), state)


def test_a_drafter_is_tried_on_a_copy(model: PreTrainedModel) -> None:
    drafter = UserDrafter()
    try:
        mmspec.patch(model, drafter)
        assert drafter.begun == 0
    finally:
        mmspec.unpatch(model)


class Needy(UserDrafter):
    """Needs embeddings, so that it cannot be tried; later it returns a list."""

    def begin(self, prompt: Any):  # type: ignore[no-untyped-def]
        return prompt.shared_embeddings.embed(prompt.input_ids)

    def propose(self, state: Any, max_nodes: Any, active: Any):  # type: ignore[no-untyped-def]
        return [1]


class Annotated(UserDrafter):
    """Is trusted, and wrong."""

    def begin(self, prompt: Prompt) -> Any:
        return None

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        return [1]  # type: ignore[return-value]

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        pass


@pytest.mark.parametrize("kind", [Needy, Annotated])
def test_what_cannot_be_tried_is_said_in_the_call(
    model: PreTrainedModel, kind: type[UserDrafter], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = tiny.build_inputs(model, 1, 1)
    plain = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    with patch_model(model, kind()):
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), plain)
        assert "whose propose returned list" in caplog.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lokup", "did you mean 'lookup'?"),
        ("Hybrid", "did you mean 'hybrid'?"),
        ("arbitrate", "did you mean 'arbitrated'?"),
        ("xyz", "or a hub id (owner/name)."),
        ("./heads", "'./heads': no such folder"),
        ("/no/such/head", "'/no/such/head': no such folder"),
        ("~/head", "no such folder"),
        ("runs/1/head", "no such folder"),
        ("heads/", "no such folder"),
    ],
)
def test_names_of_drafters(model: PreTrainedModel, name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=r"drafter") as error:
        mmspec.patch(model, name)
    message = str(error.value)
    assert expected in message and len(message) <= 300
    assert ("unknown" in message) == ("no such folder" not in message)


def test_a_relative_folder_that_is_missing_is_named_beside_the_hub(model: PreTrainedModel, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="there is no folder heads/none here"):
        mmspec.patch(model, "heads/none")


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_install_command_installs_from_where_mmspec_is(extra: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert shlex.split(hints.install_hint(extra)) == ["pip", "install", "-e", f"{ROOT}[{extra}]"]
    monkeypatch.chdir(ROOT)
    assert hints.install_hint(extra) == f"pip install -e '.[{extra}]'"
    monkeypatch.setattr(hints, "ROOT", tmp_path)
    command = shlex.split(hints.install_hint(extra))
    names = [Requirement(one).name for one in command[2:]]
    assert command[:2] == ["pip", "install"] and names and "mmspec" not in names
    if extra in ("s3", "gs", "ray"):
        assert {"datasets", "pyarrow"} <= set(names)  # those of the extra `data`


def test_no_message_names_a_package_that_no_registry_has() -> None:
    folders = ("mmspec", "app", "drafters", "vision")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for path in (*sources, *pages):
        assert "'mmspec[" not in path.read_text(encoding="utf-8"), path


def test_compare_takes_what_generate_takes(model: PreTrainedModel) -> None:
    mmspec.patch(model, "lookup")
    ids = torch.randint(5, 50, (2, 6))
    try:
        assert mmspec.compare(model, ids, max_new_tokens=6).identical
        for wrong in (ids.tolist(), "text", None):
            with pytest.raises(TypeError, match="a mapping, or a tensor of input ids; got"):
                mmspec.compare(model, wrong, max_new_tokens=6)  # type: ignore[arg-type]
    finally:
        mmspec.unpatch(model)


def test_calls_that_transformers_decodes_do_not_read_as_calls_of_nothing(model: PreTrainedModel) -> None:
    mmspec.patch(model, "lookup")
    inputs = tiny.build_inputs(model, 1, 1)
    try:
        model.generate(**inputs, max_new_tokens=6, num_beams=2)
        text = str(mmspec.stats(model))
        assert "0 tokens" not in text and "tau" not in text and "1 decoded by transformers, last reason" in text
        compared = str(mmspec.compare(model, inputs, max_new_tokens=6, num_beams=2))
        assert "tau" not in compared and "decoded by transformers alone" in compared
        model.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert "tokens of the others, tau" in str(mmspec.stats(model))
    finally:
        mmspec.unpatch(model)
