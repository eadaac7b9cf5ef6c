"""Draft heads in the layouts of serving engines, logit for logit with a slow reader of each; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from fake_target import build_first_result
from published_heads import check_changed
from safetensors.torch import load_file
from slow_blocks import SlowBlock
from slow_heads import Sequences, SlowEagle3Head
from spies import spy_on
from torch import Tensor, nn

from mmspec.app.cli.main import main
from mmspec.drafters.checkpoints.export import EXPORT_FORMATS, export_head, refusal
from mmspec.drafters.checkpoints.format import HeadMetadata, compact, save_head
from mmspec.drafters.checkpoints.published import load_published
from mmspec.drafters.checkpoints.published_heads import PUBLISHED_DRAFTERS
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.drafters.heads.dspark.head import DsparkConfig, DsparkHead
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.heads.eagle3.drafter import Eagle3Drafter
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.drafters.heads.flash.head import FlashConfig, FlashDrafter, FlashHead
from mmspec.drafters.registry import build_drafter
from mmspec.interfaces import Prompt, SharedEmbeddings, TargetInfo

H, V, N, PLACEHOLDER = 32, 48, 8, 4
TARGET = TargetInfo("qwen3_vl", H, V, N, name="made/up", media_token_ids=(PLACEHOLDER,))
LLAVA = replace(TARGET, model_type="llava")
CONFIG = EagleConfig(H, 40, 4, 2, V)
DRAFT_IDS = torch.tensor([1, 2, *range(6, 40, 2)])


def build(kind: str, layers: tuple[int, ...] = (2, 4, 5), **changes: Any) -> HeadDrafter:
    """A drafter with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        if kind == "eagle3":
            config = Eagle3Config.of(CONFIG, draft_vocab_size=len(DRAFT_IDS), hidden_state_layers=layers)
            drafter: HeadDrafter = Eagle3Drafter(
                Eagle3Head(replace(config, **changes)),
                "coupled",
                num_layers=N,
                draft_ids=DRAFT_IDS,
                top_k=1,
                max_depth=4,
            )
        else:
            config = DsparkConfig.of(
                CONFIG,
                block_size=4,
                markov_rank=6,
                num_hidden_layers=2,
                hidden_state_layers=layers,
                confidence_head=True,
            )
            drafter = DsparkDrafter(DsparkHead(replace(config, **changes)), num_layers=N, top_k=1)
            for weight in (drafter.head.bigram_head.vocab_proj.weight, drafter.head.mask_embedding):  # type: ignore[union-attr]
                weight.data.normal_()
    for name, weight in drafter.head.named_parameters():
        weight.data.mul_(1.0 if "norm" in name else 1.6)
    return drafter


@pytest.fixture
def embeddings() -> SharedEmbeddings:
    rng = torch.Generator().manual_seed(1)
    embedding = nn.Embedding(V, H, _weight=torch.randn(V, H, generator=rng))
    lm_head = nn.Linear(H, V, bias=False)
    lm_head.weight.data = torch.randn(V, H, generator=rng)
    return SharedEmbeddings(embedding, lm_head)


def draft_chain(drafter: HeadDrafter, embeddings: SharedEmbeddings, embeds: Tensor, states: Tensor, ids: Tensor) -> Any:
    """A chain of 4 drafts after a prompt of len(states) positions, and the raw logits that it comes from.

    Args:
        drafter: with `top_k` 1.
        embeddings: of the target.
        embeds: [n + 1, H] of the prompt and the token after it.
        states: [layers, n, H].
        ids: [n + 1] of the prompt and the token after it.
    """
    n = len(ids) - 1
    layers = dict(zip(drafter.hidden_state_indices, states[:, None], strict=True))
    prompt = Prompt(
        input_ids=ids[None, :n],
        attention_mask=torch.ones(1, n, dtype=torch.bool),
        visual_mask=(ids[None, :n] == PLACEHOLDER),
        position_ids=torch.arange(n)[None],
        hidden_states={0: embeds[None, :n], **layers},
        vocab_size=V,
        shared_embeddings=embeddings,
    )
    state = drafter.begin(prompt)
    drafter.observe(state, build_first_result([int(ids[n])]), {})
    with pytest.MonkeyPatch.context() as patch:
        found = spy_on(patch, type(drafter.head), "logits", lambda logits, *_: logits[0])
        tree = drafter.propose(state, 5, [True])
    return tree.tokens[0, 1:].tolist(), torch.cat(found)


