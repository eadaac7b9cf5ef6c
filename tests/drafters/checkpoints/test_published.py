"""Published drafters: every layout key by key, forward parity with the authors' code, and files that do not fit."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from spies import spy_on
from torch import Tensor, nn

from mmspec.app.modeling.random_models import random_model
from mmspec.drafters.checkpoints.export import export_head
from mmspec.drafters.checkpoints.published import load_published
from mmspec.drafters.checkpoints.published_heads import PUBLISHED_DRAFTERS
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle3.checkpoint import export_eagle3
from mmspec.drafters.heads.eagle3.head import Eagle3Head
from mmspec.drafters.heads.vispec.head import VispecDrafter
from mmspec.drafters.registry import HEAD_FILES, build_drafter
from mmspec.engine.tree import root_only
from mmspec.interfaces import Prompt, SharedEmbeddings, TargetInfo, VerifyResult
from mmspec.resolve import target_info
from mmspec.targets.registry import find_adapter

FIXTURES = Path(__file__).parents[2] / "fixtures"
H, V = 16, 48
TARGET = TargetInfo("llava", H, V, 8, media_token_ids=(4,))
FLAT = {
    "hidden_size": H, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 1, "vocab_size": V, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "hidden_act": "silu", "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **FLAT},
    "msd": {"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava", "image_token_index": -200, **FLAT},
    "vispec": {"model_type": "llava_next", "image_token_id": 4, **FLAT},
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20, "model_type": "llama", **FLAT},
}


def load_fixture(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, everything else) of a fixture."""
    whole = load_file(FIXTURES / f"{kind}.safetensors")
    weights = {name.removeprefix("weights."): value for name, value in whole.items() if name.startswith("weights.")}
    return weights, {name: value for name, value in whole.items() if not name.startswith("weights.")}


def folder_of(kind: str, folder: Path, change: Callable[[dict[str, Tensor]], object] = len, **config: Any) -> Path:
    """A checkpoint as its authors lay it out."""
    weights, data = load_fixture(kind)
    if kind != "eagle3":
        weights["embed_tokens.weight"] = data["embedding"].clone()
    change(weights)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | config))
    return folder


class Pointing(nn.Module):
    """A head that finds the same ids likeliest whatever it is given."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(V, H))
        self.fixed = torch.zeros(V).index_fill_(0, torch.tensor(ids), 9.0) + torch.arange(V) * -1e-3

    def forward(self, states: Tensor) -> Tensor:
        return self.fixed.expand(*states.shape[:-1], V)


@pytest.mark.parametrize("kind", CONFIGS)
def test_forward_parity_with_the_published_code(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through our whole drafter: prompt, a round with one accepted draft, and the siblings of the next tree."""
    drafter = load_published(folder_of(kind, tmp_path), TARGET)
    _, data = load_fixture(kind)
    has_images = kind in ("msd", "vispec")
    order = data["tree"].tolist()
    shared_embeddings = SharedEmbeddings(nn.Embedding.from_pretrained(data["embedding"]), Pointing(order))
    outs = spy_on(monkeypatch, type(drafter.head), "forward")
    if kind == "eagle3":  # its own head decides
        draft_index = {int(token): index for index, token in enumerate(drafter.draft_ids.tolist())}  # type: ignore[union-attr]
        own = Pointing([draft_index[token] for token in order])
        monkeypatch.setattr(drafter.head, "logits", lambda out, shared_embeddings, rows: own(out)[..., :20])
    drafter.max_levels, drafter.top_k = 2, 3
    ids, n = data["ids"], 10
    embedded = data["embedded"] if has_images else data["embedding"][ids]
    visual = data["visual"] if has_images else torch.zeros(n, dtype=torch.bool)
    taps = _split(drafter, data["states"])
    prompt = Prompt(
        input_ids=ids[None],
        attention_mask=torch.ones(1, n, dtype=torch.bool),
        visual_mask=visual[None],
        position_ids=torch.arange(n)[None],
        hidden_states={0: embedded[None], **taps},
        vocab_size=V,
        shared_embeddings=shared_embeddings,
    )
    state = drafter.begin(prompt)
    one = torch.ones(1, dtype=torch.long)
    first = data["first"].view(1, 1)
    drafter.observe(state, VerifyResult(root_only(1), one[None] * 0, one, first, [first[0].tolist()], [[0]]), {})
    drafter.read_prompt(state)
    drafter.read_pending(state)
    left = data["prefill"].abs().sum(-1) > 0  # ViSpec puts zeros where it took rows out
    assert left.sum() == (8 if kind == "vispec" else 10)
    # Only the output at the last position of a prompt is computed; keys and values of the others matter below.
    assert torch.allclose(outs[0][0], data["prefill"][left][-1:], atol=2e-5)
    later = data["later"]
    path = torch.tensor([[0, 1]])
    drafter.observe(
        state,
        VerifyResult(root_only(1), path, one * 2, later[None], [later.tolist()], [[0, 1]]),
        _split(drafter, data["later_states"]),
    )
    tree = drafter.propose(state, 4, [True])
    assert torch.allclose(outs[1][0], data["step"], atol=2e-5)
    best = shared_embeddings.lm_head.fixed.topk(3).indices.tolist()  # type: ignore[union-attr,operator]
    back = [best.index(token) for token in order]
    assert sorted(tree.tokens[0, 1:].tolist()) == sorted(order)
    assert torch.allclose(outs[2][0][back], data["branch"], atol=2e-5)


