"""The study of trees against paths: its table of a tiny run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmspec.app.modeling.random_models import random_model
from mmspec.app.train.heads import init_head, target_head_config
from mmspec.drafters.checkpoints.format import HeadMetadata, save_head
from mmspec.drafters.heads.registry import TrainSizes, recipes
from research.studies import pair_trees as study

pytestmark = pytest.mark.research


def test_a_study(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "MAX_ANSWER_TOKENS", 8)
    model, _ = random_model("tiny")
    num_layers = model.config.get_text_config().num_hidden_layers
    for name in ("dspark", "dflash2"):
        method, recipe = recipes()[name]
        sizes = TrainSizes(num_layers, 4, (1, num_layers))
        config = method.train_config(target_head_config(model, 32), recipe, sizes)
        metadata = HeadMetadata(config, "coupled", num_layers, architecture=name)
        save_head(tmp_path / name, init_head(config, 0, method), metadata)
    args = [str(tmp_path / "dspark"), str(tmp_path / "dflash2"), "--model", "tiny", "--count", "2", "--nodes", "4,8"]
    assert study.main(args) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 4 and all(row.endswith("| yes |") and " [" in row for row in rows)
