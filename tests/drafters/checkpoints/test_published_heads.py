"""The list of published heads, and how `auto` finds, names, refuses and announces them."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from test_published import CONFIGS, TARGET, folder_of

from mmspec.drafters import registry
from mmspec.drafters.checkpoints.published_heads import (
    DATA_FILE,
    PUBLISHED_DRAFTERS,
    hub_id_of,
    published_heads,
    target_id,
)
from mmspec.drafters.registry import HUB_ID, build_drafter, is_hub_id
from mmspec.interfaces import TargetInfo

DOCS = Path(__file__).parents[3] / "docs" / "published-heads.md"
READ_METHODS = ("msd", "eagle", "vispec", "eagle3", "dflash", "dflash2", "dspark")
LLAVA = "llava-hf/llava-1.5-7b-hf"
KNOWN = replace(TARGET, name=LLAVA)


@pytest.fixture(autouse=True)
def _forget_warnings() -> None:
    registry.warn_once.cache_clear()


def test_every_row_is_complete() -> None:
    rows = json.loads(DATA_FILE.read_text())["heads"]
    heads = published_heads()
    assert len(heads) == len(rows) >= 60, "an id twice"
    for head in heads.values():
        assert HUB_ID.fullmatch(head.id) and head.targets and all(map(HUB_ID.fullmatch, head.targets))
        assert head.source.startswith("https://") and head.layout == (head.code is not None)
        assert head.weights is False, "none was run here"
        assert head.method in READ_METHODS or head.refused
    for target, ids in PUBLISHED_DRAFTERS.items():
        assert ids and all(target in heads[head_id].targets and heads[head_id].refused is None for head_id in ids)
    wanted = (
        "Cloudriver/EAGLE-LLAVA-1.5-7B", "lucylyn/MSD-Qwen2VL-7B-Instruct", "JLKang/ViSpec-llava-1.5-7b-hf",
        "AngelSlim/Qwen3-VL-2B-Instruct_eagle3", "AQ-MedAI/Qwen3-VL-8B-Instruct-eagle3", "z-lab/gemma4-12B-it-DFlash",
        "RedHatAI/Mistral-Small-4-119B-2603.dflash", "LiquidAI/LFM2.5-VL-3B-DSpark", "Irisssme/HiViS-llava-1.5-7b-hf",
    )  # fmt: skip
    assert set(wanted) <= set(heads)


def test_the_table_of_the_docs_is_the_list() -> None:
    """Row by row: target, head, method, whether it is read and was checked, or why not."""
    text = DOCS.read_text()
    for head in published_heads().values():
        rows = [
            line for line in text.splitlines() if re.search(rf"`{re.escape(head.id)}`", line) and line.startswith("|")
        ]
        assert len(rows) == 1, head.id
        cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
        assert cells[1] == f"`{head.id}`" and cells[2] == head.method
        if head.refused is None:
            assert cells[3] == ("checked" if head.layout else "yes")
        else:
            number = re.fullmatch(r"no \((\d)\)", cells[3])
            assert number is not None and f"\n{number[1]}. {head.refused}\n" in text
        assert all(f"`{target}`" in cells[0] for target in head.targets)


HASH = "0123456789abcdef0123456789abcdef01234567"
SIZES = {"qwen2_5_vl": (3584, 28), "qwen3_vl": (2048, 28), "llava": (4096, 32), "qwen3_5": (5120, 64)}


@pytest.mark.parametrize(
    ("name", "model_type", "found"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", "Qwen/Qwen2.5-VL-7B-Instruct"),
        (f"CACHE/models--Qwen--Qwen2.5-VL-7B-Instruct/snapshots/{HASH}", "qwen2_5_vl", "Qwen/Qwen2.5-VL-7B-Instruct"),
        (f"CACHE/models--Qwen--Qwen3.5-27B/snapshots/{HASH}/", "qwen3_5", "Qwen/Qwen3.5-27B"),
        (f"CACHE/models--me--other/snapshots/{HASH}", "qwen2_5_vl", None),
        ("FOLDER/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("FOLDER/qwen2.5-vl-7b-instruct/", "qwen2_5_vl", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("FOLDER/Qwen3.5-27B", "qwen3_5", "Qwen/Qwen3.5-27B"),
        ("FOLDER/Qwen2.5-VL-7B-Instruct", "llava", LLAVA),  # a name that its architecture belies
        ("FOLDER/my-model", "qwen2_5_vl", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("FOLDER/my-model", "qwen3_vl", "Qwen/Qwen3-VL-2B-Instruct"),
        ("FOLDER/my-model", "qwen3_5", None),  # Qwen3.5 and Qwen3.6 are alike
        ("me/my-model", "qwen2_5_vl", None),
        ("", "qwen2_5_vl", None),
    ],
)
def test_the_target_is_known_by_name_folder_or_sizes(
    name: str, model_type: str, found: str | None, tmp_path: Path
) -> None:
    name = name.replace("CACHE", str(tmp_path / "hub")).replace("FOLDER", str(tmp_path))
    if str(tmp_path) in name:
        Path(name).mkdir(parents=True)
    hidden_size, num_layers = SIZES[model_type]
    assert target_id(TargetInfo(model_type, hidden_size, 1000, num_layers, name=name)) == found
    if found is not None:
        smaller = TargetInfo(model_type, 64, 1000, 2, name=str(tmp_path / "my-model"))
        assert target_id(smaller) is None


def test_a_snapshot_has_the_name_of_its_repository() -> None:
    assert hub_id_of(f"/data/hub/models--lucylyn--MSD-LLaVA1.5-7B/snapshots/{HASH}") == "lucylyn/MSD-LLaVA1.5-7B"
    assert hub_id_of(rf"C:\hub\models--a--b.c\snapshots\{HASH}") == "a/b.c"
    assert hub_id_of("/data/heads/msd") is None


class Cache:
    """A cache of hub snapshots."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requested: list[tuple[str, bool]] = []

    def folder(self, hub_id: str) -> Path:
        return self.root / f"models--{hub_id.replace('/', '--')}" / "snapshots" / HASH

    def __call__(self, name: str, *, local_files_only: bool, **options: Any) -> str:
        self.requested.append((name, local_files_only))
        if not self.folder(name).is_dir():
            raise RuntimeError("not in the cache")
        return str(self.folder(name))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    found = Cache(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found)
    monkeypatch.setattr("mmspec.drafters.hub.unreachable_reason", lambda: None)
    return found