def _split(drafter: EagleDrafter, states: Tensor) -> dict[int, Tensor]:
    """{tap: [1, n, H]}"""
    parts = states[None].split(H, dim=-1)
    return dict(zip(drafter.hidden_state_indices, parts, strict=True))


def test_eagle3_uses_its_own_norm_and_lm_head(tmp_path: Path) -> None:
    drafter = load_published(folder_of("eagle3", tmp_path), TARGET)
    _, data = load_fixture("eagle3")
    assert isinstance(drafter.head, Eagle3Head) and drafter.draft_ids is not None
    shared_embeddings = SharedEmbeddings(nn.Embedding(V, H), nn.Linear(H, V))
    assert torch.allclose(drafter.head.logits(data["prefill"], shared_embeddings, None), data["logits"], atol=1e-5)
    weights, _ = load_fixture("eagle3")
    assert drafter.draft_ids.tolist() == (torch.arange(20) + weights["d2t"]).tolist()
    assert weights["t2d"].nonzero().flatten().tolist() == drafter.draft_ids.tolist()
    assert drafter.hidden_state_indices == (2, 4, 5) and drafter.requirements.hidden_state_indices == (0, 2, 4, 5)


def test_drafter_of_each_layout(tmp_path: Path) -> None:
    kinds = {
        "eagle": ("coupled", EagleDrafter),
        "msd": ("decoupled", EagleDrafter),
        "vispec": ("coupled", VispecDrafter),
    }
    for kind, (visual_mode, form) in kinds.items():
        drafter = load_published(folder_of(kind, tmp_path / kind), TARGET)
        assert (
            type(drafter) is form
            and drafter.visual_mode == visual_mode
            and drafter.name == kind
            and drafter.vocab_limit is None
        )
        state, weights = drafter.head.state_dict(), load_fixture(kind)[0]
        assert torch.equal(state["fc.weight"], weights["fc.weight"])
        joined = [weights[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(state["layer.qkv_proj.weight"], torch.cat(joined))
        assert torch.equal(state["layer.post_norm.weight"], weights["layers.0.post_attention_layernorm.weight"])


def test_a_pickle_is_loaded_without_executing_it(tmp_path: Path) -> None:
    folder = folder_of("msd", tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    drafter = load_published(folder, TARGET)
    assert torch.equal(drafter.head.fc.weight, weights["fc.weight"])

    class Harm:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return (Path.write_text, (tmp_path / "harm.txt", "done"))

    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"fc.weight": Harm()}, file)
    with pytest.raises(ValueError, match="damaged, or holds more than tensors"):
        load_published(folder, TARGET)
    torch.save({"fc.weight": Harm()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="damaged, or holds more than tensors"):
        load_published(folder, TARGET)
    assert not (tmp_path / "harm.txt").exists()
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold a dict of tensors"):
        load_published(folder, TARGET)
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:50])
    with pytest.raises(ValueError, match="damaged"):
        load_published(folder, TARGET)


