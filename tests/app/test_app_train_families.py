"""`mmspec train` on tiny models of other families than LLaVA: what it trains on, and that its heads draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
import zoo
from fuzz import patch_model
from tiny_processor import TinyProcessor
from torch import Tensor, nn
from transformers import PreTrainedModel

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import Request
from mmspec.app.train.heads import target_head_config
from mmspec.drafters.checkpoints.format import load_head
from mmspec.drafters.heads.eagle.head import EagleHead
from mmspec.drafters.heads.registry import recipes
from mmspec.targets.registry import find_adapter


def available(*families: str) -> list[str]:
    """Those that the installed transformers has."""
    return [family for family in families if family in zoo.ROWS]


GRIDS = available("qwen3_vl", "gemma3", "smolvlm", "internvl", "mistral3")
TRAINED = [*GRIDS, *available("qwen3_5", "paligemma", "gemma4")]
READ = [*GRIDS, *available("qwen3_5", "paligemma", "gemma4", "ernie4_5_vl_moe", "glm4v")]
SCALED = available(
    *("gemma2", "gemma3", "gemma4", "paligemma", "granite", "hyperclovax_vision_v2"),
    *("cohere2", "cohere_compass", "aya_vision", "cohere2_vision", "qwen3_vl", "mistral3"),
)
"""Scaled embeddings, scaled or capped logits, and settings of these that their models ignore."""
IMAGES = [render_scene(generate_scene(number)) for number in range(4)]
STEPS = 20
TIED = ("gemma3", "smolvlm")


def build_model(family: str, **changes: Any) -> PreTrainedModel:
    """A tiny model that never ends and never generates special ids."""
    spec = tiny.ModelSpec(family, seed=1, calm=True, **changes)
    model = tiny.build_model(spec)
    special = tiny.special_ids(spec)
    model.generation_config.eos_token_id = None
    model.generation_config.suppress_tokens = sorted(set(range(spec.vocab)) - set(special.text))
    return model


def train(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    model: PreTrainedModel,
    *flags: str,
    steps: int = STEPS,
    num_images: int = 3,
) -> int:
    """`mmspec train` on images and an untouched model; the run is in `folder`/run."""
    rows = []
    for number in range(num_images):
        IMAGES[number % len(IMAGES)].save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "prompt": "abcd"[number % 3 :]})
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("mmspec.app.modeling.load.load_model", lambda *args: (model, TinyProcessor(model)))
    args = ["train", "--target", "any", "--data", str(folder / "list.jsonl"), "--out", str(folder / "run")]
    args += ["--steps", str(steps), "--batch-size", "3", "--max-new-tokens", "16", "--lr", "0.02", "--evaluate", "0"]
    return main([*args, *flags])


def generate_twice(model: PreTrainedModel, folder: Path, **options: Any) -> Any:
    """Metrics of a call with the head in `folder`, whose output equals that of plain `generate`."""
    inputs = TinyProcessor(model)(["a<image>bad", "deaf <image>cab"], IMAGES[:2])
    limits: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(**inputs, **limits)
    with patch_model(model, drafter=str(folder), tree_size=8, **options):
        assert torch.equal(model.generate(**inputs, **limits), plain)
        return mmspec.stats(model, last=True)


def losses(folder: Path, name: str) -> list[float]:
    """The loss of one head in the log of a run."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row[f"{name}/loss"] for row in rows]