def test_auto_names_a_head_by_its_hub_id(cache: Cache, tmp_path: Path) -> None:
    """Of a target that was loaded from a folder too; so do a hub id, and the folder of a snapshot."""
    folder_of("vispec", cache.folder("JLKang/ViSpec-llava-1.5-7b-hf"), model_type="llava")
    target = replace(KNOWN, name=str(tmp_path / "llava-1.5-7b-hf"), num_layers=8, hidden_size=16)
    (tmp_path / "llava-1.5-7b-hf").mkdir()
    assert build_drafter("auto", KNOWN).name == "JLKang/ViSpec-llava-1.5-7b-hf"
    assert build_drafter("auto", target).name == "arbitrated", "its sizes are not those of this model"
    hub_id = "JLKang/ViSpec-llava-1.5-7b-hf"
    assert build_drafter(hub_id, KNOWN).name == hub_id == build_drafter(str(cache.folder(hub_id)), KNOWN).name
    assert all(local for name, local in cache.requested if name != hub_id), "auto never fetches anything"


def test_a_head_in_a_folder_of_a_repository(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By OWNER/NAME/FOLDER, if the repository is listed or in the cache; only that folder is asked for."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder_of("vispec", cache.folder("me/heads") / "best")
    drafter = build_drafter("me/heads/best", KNOWN)
    assert drafter.name == "me/heads/best" == build_drafter(str(cache.folder("me/heads") / "best"), KNOWN).name
    assert cache.requested[-1] == ("me/heads", False)
    assert is_hub_id("tencent/HunyuanOCR/dflash") and not is_hub_id("me/heads/..") and not is_hub_id("a/b/c/d")
    with pytest.raises(OSError, match="me/heads has no folder other"):
        build_drafter("me/heads/other", KNOWN)
    with pytest.raises(ValueError, match="no such folder"):
        build_drafter("you/heads/best", KNOWN)


def test_a_refusal_is_a_warning_once(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """With the reason; the next head in order is used."""
    first, second = "lucylyn/MSD-LLaVA1.5-7B", "JLKang/ViSpec-llava-1.5-7b-hf"
    folder_of("msd", cache.folder(first), hidden_act="gelu")
    folder_of("vispec", cache.folder(second))
    with caplog.at_level(logging.INFO, logger="mmspec"):
        assert [build_drafter("auto", KNOWN).name for _ in range(2)] == [second] * 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith(
        f"mmspec: {first} was published for this model, but is not used"
    )
    assert "hidden_act 'gelu' is not supported" in warnings[0] and "hf download" not in caplog.text
    (cache.folder(second) / "model.safetensors").unlink()
    assert build_drafter("auto", KNOWN).name == "arbitrated" and "holds neither" in caplog.text


def test_a_head_that_could_be_fetched_is_one_line(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mmspec"):
        assert build_drafter("auto", KNOWN).name == "arbitrated"
        assert build_drafter("auto", TARGET).name == "arbitrated", "nothing was published for it"
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and caplog.records[0].levelno == logging.INFO
    assert f"for {LLAVA}: lucylyn/MSD-LLaVA1.5-7B; fetch it with `hf download lucylyn/MSD-LLaVA1.5-7B`" in messages[0]


@pytest.mark.parametrize("hub_id", ["Cloudriver/EAGLE3-LLaVA1.5-7B", "Irisssme/HiViS-llava-1.5-7b-hf"])
def test_a_head_that_is_known_to_be_unlike_its_layout_is_refused(hub_id: str, cache: Cache) -> None:
    """By hub id, or in the folder of its snapshot; `auto` passes it over."""
    folder_of("eagle3", cache.folder(hub_id))
    assert CONFIGS["eagle3"] and build_drafter("auto", KNOWN).name == "arbitrated"
    for name in (hub_id, str(cache.folder(hub_id))):
        with pytest.raises(ValueError, match=f"{hub_id} is not read: its code"):
            build_drafter(name, KNOWN)
