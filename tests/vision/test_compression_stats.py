"""Statistics of compression: records of each row, and the examples of the docs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forced_drafts import planned
from fuzz import patch_model
from torch import Tensor

import mmspec
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.drafters.checkpoints.format import HeadMetadata, save_head
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.economy.chooser import Chooser
from mmspec.interfaces import VisualGrid, VisualTokens
from mmspec.metrics.compression_stats import CompressionRecord, RecordingCompressor
from mmspec.vision.registry import build_compressor


def tokens_of(counts: list[int]) -> VisualTokens:
    """Random visual tokens; each row is a square grid where its number of tokens allows."""
    rng = torch.Generator().manual_seed(0)
    length = max(counts)
    mask = torch.arange(length) < torch.tensor(counts)[:, None]
    parts = (torch.randn(len(counts), length, 8, generator=rng) for _ in range(2))
    sides = [int(count**0.5) for count in counts]
    grids = tuple(VisualGrid(row, 0, side, side, row) for row, side in enumerate(sides) if side)
    positions = torch.arange(length).expand(mask.shape) + 3
    return VisualTokens(*parts, mask, positions, grids)


@pytest.mark.parametrize(
    ("name", "choice", "kept_indices"),
    [
        ("identity", "identity", [[*range(16)], [*range(4)], []]),
        ("drop", "drop", [[], [], []]),
        ("stride:4", "stride:4", [[2, 6, 10, 14], [0, 1, 2, 3], []]),
        ("pool:4", "pool:4", [4, [0, 1, 2, 3], []]),
        ("pool:16", "pool:16", [[*range(16)], [*range(4)], []]),
    ],
)
def test_compression_records(name: str, choice: str, kept_indices: list[Any]) -> None:
    recorder = RecordingCompressor(build_compressor(name))
    assert recorder.records() == [] and recorder.name == name.partition(":")[0]
    recorder.compress(tokens_of([16, 4, 0]), None, recorder.max_tokens)
    for row, (record, expected) in enumerate(zip(recorder.records(), kept_indices, strict=True)):
        indices = None if isinstance(expected, int) else tuple(expected)
        count = expected if isinstance(expected, int) else len(expected)
        assert (record.choice, record.num_visual_tokens, record.num_compressed_tokens, record.kept_indices) == (
            choice,
            (16, 4, 0)[row],
            count,
            indices,
        )
        assert [one.height for one in record.grids] == [[4], [2], []][row]
        assert json.loads(json.dumps(record.as_dict()))["kept_indices"] == (None if indices is None else list(indices))


def test_records_of_a_compressor_without_source_indices() -> None:
    class Own:
        name, max_tokens = "own", 3

        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            return replace(visual, inputs_embeds=-visual.inputs_embeds)

    class Same(Own):
        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            return visual

    for built, numbers in ((Own(), None), (Same(), (0, 1, 2))):
        recorder = RecordingCompressor(built)
        recorder.compress(tokens_of([3]), None, 3)
        assert recorder.records()[0].kept_indices == numbers and recorder.records()[0].choice == "own:3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head")
    config = EagleConfig(64, 128, 4, 2, 384)
    save_head(path, EagleHead(config), HeadMetadata(config, "decoupled", 2, "llava"))
    return path


@pytest.mark.parametrize("sample", [False, True])
def test_output_is_unchanged_and_stats_report_compression(
    tiny: Captioner, folder: Path, sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model
    monkeypatch.setattr(Chooser, "plan", planned())  # a drafter that is disabled for a call reads no tokens
    inputs = tiny.build_inputs(
        [render_scene(generate_scene(i)) for i in range(2)], ["a", "what is this thing, and what colour has it"]
    )
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": sample}
    torch.manual_seed(1)
    plain = model.generate(**inputs, **options)
    with patch_model(model, str(folder), "pool:4", tree_size=None):
        for _ in range(4):
            torch.manual_seed(1)
            assert torch.equal(model.generate(**inputs, **options), plain)
        found, total = mmspec.stats(model, last=True), mmspec.stats(model)
        assert [row.num_visual_tokens for row in found.compression] == [16, 16]
        assert set(total.compressor_choices) == {"pool:4"}
        assert (
            sum(total.compressor_choices.values()) == 8
            and total.num_visual_tokens == 4 * 32
            and total.num_compressed_tokens < 4 * 32
        )
        assert (
            f"{total.num_compressed_tokens}/128 visual tokens" in str(total) and total.compression == found.compression
        )
        stored = json.loads(json.dumps(found.as_dict()))
        assert [row["choice"] for row in stored["compression"]] == [row.choice for row in found.compression]
        model.generate(**inputs, **options, mmspec={"compressor": "stride:4"})
        found = mmspec.stats(model, last=True)
        assert [row.kept_indices for row in found.compression] == [(2, 6, 10, 14)] * 2 and found.compressor_choices == {
            "stride:4": 2
        }
        model.generate(**inputs, **options, mmspec={"compressor": None})
        assert mmspec.stats(model, last=True).compression == [] and "visual" not in str(mmspec.stats(model, last=True))
        model.generate(**inputs, **options, mmspec={"drafter": "lookup"})
        assert mmspec.stats(model, last=True).compression == [], "a drafter without visual input"


def test_examples_of_the_docs(tiny: Captioner, folder: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "compressors.md").read_text("utf-8")
    (code,) = (block for block in page.split("```python\n") if "heatmaps(" in block)
    code = code.split("```")[0]
    picture = render_scene(generate_scene(0))
    inputs = tiny.build_inputs([picture], ["a"])
    names: dict[str, Any] = {"model": tiny.model, "inputs": inputs, "image": picture, "FOLDER": str(folder)}
    output = tmp_path / "heatmaps.png"
    try:
        exec(code.replace('"heatmaps.png"', repr(str(output))), names)
    finally:
        mmspec.unpatch(tiny.model)
    assert (
        output.stat().st_size > 500
        and isinstance(names["record"], CompressionRecord)
        and names["record"].kept_indices is not None
    )
    try:
        (code,) = (block for block in page.split("```python\n") if "class LongestEmbeddings" in block)
        exec(code.split("```")[0], names)
        tiny.model.generate(**inputs, max_new_tokens=4, do_sample=False)
        record = mmspec.stats(tiny.model, last=True).compression[0]
    finally:
        mmspec.unpatch(tiny.model)
    assert (record.choice, record.num_visual_tokens, record.num_compressed_tokens) == ("longest:16", 16, 16)
