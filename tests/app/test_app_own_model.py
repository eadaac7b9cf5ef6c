"""`mmspec demo --model FOLDER`: the page says what the model is, and nothing that holds for the bundled one only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("gradio")

from PIL import Image

from mmspec.app.errors import UsageError
from mmspec.app.io.images import load_image
from mmspec.app.modeling.random_models import tiny_model
from mmspec.app.scenes.domain_check import OUT_OF_DOMAIN_HINT
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui.comparison import ComparisonRun
from mmspec.app.ui.comparison_stream import Conversation, build_result
from mmspec.app.ui.context import Context
from mmspec.app.ui.loaded_model import dtype_name, format_model_size
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.render import render_sentence
from mmspec.app.ui.report import TempStorage
from mmspec.app.ui.server import build_app
from mmspec.app.ui.tabs.batch import OUT_OF_DOMAIN_NOTE, format_progress, stream_batch
from mmspec.app.ui.tabs.learning import render_steps, stream_learning
from mmspec.app.ui.worker import CancelSignal, Client

ONLY_OF_THE_BUNDLED = re.compile(r"\bscenes?\b|\btoy\b|built-in model|training text|trained on|30 to 60", re.IGNORECASE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "my-model")


@pytest.fixture
def context(folder: Path) -> Iterator[Context]:
    context = Context(ModelStore(str(folder)), TempStorage())
    yield context
    context.worker.close()
    context.temp_storage.close()


def compare(context: Context, image: Image.Image, **settings: object) -> ComparisonRun:
    chosen = RunSettings(context.model_store.model_names[0], max_new_tokens=16, **settings)  # type: ignore[arg-type]
    run = ComparisonRun(context.model_store, image, (), "what is it?", chosen, CancelSignal(math.inf))
    return run.run()


def test_folders_have_the_names_of_folders(folder: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "hybrid"
    drafter.mkdir()
    store = ModelStore(str(folder), str(drafter))
    assert (
        store.model_names == ["my-model"]
        and store.drafter_names[0] == "hybrid (folder)"
        and "hybrid" in store.drafter_names
    )
    assert ModelStore("org/model").model_names == ["org/model"]


def test_the_page_of_an_own_model(context: Context, folder: Path) -> None:
    config = json.dumps(build_app(context).get_config_file(), default=str)
    assert str(folder) not in config, "no path of the server"
    words = re.sub(r'"[^"]*/[^"]*\.(png|mp4)"|/[\w/.-]*examples/[\w.-]+', "", config)  # addresses of the example files
    assert ONLY_OF_THE_BUNDLED.findall(words) == []
    assert context.model_store.model_names == [str(context.model_store.model_names[0])], "no other model"
    with pytest.raises(UsageError):
        context.model_store.check_names("scenes", "auto")
    assert ONLY_OF_THE_BUNDLED.search(render_steps(ModelStore()) + OUT_OF_DOMAIN_NOTE + OUT_OF_DOMAIN_HINT)


def test_it_says_what_the_model_is(context: Context, folder: Path) -> None:
    run = compare(context, Image.effect_noise((80, 60), 90).convert("RGB"))  # no flat background
    assert run.loaded_model is not None
    count = sum(weight.numel() for weight in run.loaded_model.model.parameters())
    said = f"llava, {count:,} parameters, float32"
    assert run.loaded_model.description == said == context.model_store.descriptions["my-model"]
    result = build_result(run, Conversation())
    assert result.note == "" and result.report.metrics["run"]["description"] == said
    sentence = render_sentence(str(folder), "auto", "cpu", said)
    assert f"<b>my-model</b> ({said}) on cpu" in sentence and str(folder) not in sentence
    assert "&lt;x&gt;" in render_sentence("m", "auto", "cpu", "<x>")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (65_432, "65,432"), (999_999, "999,999"), (14_300_000, "14 million"), (2_250_000, "2.2 million"),
     (7_063_427_072, "7.1 billion"), (72_000_000_000, "72 billion")],
)  # fmt: skip
def test_sizes_in_words(count: int, text: str) -> None:
    assert format_model_size(count) == text
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_a_batch_has_its_speedup_and_no_note(context: Context, tmp_path: Path) -> None:
    files = []
    for number in range(6):
        files.append(tmp_path / f"{number}.png")
        Image.effect_noise((60, 60 + number), 90).convert("RGB").save(files[-1])
    settings = (context.model_store.model_names[0], "recycling", "none", 0, 0, 8)
    uploads = [{"path": str(file)} for file in files]
    batch = [one for one, _ in stream_batch(context, uploads, "", settings, Client("me"))][-1]
    text = format_progress(batch, False)
    assert batch.comparison is not None and batch.comparison.rows == batch.comparison.identical == 4
    assert re.search(r"In all [0-9.]+x the speed of plain generate, which described 4 files too \(4 of 4", text)
    assert batch.num_out_of_domain == 0 and not ONLY_OF_THE_BUNDLED.search(text)
    assert [row["identical"] for row in batch.rows] == [True] * 4 + [None] * 2


def test_it_is_asked_a_plain_question_while_it_learns(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmspec.app.modeling import chat

    asked, build = [], chat.build_inputs
    monkeypatch.setattr(chat, "build_inputs", lambda *args: asked.append(args[3][0]) or build(*args))
    model = context.model_store.model_names[0]
    run = [one for one, _ in stream_learning(context, model, "instant", 1, 0, Client("me"))][-1]
    assert run.num_done == 1 and set(asked) == {"Describe the image."}


def test_a_copy_of_the_model_in_few_bits_is_a_lane() -> None:
    store = ModelStore("tiny")
    assert "quantized" in store.drafter_names
    image = load_image(list_example_files()[0])
    settings = RunSettings("tiny", "quantized", max_new_tokens=24, tree_size=4, more_drafters=("recycling",))
    run = ComparisonRun(store, image, (), "what is it?", settings, CancelSignal(math.inf)).run()
    assert run.identical and run.mmspec.resolved_drafter == "quantized" and run.mmspec.stats.drafted_rounds > 0
    assert "drafts (" in run.credit(run.mmspec).sentence
