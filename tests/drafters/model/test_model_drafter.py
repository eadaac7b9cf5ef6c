"""Another model drafts: exact in random calls, its cache follows the output, and other tokenizers are aligned."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from draft_models import ScriptedSource, build_draft_model, train_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

import mmspec
from mmspec.drafters.model.build import build_model_drafter
from mmspec.drafters.model.model_drafter import ModelDrafter, _common_length
from mmspec.drafters.model.retokenizing import RetokenizingDrafter, decode_text, encode_text, same_tokenizer
from mmspec.engine.tree import DraftTree, root_only
from mmspec.interfaces import Prompt, TargetInfo, VerifyResult
from mmspec.targets.draft_model import HFDraftModel, is_model_folder

FAMILIES = ("llava", "qwen2_5_vl", "llava_next", "gemma3", "internvl")
TEXT = "Yes, two of the red foxes are asleep. The other 13 are 2.5 km away."
PROMPT = "A small test: how many foxes? "


def _result(tokens: list[list[int]], tree: DraftTree | None = None) -> VerifyResult:
    """The result of a round that emits these tokens."""
    longest = max(1, *map(len, tokens))
    padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens])
    counts = torch.tensor([len(row) for row in tokens])
    nodes = [list(range(len(row))) for row in tokens]
    return VerifyResult(tree or root_only(len(tokens)), padded, counts, padded, tokens, nodes)


def _prompt(rows: list[list[int]], vocab: int, visual: int = -1) -> Prompt:
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (length - len(row)) + [True] * len(row) for row in rows])
    return Prompt(ids, mask, ids == visual, ids, vocab_size=vocab, max_new_tokens=64)


def _chain(tree: DraftTree, row: int) -> list[int]:
    """Tokens of the first children from the root on."""
    chain, node = [], 0
    parents, valid = tree.parents[row].tolist(), tree.node_mask[row].tolist()
    while children := [i for i in range(1, tree.num_nodes) if parents[i] == node and valid[i]]:
        node = children[0]
        chain.append(int(tree.tokens[row, node]))
    return chain


def test_the_cache_follows_the_output() -> None:
    """Rows are rejected at different depths, wait and go on; accepted draft tokens are not read again."""
    scripts = [[5, 6, 7, *range(10, 30)], [8, *range(30, 55)]]
    source = ScriptedSource(scripts, vocab_size=60)
    drafter = ModelDrafter(source, max_length=3)
    drafter.top_k = 1
    state = drafter.begin(replace(_prompt([[5, 6, 7], [8]], 60), static_shapes=True))
    drafter.observe(state, _result([[10], [30]]), {})
    tree = drafter.propose(state, 8, [True, True])
    assert [_chain(tree, row) for row in (0, 1)] == [[11, 12, 13], [31, 32, 33]]
    assert source.target is not None and source.target.cached == [[10, 11, 12], [30, 31, 32]]
    drafter.observe(state, _result([[11, 12, 13, 14], [31]], tree), {})
    source.scripts = source.target.scripts = [scripts[0], [8, 30, 31, 50, 51, 52, 53]]
    read = source.target.num_read
    tree = drafter.propose(state, 8, [True, False])
    assert _chain(tree, 0) == [15, 16, 17] and _chain(tree, 1) == []
    assert source.target.num_read == read + 2 + 2 * 2  # 13 and 14, then two draft tokens in each row
    drafter.observe(state, _result([[15], []], tree), {})
    tree = drafter.propose(state, 8, [True, True])
    assert [_chain(tree, row) for row in (0, 1)] == [[16, 17, 18], [50, 51, 52]]
    assert drafter.propose(state, 1, [True, True]).num_nodes == 1


def test_visual_tokens_are_left_out_or_replaced() -> None:
    prompt = _prompt([[5, 9, 9, 6, 9, 7], [9, 4]], 20, visual=9)
    source = ScriptedSource([], vocab_size=8)
    assert ModelDrafter(source).prompt_ids(prompt) == [[5, 6, 7], [4]]
    assert ModelDrafter(source, placeholder_id=3).prompt_ids(prompt) == [[5, 3, 6, 3, 7], [3, 4]]
    assert ModelDrafter(source).prompt_ids(_prompt([[5, 12]], 20)) == [[5, 0]], "ids that it has no embedding for"
    with pytest.raises(ValueError, match="placeholder_id must be an id of the draft model, 0 to 7; got 8"):
        ModelDrafter(source, placeholder_id=8)


@pytest.mark.parametrize("merges", [(0, 40), (40, 0), (40, 15)])
def test_a_text_is_drafted_in_the_tokens_of_the_target(merges: tuple[int, int]) -> None:
    tokenizer, draft_tokenizer = (train_tokenizer(count) for count in merges)
    script = encode_text(draft_tokenizer, PROMPT + TEXT)
    source = ScriptedSource([script, script], vocab_size=320, tokenizer=draft_tokenizer)
    drafter = build_model_drafter(source, TargetInfo("llama", 8, 310, 2, tokenizer=tokenizer))
    assert isinstance(drafter, RetokenizingDrafter)
    prompt, answer = encode_text(tokenizer, PROMPT), encode_text(tokenizer, TEXT)
    state = drafter.begin(replace(_prompt([prompt, prompt], 310), static_shapes=True))
    ends, num_right = [1, 1], 0
    drafter.observe(state, _result([answer[:1], answer[:1]]), {})
    for round_number in range(8):
        tree = drafter.propose(state, 16, [True, True])
        chains = [_chain(tree, row) for row in (0, 1)]
        for chain, end in zip(chains, ends, strict=True):
            # The text is right; the target cuts it in another way where the draft ends inside of one of its tokens.
            assert decode_text(tokenizer, answer[end:]).startswith(decode_text(tokenizer, chain))
            num_right += _common_length(chain, answer[end:])
        emitted = [answer[end : end + 1 + (row + round_number) % 3] for row, end in enumerate(ends)]
        ends = [end + len(ids) for end, ids in zip(ends, emitted, strict=True)]
        drafter.observe(state, _result(emitted, tree), {})
    assert num_right >= 16


def test_tokenizers_are_compared() -> None:
    one, other = train_tokenizer(10), train_tokenizer(30)
    assert same_tokenizer(one, train_tokenizer(10)) and not same_tokenizer(one, other)
    grown = train_tokenizer(10)
    grown.add_tokens(["<image>"])
    assert same_tokenizer(one, grown) and same_tokenizer(grown, one)
    assert decode_text(one, encode_text(one, TEXT)) == TEXT
    source = ScriptedSource([], vocab_size=269, tokenizer=one)
    assert type(build_model_drafter(source, TargetInfo("llama", 8, 300, 2, tokenizer=grown))) is ModelDrafter
    assert type(build_model_drafter(source, TargetInfo("llama", 8, 269, 2))) is ModelDrafter
    with pytest.raises(ValueError, match=r"vocabulary of 269 ids, the target one of 300.*pass processor= of patch"):
        build_model_drafter(source, TargetInfo("llama", 8, 300, 2))
    source.tokenizer = None
    with pytest.raises(ValueError, match="a tokenizer in the folder of drafter=scripted"):
        build_model_drafter(source, TargetInfo("llama", 8, 300, 2, tokenizer=one))
    with pytest.raises(ValueError, match="tokenizer of processor= does not reproduce text"):
        RetokenizingDrafter(ScriptedSource([], 269, one), tiny.build_tokenizer(tiny.ModelSpec()))


def test_a_model_or_its_folder_is_a_drafter(tmp_path: Path, caplog: Any) -> None:
    spec = tiny.ModelSpec(layers=3)
    model, inputs = tiny.build_model(spec), None
    inputs = tiny.build_inputs(model, seed=1, batch=2)
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    draft = build_draft_model(spec, 1)
    draft.save_pretrained(tmp_path / "draft")
    assert is_model_folder(tmp_path / "draft") and not is_model_folder(tmp_path)
    for drafter in (draft, str(tmp_path / "draft")):
        mmspec.patch(model, drafter=drafter, tree_size=4)
        assert mmspec.patch(model, drafter=drafter, tree_size=4) is model, "patched with the same"
        assert torch.equal(plain, model.generate(**inputs, max_new_tokens=12, do_sample=False))
        assert mmspec.stats(model).num_draft_tokens > 0
        twin = copy.deepcopy(model)
        assert torch.equal(plain, twin.generate(**inputs, max_new_tokens=12, do_sample=False))
        mmspec.unpatch(model)
    mmspec.patch(model, drafter="none", tree_size=4)
    for _ in range(2):
        torch.equal(plain, model.generate(**inputs, max_new_tokens=12, mmspec={"drafter": draft}))
    assert mmspec.stats(model).num_draft_tokens > 0
    assert ModelDrafter(HFDraftModel(draft)).replicate() is not None
    assert not caplog.records


def test_models_that_cannot_draft_are_refused(tmp_path: Path, caplog: Any) -> None:
    spec = tiny.ModelSpec()
    model = tiny.build_model(spec)
    with pytest.raises(ValueError, match="drafter=LlamaForCausalLM is in train mode"):
        mmspec.patch(model, drafter=build_draft_model(spec, 1).train())
    with pytest.raises(ValueError, match=r"drafter=\w+ cannot draft: recurrent layers"):
        mmspec.patch(model, drafter=tiny.build_model(tiny.ModelSpec(family="lfm2")))
    with pytest.raises(ValueError, match=r"drafter=\w+ is on meta, the target on cpu"):
        mmspec.patch(model, drafter=build_draft_model(spec, 1).to("meta"))
    with pytest.raises(ValueError, match=r"vocabulary of 80 ids, the target one of 120"):
        mmspec.patch(model, drafter=build_draft_model(spec, 1, vocab=80))
    large = tiny.build_model(tiny.ModelSpec(family="llama", layers=9))
    mmspec.patch(model, drafter=large)
    assert "it will hardly save time" in caplog.text
    mmspec.unpatch(model)
    large.config.max_position_embeddings = 20
    mmspec.patch(model, drafter=large, tree_size=4)
    inputs: dict[str, Tensor] = tiny.build_inputs(model, seed=1)
    model.generate(**inputs, max_new_tokens=12)
    assert mmspec.stats(model).num_draft_tokens == 0, "more positions than the draft model has"


def test_a_folder_of_another_kind_is_no_model(tmp_path: Path) -> None:
    draft = build_draft_model(tiny.ModelSpec(), 1)
    draft.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(draft)
    config = tmp_path / "config.json"
    for text in ("[]", "{", '{"architectures": ["LlamaModel"]}', '{"architectures": ["NobodyForCausalLM"]}'):
        config.write_text(text, encoding="utf-8")
        assert not is_model_folder(tmp_path)


def test_rows_that_do_not_draft_are_not_computed() -> None:
    """A row that waits reads what it has missed once it drafts again, and drafts as if it never had waited."""
    scripts = [[7, *range(10, 22)], [8, *range(30, 42)]]
    drafts: list[list[list[int]]] = []
    for waits in (True, False):
        source = ScriptedSource(scripts, 50)
        drafter = ModelDrafter(source, max_length=3)
        state = drafter.begin(replace(_prompt([[7], [8]], 50), static_shapes=True))
        drafter.observe(state, _result([[10], [30]]), {})
        chains = []
        for step in range(3):
            active = [True, not waits or step == 2]
            tree = drafter.propose(state, 8, active)
            assert source.target is not None
            assert set(map(tuple, map(list, source.target.active))) == {tuple(active)}
            source.target.active.clear()
            chains.append([_chain(tree, 0), _chain(tree, 1)])
            emitted = [[11 + 2 * step, 12 + 2 * step], [31 + 2 * step, 32 + 2 * step]]
            drafter.observe(state, _result([emitted[0], emitted[1] if step < 2 else []]), {})
        drafts.append(chains)
    waited, both = drafts
    assert [one[0] for one in waited] == [one[0] for one in both] == [[11, 12, 13], [13, 14, 15], [15, 16, 17]]
    assert waited[2] == both[2] and waited[2][1] == [35, 36, 37] and waited[0][1] == []
