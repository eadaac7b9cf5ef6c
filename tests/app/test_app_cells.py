"""Cells of tables: where they are decoded, and what each kind of cell becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_app_inputs import content_of, picture

from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import SourceOptions


def nested_dataset(datasets: Any) -> Any:
    """A dataset with pictures in lists and structs; the second of its three rows holds no picture but junk."""
    image = datasets.Image()
    features = {"image": image, "images": [image], "struct": {"image": image}, "deep": [{"views": [image]}]}
    cells = [{"bytes": data, "path": None} for data in (picture(), b"junk", picture(50))]
    rows = {
        "image": cells,
        "images": [[cell] for cell in cells],
        "struct": [{"image": cell} for cell in cells],
        "deep": [[{"views": [cell, cell]}] for cell in cells],
    }
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.mark.parametrize("column", ["image", "images", "struct", "deep"])
@pytest.mark.parametrize("streamed", [False, True])
def test_no_picture_of_a_dataset_is_decoded_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, streamed: bool
) -> None:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    saved = nested_dataset(datasets)
    name = str(tmp_path / "saved")
    if streamed:
        load, file = datasets.load_dataset, str(tmp_path / "t.parquet")
        saved.to_parquet(file)
        monkeypatch.setattr(
            datasets,
            "load_dataset",
            lambda _, **options: load("parquet", data_files=file, **options | {"revision": None}),
        )
        name = "hf://datasets/owner/name"
    else:
        saved.save_to_disk(name)

    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("a picture is decoded in the main process")

    monkeypatch.setattr("PIL.Image.open", decode)
    inputs = Inputs([name], SourceOptions(tmp_path, image_column=column))
    inputs.check()
    found = list(inputs.rows(lambda ident: False))
    assert [item.id.rpartition("#")[2] for item in found] == ["0", "1", "2"], (
        "each row, also after one without a picture"
    )
    if column == "image":
        assert [content_of(item) for item in found] == [picture(), b"junk", picture(50)]