def sequences_of(drafter: HeadDrafter, shared: SharedEmbeddings, states: Tensor, ids: Tensor, **changes: Any) -> Any:
    """What a slow reader needs of the prompt of `draft_chain`."""
    weight, lm_head = shared.embed_tokens.weight, shared.lm_head.weight
    assert isinstance(weight, Tensor) and isinstance(lm_head, Tensor)
    layers = dict.fromkeys(range(N + 1), states[0]) | dict(zip(drafter.hidden_state_indices, states, strict=True))
    positions = [(index, index, index) for index in range(len(ids))]
    text = Sequences(ids, weight[ids], layers, ids == PLACEHOLDER, positions, weight, lm_head)
    return replace(text, **changes)


def read_eagle3(folder: Path, drafter: HeadDrafter, text: Sequences) -> tuple[list[int], Tensor]:
    """A chain of four tokens by the slow reader, and the logits of the draft vocabulary that it comes from."""
    reader = SlowEagle3Head(folder, text)
    reader.layers = drafter.hidden_state_indices
    reader.config["visual_mode"] = drafter.visual_mode
    return reader.chain(len(text.ids), 4, torch.ones(len(DRAFT_IDS), dtype=torch.bool))


@pytest.mark.parametrize("format_name", EXPORT_FORMATS)
@pytest.mark.parametrize("layers", [(2, 4, 5), (1, 3, 7)])
@pytest.mark.parametrize("is_placeholder", [False, True])
@torch.no_grad()
def test_eagle3_equals_the_slow_reader(
    format_name: str, layers: tuple[int, ...], is_placeholder: bool, embeddings: SharedEmbeddings, tmp_path: Path
) -> None:
    drafter = build("eagle3", layers)
    export_head(tmp_path, drafter, TARGET, format_name)
    config, rng = json.loads((tmp_path / "config.json").read_text()), torch.Generator().manual_seed(2)
    ids = torch.randint(6, V, (10,), generator=rng)
    ids[2:5] = PLACEHOLDER
    weight: Tensor = embeddings.embed_tokens.weight  # type: ignore[assignment]
    embeds = weight[ids].clone()
    if is_placeholder:  # as vLLM feeds it
        drafter.visual_mode = "placeholder"
    else:  # as SGLang feeds it
        embeds[2:5] = torch.randn(3, H, generator=rng)
    states = torch.randn(3, 9, H, generator=rng)
    tokens, logits = draft_chain(drafter, embeddings, embeds, states, ids)
    read, expected = read_eagle3(tmp_path, drafter, sequences_of(drafter, embeddings, states, ids, embeds=embeds))
    assert tokens == read and torch.allclose(logits, expected, atol=2e-4)
    named = (config.get("eagle_config", {}) | config).get("eagle_aux_hidden_state_layer_ids")
    if format_name == "speculators":
        assert named == list(layers)
    elif layers == (2, 4, 5):
        assert named is None, "the default of the engines"
    else:
        assert named == [layer - (format_name == "sglang") for layer in layers]
    assert config["norm_before_residual"] is False
    assert load_published(tmp_path, TARGET).visual_mode == ("coupled" if format_name == "sglang" else "placeholder")
    if format_name != "sglang":  # what we write, we read
        again = load_published(tmp_path, TARGET)
        assert again.hidden_state_indices == layers
        own, other = drafter.head.state_dict(), again.head.state_dict()
        assert all(torch.equal(value, other[name]) for name, value in own.items())


def read_block(
    folder: Path, drafter: HeadDrafter, shared: SharedEmbeddings, states: Tensor, ids: Tensor, **options: Any
) -> SlowBlock:
    """The slow reader of a block behind a prompt."""
    given = {"from_anchor": True, "is_neox": True, "layer_offset": 0} | options
    reader = SlowBlock(folder, sequences_of(drafter, shared, states, ids), **given)
    reader.layers = list(drafter.hidden_state_indices)
    return reader


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("format_name", ["vllm", "speculators"])
@torch.no_grad()
def test_dspark_equals_the_slow_reader(
    format_name: str, mixture: bool, embeddings: SharedEmbeddings, tmp_path: Path
) -> None:
    drafter = build("dspark", (1, 3, 7), layer_mixture=mixture)
    assert isinstance(drafter, DsparkDrafter)
    export_head(tmp_path, drafter, TARGET, format_name, embeddings)
    rng = torch.Generator().manual_seed(2)
    ids, states = torch.randint(6, V, (8,), generator=rng), torch.randn(3, 7, H, generator=rng)
    weight: Tensor = embeddings.embed_tokens.weight  # type: ignore[assignment]
    tokens, logits = draft_chain(drafter, embeddings, weight[ids], states, ids)
    reader = read_block(tmp_path, drafter, embeddings, states, ids)
    read, expected = reader.chain(len(ids), 4, torch.ones(V, dtype=torch.bool))
    assert tokens == read and torch.allclose(logits, expected, atol=5e-4)
    bigram_head = drafter.head.bigram_head
    assert bigram_head is not None
    for feature, previous in zip(reader.block(len(ids)), (int(ids[-1]), *read), strict=False):
        table = bigram_head.embed(torch.tensor(previous), embeddings)
        assert torch.allclose(bigram_head.vocab_proj(table), reader.bias(previous), atol=1e-4)
        own = drafter.head.confidence(feature, table).sigmoid()
        assert torch.allclose(own, reader.confidence(feature, previous), atol=1e-4)
    # Ours reads it back, with the target's own LM head as the file has it, and the same drafts.
    again = load_published(tmp_path, TARGET)
    assert isinstance(again, DsparkDrafter) and again.mask_token_id == PLACEHOLDER and again.max_depth == 4
    again.top_k = 1
    masked = SharedEmbeddings(nn.Embedding(V, H, _weight=reader.weights["embed_tokens.weight"]), embeddings.lm_head)
    assert draft_chain(again, masked, weight[ids], states, ids)[0] == tokens