@pytest.mark.every(3)
@pytest.mark.parametrize("family", TRAINED)
def test_heads_of_other_families_learn_and_draft(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(family, tied=family in TIED)
    assert train(monkeypatch, tmp_path, model, "--drafter", "msd,flash", "--set", "ttt_steps=2") == 0
    for name in ("msd", "flash"):
        first, *_, last = losses(tmp_path / "run", name)
        assert last < 0.8 * first
        assert load_head(tmp_path / "run" / name)[1].model_type == family
        stats = generate_twice(model, tmp_path / "run" / name)
        assert stats.num_draft_tokens > 0 and not stats.fallback_calls


@pytest.mark.every(2)
@pytest.mark.parametrize("family", GRIDS)
def test_compressors_of_other_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that merges a grid is stored with the head; one that selects tokens is chosen instead."""
    model = build_model(family)
    assert train(monkeypatch, tmp_path, model, "--compressor", "pool:2", steps=1) == 0
    for chosen in ({}, {"compressor": "stride:2"}):
        stats = generate_twice(model, tmp_path / "run" / "msd", **chosen)
        assert stats.num_draft_tokens > 0 and len(stats.compression) == 2
        for record in stats.compression:
            assert record.choice == chosen.get("compressor", "pool:2")
            assert 1 <= record.num_compressed_tokens <= 2 < record.num_visual_tokens
            assert sum(grid.num_tokens for grid in record.grids) == record.num_visual_tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", available("qwen3_vl", "gemma3", "smolvlm", "internvl", "qwen3_5"))
@pytest.mark.parametrize(
    "flags",
    [
        ["--set", "draft_vocab=60", "--evaluate", "1"],
        ["--set", "text_first"],
        ["--compressor", "latent:2"],
        ["--compressor", "elastic:2"],
    ],
    ids=" ".join,
)
def test_all_drafters_of_other_families(
    family: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(family)
    several = [name for name, (method, _) in recipes().items() if method.reads_layers]
    of_targets = [name for name, (method, _) in recipes().items() if method.is_of_target]  # which have none here
    runs = [([name for name in recipes() if name not in (*several, *of_targets)], flags)]
    if "--compressor" not in flags:  # which is for heads that read visual tokens and one hidden state
        runs += [(several, [*flags, "--set", "layers=0,1,2"])]
    for number, (names, options) in enumerate(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert train(monkeypatch, folder, model, "--drafter", ",".join(names), *options, steps=2, num_images=10) == 0
        for name in names:
            stats = generate_twice(model, folder / "run" / name)
            assert stats.num_draft_tokens > 0 and not stats.fallback_calls
            if "--evaluate" in flags:
                evaluation = json.loads((folder / "run" / name / "evaluation.json").read_text())
                assert evaluation["requests"] == 1 and evaluation["speed"]["identical"] is True


def test_a_compressor_for_unknown_grids_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model("qwen3_5")
    message = "compressor 'pool' needs the grids of visual tokens, which are unknown for model_type 'qwen3_5'"
    assert train(monkeypatch, tmp_path, model, "--compressor", "pool:3") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        mmspec.patch(model, "lookup", compressor="pool:3")
    mmspec.patch(model, "lookup")
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=2, mmspec={"compressor": "pool:3"})
    mmspec.unpatch(model)
    mmspec.patch(model, "lookup", compressor="stride:3")


@pytest.mark.parametrize("family", READ)
def test_training_reads_the_hidden_states_of_decoding(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward over prompts and answers gives the states that a drafter finds: token types, several position axes,
    bidirectional prompts."""
    monkeypatch.setattr("mmspec.app.train.data.bf16_is_faster", lambda device: False)
    model = build_model(family)
    requests: Any = [Request(IMAGES[0], "abc"), Request((), "bad"), Request(tuple(IMAGES[1:3]), "deaf cab")]
    teacher: Any = Teacher(model, TinyProcessor(model), requests)
    teacher.generate_answers(tmp_path, 2, 6)
    batch = teacher.make_batch([0, 1, 2])
    media_ids = torch.tensor(teacher.media_token_ids)
    for row, request in enumerate(requests):
        inputs = teacher.captioner.build_inputs([request.media], [request.question])
        output = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, output_hidden_states=True, return_dict_in_generate=True
        )
        length = output.sequences.shape[1]
        assert torch.equal(batch.input_ids[row, :length], output.sequences[0])
        assert int(batch.attention_mask[row].sum()) == length
        answer = batch.response_mask[row].nonzero().flatten().tolist()
        assert answer == list(range(inputs["input_ids"].shape[1], length))
        for found, index in ((batch.inputs_embeds, 0), (batch.hidden_states, -1)):
            expected = torch.cat([states[index] for states in output.hidden_states], dim=1)[0]
            assert torch.allclose(found[row, : length - 1], expected, atol=1e-4)
        if family in GRIDS:
            num_tokens = sum(grid.num_tokens for grid in batch.grids if grid.row == row)
            assert (
                num_tokens == int(batch.visual_mask[row].sum()) == int(torch.isin(inputs["input_ids"], media_ids).sum())
            )