def test_a_smaller_vocabulary_is_a_prefix_of_the_targets(tmp_path: Path) -> None:
    """LLaVA: the drafter knows 32,000 ids, transformers' target has 32,064."""
    folder = folder_of("msd", tmp_path)
    assert load_published(folder, TargetInfo("llava", H, V + 64, 8)).vocab_limit == V
    with pytest.raises(ValueError, match="not the same vocabulary"):
        load_published(folder, TargetInfo("llava", H, V + 5000, 8))


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("kind", "change", "config", "message"),
    [
        ("msd", lambda w: w.pop("layers.0.self_attn.o_proj.weight"), {}, "lacks layers.0.self_attn.o_proj.weight"),
        ("msd", lambda w: w.update(options=torch.zeros(1)), {}, "unexpected tensors options"),
        ("msd", lambda w: w["fc.bias"].fill_(float("inf")), {}, "fc.bias holds values that are not finite"),
        ("msd", lambda w: w.update({"fc.weight": torch.zeros(H, H)}), {}, r"fc.weight must be \[16, 32\]"),
        (
            "msd",
            lambda w: w.update({"embed_tokens.weight": torch.zeros(V, 5)}),
            {},
            r"embed_tokens.weight must be \[V, 16",
        ),
        ("msd", lambda w: w.update({"embed_tokens.weight": torch.zeros(9, H)}), {}, "embed_tokens.weight has 9 rows"),
        ("msd", len, {"hidden_size": 32}, "for a target of hidden_size 32; the target has 16"),
        ("msd", len, {"intermediate_size": None}, "lacks intermediate_size"),
        ("msd", len, {"rope_scaling": {"type": "dynamic"}}, "rope_scaling of type 'dynamic'"),
        ("msd", lambda w: w.pop("fc.weight"), {}, "fc.weight is missing"),
        ("vispec", lambda w: w.update({"imadpt.q": torch.zeros(2, 3, 4)}), {}, r"imadpt.q must be \[queries, 4, 4\]"),
        ("vispec", lambda w: w.pop("img_fc.weight"), {}, "lacks img_fc.weight"),
        ("eagle3", lambda w: w.pop("norm.weight"), {}, "lacks norm.weight"),
        ("eagle3", lambda w: w.update(d2t=torch.zeros(5, dtype=torch.long)), {}, r"d2t must be \[20\]"),
        ("eagle3", lambda w: w["d2t"].fill_(99), {}, "d2t leads to id 118"),
        ("eagle3", lambda w: w["t2d"].fill_(True), {}, "t2d and d2t name different ids"),
        ("vispec", lambda w: w["imadpt.q"].fill_(float("nan")), {}, "imadpt.q holds values that are not finite"),
        ("vispec", lambda w: w["fc.weight"].fill_(float("nan")), {}, "fc.weight holds values that are not finite"),
        ("eagle3", lambda w: w["norm.weight"].fill_(float("nan")), {}, "norm.weight holds values that are not finite"),
        ("msd", len, {"image_token_index": 7}, "image_token_index 7; the target's media token ids are 4"),
        ("eagle3", len, {"image_token_id": 7}, "image_token_id 7; the target's media token ids are 4"),
        ("eagle3", len, {"fc_norm": True}, r"lacks fc_norm\.0\.weight"),
        ("eagle3", len, {"target_hidden_size": 64}, "hidden_size 64"),
        ("eagle3", len, {"speculators_model_type": "mlp"}, "'mlp' is not supported"),
        ("eagle3", len, {"eagle_aux_hidden_state_layer_ids": [2, 4, 99]}, "this target, which has 0 to 8"),
    ],
)
def test_mismatches_are_refused(
    kind: str, change: Change, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = folder_of(kind, tmp_path, change, **config)
    with pytest.raises(ValueError, match=message) as failed:
        load_published(folder, TARGET)
    assert str(folder) in str(failed.value)


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_published(tmp_path, TARGET)
    folder = folder_of("msd", tmp_path)
    (folder / "model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_published(folder, TARGET)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds neither model"):
        load_published(folder, TARGET)


def test_an_export_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = load_published(folder_of("eagle3", tmp_path / "flat"), TARGET)
    export_eagle3(tmp_path / "out", drafter, TARGET, "speculators")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

    def full(weights: Any, file: Path, **options: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mmspec.drafters.checkpoints.format.save_file", full)
    with pytest.raises(OSError, match="No space"):
        export_eagle3(tmp_path / "out", drafter, TARGET, "speculators")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_target_info_has_the_media_token_ids() -> None:
    model, _ = random_model("tiny")
    assert target_info(find_adapter(model), None).media_token_ids == (4,)


KNOWN_TARGET = TargetInfo("llava", H, V, 8, name="llava-hf/llava-1.5-7b-hf")


def test_auto_uses_a_cached_published_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[str, bool]] = []
    folder = folder_of("msd", tmp_path)

    def cache(name: str, *, local_files_only: bool, allow_patterns: list[str]) -> str:
        assert allow_patterns == list(HEAD_FILES)
        requested.append((name, local_files_only))
        return str(folder)

    def empty(name: str, **options: Any) -> str:
        requested.append((name, options["local_files_only"]))
        raise RuntimeError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cache)
    assert isinstance(build_drafter("auto", KNOWN_TARGET), EagleDrafter)
    assert build_drafter("auto", TARGET).name == "arbitrated", "nothing was published for it"
    assert isinstance(build_drafter("lucylyn/MSD-LLaVA1.5-7B", KNOWN_TARGET), EagleDrafter)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", empty)
    assert build_drafter("auto", KNOWN_TARGET).name == "arbitrated"
    with pytest.raises(OSError, match=r"'a/b' is not in the local cache and cannot be downloaded: not in the cache"):
        build_drafter("a/b", KNOWN_TARGET)
    hub, *others = PUBLISHED_DRAFTERS[KNOWN_TARGET.name]
    wanted = [(hub, True), (hub, False), *((name, True) for name in (hub, *others)), ("a/b", False)]
    assert requested == wanted, "auto never fetches anything"