@pytest.mark.parametrize(
    ("changes", "dropped", "problem"),
    [
        ({"mask_token_id": None}, (), "mask_token_id is missing"),
        ({"block_size": None}, (), "block_size is missing"),
        ({"aux_hidden_state_layer_ids": None}, (), "aux_hidden_state_layer_ids .* is missing"),
        ({"aux_hidden_state_layer_ids": [1, 3, 9]}, (), r"aux_hidden_state_layer_ids \[1, 3, 9\] are not all layers"),
        ({"aux_hidden_state_layer_ids": [1, 3]}, (), "fc.weight must be"),
        ({"draft_vocab_size": 20}, (), "draft_vocab_size is 20 of 48, but the map d2t is missing"),
        ({"markov_head_type": "rnn"}, (), "markov_head_type 'rnn' is not supported"),
        ({}, ("norm.weight",), "a DSpark head lacks norm.weight"),
    ],
)
def test_block_heads_that_do_not_fit(
    changes: dict[str, Any], dropped: tuple[str, ...], problem: str, embeddings: SharedEmbeddings, tmp_path: Path
) -> None:
    export_head(tmp_path, build("dspark", (1, 3, 7)), TARGET, "speculators", embeddings)
    check_changed(tmp_path, TARGET, problem, changes, dict.fromkeys(dropped))