def test_answers_end_before_a_placeholder(tmp_path: Path) -> None:
    """Read back, a generated placeholder would have no image."""
    model = build_model("qwen3_vl")
    image_id = model.config.image_token_id
    model.generation_config.suppress_tokens = None
    model.generation_config.forced_eos_token_id = image_id  # the last of the new tokens
    requests: Any = [Request(IMAGES[0], "abc")]
    teacher: Any = Teacher(model, TinyProcessor(model), requests)
    teacher.generate_answers(tmp_path, 1, 4)
    assert 0 < len(teacher.answers[0]) < 4 and image_id not in teacher.answers[0]
    assert int(teacher.make_batch([0]).response_mask.sum()) == len(teacher.answers[0])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SCALED)
def test_shared_embeddings_are_those_of_the_model(family: str, tied: bool) -> None:
    """Embeddings as the first layer receives them, logits as the model returns them: with their scales and caps."""
    model = build_model(family, tied=tied)
    adapter = find_adapter(model)
    shared = adapter.shared_embeddings
    inputs = tiny.build_inputs(model, 3, 2)
    with torch.no_grad():
        outputs = model(**inputs, output_hidden_states=True)
        ids = inputs["input_ids"]
        is_text = inputs["attention_mask"].bool() & ~torch.isin(ids, torch.tensor(adapter.media_token_ids))
        assert torch.allclose(shared.embed(ids)[is_text], outputs.hidden_states[0][is_text], atol=1e-5)
        assert torch.allclose(shared.logits(outputs.hidden_states[-1]), outputs.logits, atol=1e-4)
        some = torch.tensor([1, 5, 9])
        few = shared.logits(outputs.hidden_states[-1], shared.lm_head_rows(some))
    assert torch.allclose(few, outputs.logits[..., some], atol=1e-4)


@pytest.mark.parametrize("family", available("hyperclovax_vision_v2"))
def test_drafting_reads_scaled_embeddings(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of emitted and drafted tokens, as in training."""
    model = build_model(family)
    assert train(monkeypatch, tmp_path, model, steps=1) == 0
    read: list[Tensor] = []
    fuse = EagleHead.fuse

    def spy(head: EagleHead, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        read.append(inputs_embeds.flatten(0, -2))
        return fuse(head, inputs_embeds, hidden_states)

    monkeypatch.setattr(EagleHead, "fuse", spy)
    assert generate_twice(model, tmp_path / "run" / "msd", backend="torch").num_draft_tokens > 0
    weight: Any = model.get_input_embeddings().weight
    text_embeds = model.config.text_config.embedding_multiplier * weight
    prompt, *rounds = read
    assert model.config.text_config.embedding_multiplier != 1
    assert len(prompt) and float(torch.cdist(torch.cat(rounds), text_embeds).amin(1).max()) < 0.05


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"intermediate_size": [64, 96]}, 96),
        ({"intermediate_size": None, "moe_intermediate_size": 16, "num_experts_per_tok": 4}, 64),
        ({"intermediate_size": None}, 128),
    ],
)
def test_the_width_of_a_head_follows_the_target(changes: dict[str, Any], size: int) -> None:
    model: Any = build_model("qwen3_vl")
    model.config.text_config.__dict__.update(changes)  # the config classes accept it in other families only
    assert target_head_config(model, None).intermediate_size == size
    assert target_head_config(model, 48).intermediate_size == 48


def test_the_head_of_a_target_with_different_layers() -> None:
    """The last layer of Gemma 4 has full attention, with fewer and larger heads."""
    config = target_head_config(build_model("gemma4"), None)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 16)
    assert config.rope_theta == 1_000_000


@pytest.mark.parametrize("rows", [112, 128])
def test_an_lm_head_with_other_rows_than_the_embedding(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are added to multiples that are fast; the embedding has 120."""
    model: Any = build_model("internvl")
    lm_head = nn.Linear(model.config.text_config.hidden_size, rows, bias=False)
    lm_head.weight.data.zero_()[:120] = model.lm_head.weight.data[:rows]
    model.lm_head = lm_head.requires_grad_(False)
    assert train(monkeypatch, tmp_path, model, "--drafter", "msd,flash", steps=1) == 0
    for name in ("msd", "flash"):
        assert generate_twice(model, tmp_path / "run" / name).num_draft_tokens > 0