def test_offline_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="'nobody/nothing-of-mmspec' is not in the local cache"):
        build_drafter("nobody/nothing-of-mmspec", TARGET)


@pytest.mark.parametrize("normed", [False, True])
def test_eagle3_in_the_speculators_layout_and_back(normed: bool, tmp_path: Path) -> None:
    first = load_published(folder_of("eagle3", tmp_path / "flat", norm_before_residual=normed), TARGET)
    export_eagle3(tmp_path / "out", first, TARGET, "speculators")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["speculators_model_type"] == "eagle3" and values["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert values["norm_before_residual"] is normed and values["transformer_layer_config"]["hidden_size"] == H
    weights, flat = load_file(tmp_path / "out" / "model.safetensors"), load_fixture("eagle3")[0]
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in flat.items()}
    assert set(weights) == set(renamed)
    assert all(torch.equal(weights[name].float(), value.float()) for name, value in renamed.items())
    second = load_published(tmp_path / "out", TARGET)
    assert second.head.config == first.head.config and second.hidden_state_indices == first.hidden_state_indices
    for name, value in first.head.state_dict().items():
        assert torch.equal(value, second.head.state_dict()[name])
    msd = load_published(folder_of("msd", tmp_path / "msd"), TARGET)
    msd.own_embeddings = None
    with pytest.raises(ValueError, match="MSD feeds a visual token as its projected embedding alone"):
        export_head(tmp_path / "no", msd, TARGET, "speculators")


def test_the_default_layers_of_a_small_target(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 0 to 2"):
        load_published(folder_of("eagle3", tmp_path), TargetInfo("llava", H, V, 2))