@pytest.mark.parametrize(
    ("format_name", "changes", "problem"),
    [
        ("speculators", {"norm_before_residual": None}, "norm_before_residual is missing"),
        ("speculators", {"target_hidden_size": 64}, "hidden_size 64"),
        ("vllm", {"target_hidden_size": 64}, "hidden_size 64"),
        ("vllm", {"hidden_size": 64}, r"must be \[.*\] for this config; got \["),
        ("vllm", {"eagle_aux_hidden_state_layer_ids": [2, 4, 12]}, r"eagle_aux_hidden_state_layer_ids \[2, 4, 12\]"),
        (
            "vllm",
            {"eagle_aux_hidden_state_layer_ids": [2, 4]},
            "eagle_aux_hidden_state_layer_ids names 2 hidden states",
        ),
        ("vllm", {"draft_vocab_size": 30}, r"d2t must be \[30\], as draft_vocab_size says"),
        ("vllm", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 2]}}, r"mrope_section .* got \[2, 1, 2\]"),
        ("vllm", {"rope_scaling": {"type": "mrope"}}, "needs a mrope_section"),
        ("vllm", {"rope_parameters": {"mrope_section": "4"}}, "mrope_section must be a list of integers, one per axis"),
        ("vllm", {"rope_scaling": {"mrope_interleaved": 1}}, "mrope_interleaved must be true or false"),
        ("vllm", {"visual_mode": "decoupled"}, "visual_mode .* got 'decoupled'"),
        ("vllm", {}, f"draft_vocab_size is {len(DRAFT_IDS)} of 48, but the map d2t is missing"),
    ],
)
def test_eagle3_heads_that_do_not_fit(format_name: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    dropped = ("d2t", "t2d") if "the map d2t is missing" in problem else ()
    export_head(tmp_path, build("eagle3"), TARGET, format_name)
    check_changed(tmp_path, TARGET, problem, changes, dict.fromkeys(dropped))


def test_what_no_engine_serves(embeddings: SharedEmbeddings, tmp_path: Path) -> None:
    msd = EagleDrafter(EagleHead(CONFIG), "decoupled", num_layers=N)
    flash = FlashDrafter(
        FlashHead(FlashConfig.of(CONFIG, block_size=3, block_ffn_size=8)), "coupled", num_layers=N, name="flash"
    )
    assert "MSD feeds a visual token as its projected embedding alone" in str(refusal(msd, TARGET, "vllm"))
    assert "no engine serves the architecture of 'flash'" in str(refusal(flash, TARGET, "vllm"))
    assert "SGLang captures no hidden states of 'llava' models" in str(refusal(build("eagle3"), LLAVA, "sglang"))
    assert refusal(build("eagle3"), LLAVA, "vllm") is None and refusal(build("eagle3"), TARGET, "sglang") is None
    normed = build("eagle3", norm_before_residual=True)
    assert "norm_before_residual" in str(refusal(normed, TARGET, "sglang")) and refusal(normed, TARGET, "vllm") is None
    for trained, served in (
        ("coupled", "sglang"),
        ("placeholder", "vllm"),
        ("mixed", "sglang vllm"),
        (None, "sglang vllm"),
    ):
        head = build("eagle3")
        head.trained_visual_mode = trained
        for format_name in EXPORT_FORMATS:
            reason = refusal(head, TARGET, format_name)
            is_served = format_name in served or (format_name == "speculators" and "vllm" in served)
            assert reason is None if is_served else f"trained with {trained}" in str(reason)
    for layers in ((4, 2, 5), (0, 2, 4), (2, 4, 8)):
        assert f"--set layers={','.join(map(str, layers))}" in str(refusal(build("eagle3", layers), TARGET, "vllm"))
    assert "a head with fc_norm is read from" in str(refusal(build("eagle3", fc_norm=True), TARGET, "vllm"))
    windows = build("dspark", sliding_windows=(4, 0))
    assert "a head with sliding_windows is read from" in str(refusal(windows, TARGET, "vllm"))
    assert "layout of its own" in str(refusal(build("dspark"), TARGET, "sglang"))
    text_only = DsparkDrafter(build("dspark").head, "text_only", num_layers=N)  # type: ignore[arg-type]
    assert "'text_only'" in str(refusal(text_only, TARGET, "vllm"))
    with pytest.raises(ValueError, match="name the target"):
        export_head(tmp_path, build("dspark"), TARGET, "vllm")
    with pytest.raises(ValueError, match="the format must be one of vllm, sglang, speculators; got 'onnx'"):
        export_head(tmp_path, build("eagle3"), TARGET, "onnx")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    """Weights that were stored in bfloat16 are exported in it, others in float32."""
    drafter = build("eagle3")
    metadata = HeadMetadata(
        drafter.head.config, "coupled", N, "llava", draft_ids=DRAFT_IDS, architecture="eagle3", facts={"target": "a/b"}
    )
    save_head(tmp_path / "run" / "eagle3", drafter.head, metadata)
    assert main(["export", str(tmp_path / "run"), "--format", "vllm", "--out", str(tmp_path / "out")]) == 0
    assert "eagle3 for vllm" in capsys.readouterr().out
    stored, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("run/eagle3", "out"))
    assert torch.equal(exported["fc.weight"], stored["fc.weight"]) and exported["fc.weight"].dtype == torch.bfloat16
    assert compact({"a": torch.tensor([0.1])})["a"].dtype == torch.float32
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and values["draft_vocab_size"] == len(DRAFT_IDS)
    assert main(["export", str(tmp_path / "run"), "--format", "sglang", "--out", str(tmp_path / "no")]) == 2
    assert "SGLang captures no hidden states of 'llava' models" in capsys.readouterr().err
    save_head(tmp_path / "run" / "msd", EagleHead(CONFIG), HeadMetadata(CONFIG, "decoupled", N))
    assert main(["export", str(tmp_path / "run"), "--format", "vllm", "--out", str(tmp_path / "no")]) == 2
    assert "heads in it: eagle3, msd" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run" / "msd"), "--format", "vllm", "--out", str(tmp_path / "no")]) == 2
    assert "MSD feeds" in capsys.readouterr().err and not (tmp_path / "no").exists()
    own = str(tmp_path / "run" / "msd")
    assert main(["export", own, "--format", "vllm", "--out", own]) == 2
    assert main(["export", str(tmp_path), "--format", "vllm", "--out", str(tmp_path / "no")]) == 2


def test_auto_tries_the_published_heads_of_a_target_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_head(tmp_path, build("eagle3"), TARGET, "sglang")
    requested: list[str] = []

    def cache(name: str, **options: Any) -> str:
        requested.append(name)
        if "eagle3" not in name:
            raise RuntimeError("not in the cache")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cache)
    found = build_drafter("auto", replace(TARGET, name="Qwen/Qwen2.5-VL-7B-Instruct"))
    assert requested == ["JLKang/ViSpec-Qwen2.5-VL-7B-Instruct", "Rayzl/qwen2.5-vl-7b-eagle3-sgl"]
    assert isinstance(found, EagleDrafter) and isinstance(found.head, Eagle3Head)
    assert all(isinstance(names, tuple) and names for names in PUBLISHED_DRAFTERS.values())
