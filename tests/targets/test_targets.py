"""The adapters: trees scored against transformers' own decoding, positions, masks, hidden states, grids and refusals.

Also run on the oldest supported transformers.
"""

from __future__ import annotations

import functools
import inspect
import random
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import adversarial as adversarial
import pytest
import tiny_models as tiny
import torch
import zoo
from parity import get_prompt
from torch import Tensor
from transformers import (
    DynamicCache,
    LlavaNextConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

import mmspec
from mmspec.engine.tree import DraftTree, sanitize
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.interfaces import Prompt, VerifyResult
from mmspec.targets.hf import HFTarget
from mmspec.targets.recurrent import target_class
from mmspec.targets.registry import find_adapter, supported
from mmspec.vision.grids.layout import VisualLayout
from mmspec.vision.grids.qwen2_5_vl import Qwen25VLLayout
from mmspec.vision.grids.registry import VISUAL_LAYOUTS

FAMILY = pytest.mark.parametrize("family", tiny.FAMILIES)
GRID_ROWS = [kind for kind in zoo.ROWS if issubclass(VISUAL_LAYOUTS.get(kind, object), Qwen25VLLayout)]
"""Rows of the table of model types whose grid sizes are inputs."""
GEMMA_ROWS = [kind for kind in ("gemma3", "gemma4", "paligemma") if kind in zoo.ROWS]
"""Rows whose grids follow from the config or the positions of patches. Others are in `test_grids.py`."""
COMPRESSED = "video_llama_3"
"""Not every feature of its videos has a placeholder."""
WITH_GRIDS = pytest.mark.parametrize("family", [*tiny.FAMILIES, *GRID_ROWS, *GEMMA_ROWS])
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@lru_cache
def _model(spec: tiny.ModelSpec) -> PreTrainedModel:
    model = tiny.build_model(spec)
    model.generation_config.eos_token_id = None
    return model


def model_of(family: str = "llava", **changes: Any) -> PreTrainedModel:
    """A model that tests share."""
    return _model(tiny.ModelSpec(family, **{"seed": 8, **changes}))


def inside(model: PreTrainedModel, given: tiny.Inputs, use: Callable[[HFTarget], Any], **options: Any) -> Any:
    """Call `use` in place of the decode loop, with the target that transformers' prepared inputs give."""

    def loop(
        self: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kw: Any
    ) -> Tensor:
        adapter = find_adapter(model)
        use(target_class(adapter)(adapter, input_ids, kw, generation_config, max_new_tokens=36))
        return input_ids

    options.setdefault("do_sample", False)
    type(model).generate(model, **given, custom_generate=loop, max_new_tokens=50, **options)


class ForcedTokens(LogitsProcessor):
    """Makes plain decoding emit the given tokens."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.step = tokens, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -1e9)
        if self.step < self.tokens.shape[1]:
            forced = forced.scatter(1, self.tokens[:, self.step : self.step + 1], 0.0)
        self.step += 1
        return forced


def decode_forced(model: PreTrainedModel, given: tiny.Inputs, rows: Sequence[Sequence[int]], **options: Any) -> Any:
    """Plain decoding forced to emit these rows: logits and hidden states of every step."""
    steps = max(map(len, rows))
    tokens = torch.tensor([[*row, *[9] * (steps - len(row))] for row in rows])
    flags = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    forced = LogitsProcessorList([ForcedTokens(tokens)])
    kwargs = {**given, **flags, "do_sample": False, **options, "logits_processor": forced}
    return model.generate(**kwargs, max_new_tokens=steps + 1)


# --- trees against step-by-step decoding ------------------------------------------------------------------------------


def bush(rng: random.Random, roots: Sequence[int], nodes: int, text: Sequence[int]) -> DraftTree:
    """A random sanitized tree per row, deep and wide, with a few masked nodes."""
    tokens = torch.tensor([[rng.choice(text) for _ in range(nodes)] for _ in roots])
    parents = torch.tensor([[max(0, i - rng.choice((1, 1, 2, 4))) for i in range(nodes)] for _ in roots])
    node_mask = torch.tensor([[rng.random() < 0.85 for _ in range(nodes)] for _ in roots])
    return sanitize(DraftTree(tokens, parents, node_mask), torch.tensor(roots), torch.ones(200, dtype=torch.bool))


def lines(tree: DraftTree, row: int) -> list[list[int]]:
    """Nodes from the root down to each leaf of a row, longest first."""
    assert tree.ancestor_mask is not None
    nodes = [i for i in range(tree.num_nodes) if tree.node_mask[row, i]]
    inner = {int(tree.parents[row, i]) for i in nodes}
    ends = [i for i in nodes if i not in inner]
    return sorted((tree.ancestor_mask[row, end].nonzero().flatten().tolist() for end in ends), key=len, reverse=True)


def result_of(tree: DraftTree, accepted: list[list[int]]) -> VerifyResult:
    """The result of accepting these nodes."""
    path = torch.tensor([row + [0] * (tree.num_nodes - len(row)) for row in accepted])
    rows = [[1] * len(row) for row in accepted]
    return VerifyResult(tree, path, torch.tensor([len(row) for row in accepted]), path, rows, accepted)


class Probe:
    """Scores rounds of random trees, commits ragged paths of them, and compares every node with plain decoding."""

    def __init__(self, model: PreTrainedModel, given: tiny.Inputs, seed: int, **options: Any) -> None:
        self.model, self.given, self.options = model, given, options
        self.rng, self.text = random.Random(seed), tiny.special_ids(model.tiny_spec).text
        layers = model.config.get_text_config().num_hidden_layers
        self.taps = (0, layers) if seed % 2 else (1,)
        self.nodes = 0

    def __call__(self, target: HFTarget) -> None:
        first, states = target.prefill(self.taps)
        batch = first.shape[0]
        self.emitted: list[list[int]] = [[] for _ in range(batch)]
        plain = decode_forced(self.model, self.given, [[9]] * batch, **self.options)
        torch.testing.assert_close(first, plain.logits[0], **CLOSE)
        mask = self.given.get("attention_mask", torch.ones_like(self.given["input_ids"])).bool()
        mask = mask.repeat_interleave(batch // mask.shape[0], dim=0)
        adapter = find_adapter(self.model)
        is_text = ~torch.isin(self.given["input_ids"], torch.tensor(adapter.media_token_ids))
        is_text = is_text.repeat_interleave(batch // is_text.shape[0], dim=0)
        for tap in self.taps:
            assert states[tap].shape == plain.hidden_states[0][tap].shape
            # What a layer receives has the features that are added behind the one before: `test_deepstack_states`.
            compared = mask & is_text if adapter.adds_between_layers else mask
            torch.testing.assert_close(states[tap][compared], plain.hidden_states[0][tap][compared], **CLOSE)
        for nodes in (8, 1, 6):
            self.round(target, batch, nodes)
        lengths = [self.rng.randint(1, len(row)) for row in self.emitted]
        target.crop(lengths)
        self.emitted = [row[:length] for row, length in zip(self.emitted, lengths, strict=True)]
        self.round(target, batch, 4)

    def round(self, target: HFTarget, batch: int, nodes: int) -> None:
        """One tree per row."""
        roots = [self.rng.choice(self.text) for _ in range(batch)]
        tree = bush(self.rng, roots, nodes, self.text)
        logits, states = target.score(tree, self.taps)
        paths = [lines(tree, row) for row in range(batch)]
        for number in range(max(map(len, paths))):
            chosen = [path[min(number, len(path) - 1)] for path in paths]
            new = [tree.tokens[row, nodes].tolist() for row, nodes in enumerate(chosen)]
            emitted = [old + more for old, more in zip(self.emitted, new, strict=True)]
            plain = decode_forced(self.model, self.given, emitted, **self.options)
            for row, line in enumerate(chosen):
                for step, node in enumerate(line, len(self.emitted[row]) + 1):
                    torch.testing.assert_close(logits[row, node], plain.logits[step][row], **CLOSE)
                    for tap in self.taps:
                        state = plain.hidden_states[step][tap][row, -1]
                        torch.testing.assert_close(states[tap][row, node], state, **CLOSE)
                    self.nodes += 1
        accepted = [self.rng.choice(path) for path in paths]
        accepted = [
            line[: self.rng.randint(1 if not self.emitted[b] else 0, len(line))] for b, line in enumerate(accepted)
        ]
        target.commit(result_of(tree, accepted))
        for row, line in enumerate(accepted):
            self.emitted[row] += tree.tokens[row, line].tolist()


SCENES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"{family} {side}": ({"family": family}, {"padding": side}) for family in tiny.FAMILIES for side in ("left",)},
    "llava right": ({"family": "llava"}, {"padding": "right"}),
    "llava level": ({"family": "llava"}, {"padding": "none", "mask": False}),
    "llava eager": ({"family": "llava", "attention": "eager"}, {"padding": "left"}),
    "llava_next eager window": ({"family": "llava_next", "attention": "eager", "window": 12}, {"padding": "left"}),
    "llava_next window": ({"family": "llava_next", "window": 6}, {"padding": "left"}),
    "llava_next window level": ({"family": "llava_next", "window": 9}, {"padding": "none"}),
    "llava_onevision windows": (
        {"family": "llava_onevision", "window": 8, "mixed": True, "layers": 3},
        {"padding": "left", "videos": [1, 0, 0]},
    ),
    "llava_onevision eager": ({"family": "llava_onevision", "attention": "eager"}, {"padding": "right"}),
    "llava_next_video video": ({"family": "llava_next_video"}, {"padding": "left", "videos": [1, 0, 2]}),
    "llava_next_video right": (
        {"family": "llava_next_video"},
        {"padding": "right", "images": [0] * 3, "videos": [1] * 3},
    ),
    "llava_next_video eager window": (
        {"family": "llava_next_video", "text": "mistral", "attention": "eager", "window": 30},
        {"padding": "left", "videos": [1, 1, 0]},
    ),
    "qwen2_5_vl right": ({"family": "qwen2_5_vl"}, {"padding": "right"}),
    "qwen2_5_vl video": ({"family": "qwen2_5_vl"}, {"padding": "left", "videos": [1, 1, 0]}),
    "qwen2_5_vl level": ({"family": "qwen2_5_vl"}, {"padding": "none", "mask": False}),
    "qwen3_vl video": ({"family": "qwen3_vl", "layers": 3}, {"padding": "left", "videos": [1, 1, 0]}),
    "glm4v right": ({"family": "glm4v", "attention": "eager"}, {"padding": "right"}),
    "ernie4_5_vl_moe video": ({"family": "ernie4_5_vl_moe", "layers": 3}, {"padding": "left", "videos": [1, 0, 1]}),
    "hyperclovax left": ({"family": "hyperclovax_vision_v2"}, {"padding": "left"}),
    "hyperclovax right": ({"family": "hyperclovax_vision_v2"}, {"padding": "right"}),
    "qwen2_5_vl eager windows": (
        {"family": "qwen2_5_vl", "attention": "eager", "window": 10, "mixed": True},
        {"padding": "left"},
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_trees_are_scored_as_decoded_step_by_step(name: str) -> None:
    spec, shape = SCENES[name]
    model, seed = model_of(**spec), len(name)
    probe = Probe(model, tiny.build_inputs(model, seed, 3, num_text_tokens=(3, 6), **shape), seed)
    inside(model, probe.given, probe)
    assert probe.nodes > 30


@FAMILY
def test_several_sequences_per_prompt(family: str) -> None:
    model = model_of(family)
    twice: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2}
    probe = Probe(model, tiny.build_inputs(model, 3, 2, num_text_tokens=(3, 6)), 3, **twice)
    inside(model, probe.given, probe, **twice)
    assert len(probe.emitted) == 4


@FAMILY
def test_a_conversation_that_goes_on(family: str) -> None:
    """The prompt is what is new, or all of it, behind a cache that transformers filled."""
    model = model_of(family)
    given = tiny.build_inputs(model, 4, 2, num_text_tokens=(3, 6))
    for tail in (False, True):

        def before(tail: bool = tail) -> tuple[tiny.Inputs, Any]:
            text = model.config.get_text_config()
            turn = decode_forced(model, given, [[11, 12, 13]] * 2, **{CACHE_ARGUMENT: DynamicCache(config=text)})
            more = tiny.build_next_turn(given, turn.sequences, 1, model.tiny_spec)
            if tail:
                more["input_ids"] = more["input_ids"][:, turn.past_key_values.get_seq_length() :]
            return more, turn.past_key_values

        more, cache = before()

        def use(target: HFTarget) -> None:
            first, _ = target.prefill()
            plain, tree = [], bush(random.Random(0), [20, 21], 6, (30, 31, 32))
            logits, _ = target.score(tree)
            paths = [lines(tree, row)[0] for row in range(2)]
            rows = [tree.tokens[row, path].tolist() for row, path in enumerate(paths)]
            again, past = before()
            plain = decode_forced(model, again, rows, **{CACHE_ARGUMENT: past}).logits
            torch.testing.assert_close(first, plain[0], **CLOSE)
            for row, path in enumerate(paths):
                for step, node in enumerate(path, 1):
                    torch.testing.assert_close(logits[row, node], plain[step][row], **CLOSE)

        inside(model, more, use, **{CACHE_ARGUMENT: cache})


@FAMILY
def test_a_path_is_a_plain_forward_over_all_of_it(family: str) -> None:
    """No cache and no generate on the other side: prompt and path in one forward of the model."""
    model = model_of(family)
    given = tiny.build_inputs(model, 5, 1, padding="none", num_text_tokens=(4, 6))

    def use(target: HFTarget) -> None:
        target.prefill()
        tree = bush(random.Random(1), [20], 8, tiny.special_ids(model.tiny_spec).text)
        logits, _ = target.score(tree)
        for path in lines(tree, 0):
            more = tree.tokens[:1, path]
            whole = {**given, "input_ids": torch.cat([given["input_ids"], more], 1)}
            whole["attention_mask"] = torch.ones_like(whole["input_ids"])
            if "mm_token_type_ids" in given:
                whole["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(path)))
            want = model(**whole, use_cache=False).logits[0, -len(path) :]
            torch.testing.assert_close(logits[0, path], want, **CLOSE)

    inside(model, given, use)


def test_nodes_do_not_see_their_siblings() -> None:
    """Changing a node changes the logits of it and its descendants, and nothing else."""
    for spec in ({}, {"attention": "eager"}, {"family": "qwen2_5_vl"}, {"family": "llava_next", "window": 10}):
        model = model_of(**spec)

        def use(target: HFTarget, text: tuple[int, ...] = tiny.special_ids(model.tiny_spec).text) -> None:
            target.prefill()
            tree = bush(random.Random(2), [20, 21], 8, text)
            before, _ = target.score(tree)
            tree.tokens[0, 3] = text[-1] if tree.tokens[0, 3] != text[-1] else text[-2]
            after, _ = target.score(tree)
            assert tree.ancestor_mask is not None
            for row in range(2):
                for node in tree.node_mask[row].nonzero().flatten().tolist():
                    below = row == 0 and bool(tree.ancestor_mask[row, node, 3])
                    assert torch.equal(before[row, node], after[row, node]) != below

        inside(model, tiny.build_inputs(model, 6, 2), use)


def test_a_round_passes_the_arguments_of_a_decoding_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round passes the arguments of a decoding step of transformers, except for ids, positions, mask and cache."""
    for family in tiny.FAMILIES:
        model = model_of(family)
        given, calls = tiny.build_inputs(model, 7, 2), list[dict[str, Any]]()
        forward = type(model).forward

        @functools.wraps(forward)
        def spy(self: Any, *args: Any, _calls: list[Any] = calls, _forward: Any = forward, **kwargs: Any) -> Any:
            _calls.append(kwargs)
            return _forward(self, *args, **kwargs)

        with monkeypatch.context() as patching:
            patching.setattr(model, "forward", types.MethodType(spy, model))
            model.generate(**given, max_new_tokens=3, do_sample=False)
            plain = calls[-1]
            calls.clear()
            inside(
                model, given, lambda target: (target.prefill(), target.score(bush(random.Random(0), [9, 9], 4, [9])))
            )
        own = {"input_ids", "position_ids", "attention_mask", CACHE_ARGUMENT, "logits_to_keep", "cache_position"}
        assert set(calls[-1]) - own == set(plain) - own, family
        for name in set(plain) - own:
            mine, theirs = calls[-1][name], plain[name]
            if isinstance(theirs, Tensor):
                assert mine.dtype == theirs.dtype and mine.shape[:-1] == theirs.shape[:-1]
                assert torch.equal(mine[..., :1], theirs[..., -1:]), (family, name)  # 5.18 passes on the whole of it
            else:
                assert mine == theirs, (family, name)


# --- segments ---------------------------------------------------------------------------------------------------------


TIMESTAMPS = (
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "glm46v",
    "glm_ocr",
    "glm4v_moe",
    "glmga",
    "cosmos3_omni",
    "cosmos3_edge",
    "cohere_compass",
    "gemma4",
    COMPRESSED,
)
"""Families with text before each frame of a video."""


def media(model: PreTrainedModel, given: tiny.Inputs) -> list[Tensor]:
    """Vision features of each image or video, in the order of the inputs: [tokens, D] each."""
    names = ("pixel_values", "image_sizes", "image_grid_thw", "image_merge_sizes", "image_position_ids")
    pictures = {name: given[name] for name in names if name in given}
    owner: Any = model.model if hasattr(model.model, "get_image_features") else model
    with torch.no_grad():
        found = list(owner.get_image_features(**pictures, return_dict=True).pooler_output) if pictures else []
        if "pixel_values_videos" in given:
            names = ("pixel_values_videos", "video_grid_thw", "video_merge_sizes", "video_position_ids")
            clips = {name: given[name] for name in (*names, "num_frames_per_video") if name in given}
            found += list(owner.get_video_features(**clips, return_dict=True).pooler_output)
    return found


def check_segments(model: PreTrainedModel, given: tiny.Inputs, prompt: Prompt, repeats: int = 1) -> None:
    """Grids cover each placeholder once, and each one the positions of the features of its own image or video."""
    special = tiny.special_ids(model.tiny_spec)
    is_placeholder = torch.isin(prompt.input_ids, torch.tensor([special.image, special.video]))
    assert torch.equal(prompt.visual_mask, is_placeholder)
    covered, sources = torch.zeros_like(prompt.input_ids), dict[int, list[Any]]()
    for segment in prompt.grids:
        assert segment.num_tokens > 0 and segment.height > 0 and segment.width > 0
        covered[segment.row, segment.start : segment.start + segment.num_tokens] += 1
        if segment.row % repeats == 0:
            sources.setdefault(segment.media_index, []).append(segment)
    assert torch.equal(covered, is_placeholder.long()), "not every visual token once"
    scale = getattr(model.config.get_text_config(), "embedding_multiplier", 1.0)
    features = [scale * feature for feature in media(model, given)]
    assert sorted(sources) == list(range(len(features)))
    for number, feature in enumerate(features):
        parts = sources[number]
        assert len({part.row for part in parts}) == 1, "a picture in two rows"
        ends = [part.start + part.num_tokens for part in parts]
        gaps = [part.start - end for part, end in zip(parts[1:], ends[:-1], strict=True)]
        has_timestamps = model.config.model_type in TIMESTAMPS and parts[0].role == "frame"
        assert all(gap > 0 if has_timestamps else gap == 0 for gap in gaps), "parts out of order"
        states = torch.cat(
            [prompt.hidden_states[0][part.row, part.start : end] for part, end in zip(parts, ends, strict=True)]
        )
        states = states[: len(feature)]  # OneVision ends a clip with a newline token of its own
        torch.testing.assert_close(states, feature.reshape(-1, feature.shape[-1])[: len(states)], **CLOSE)


@pytest.mark.every(4)
@WITH_GRIDS
@pytest.mark.parametrize("padding", ["left", "right"])
def test_segments_cover_the_placeholders_of_their_pictures(family: str, padding: str) -> None:
    model = model_of(family)
    for seed in range(12):
        given = tiny.build_inputs(
            model, seed, 1 + seed % 3, padding=padding, images=None if seed % 2 else [1] * (1 + seed % 3)
        )
        prompt = get_prompt(model, given)
        if not prompt.grids:  # pictures side by side, which these families cannot tell apart
            assert family in ("llava_next", "llava_onevision", "llava_next_video")
            continue
        check_segments(model, given, prompt)


def has_grids_of_videos(family: str) -> bool:
    """Whether every video of the row has grids."""
    return zoo.ROWS[family].videos is not None and family != COMPRESSED


CLIP_FAMILIES = [*tiny.VIDEO_FAMILIES, *(row for row in GRID_ROWS if has_grids_of_videos(row))]
CLIPS = pytest.mark.parametrize("family", CLIP_FAMILIES)


def frames_of(prompt: Prompt) -> dict[int, list[Any]]:
    """{source: its frames} of a prompt."""
    found: dict[int, list[Any]] = {}
    for segment in prompt.grids:
        if segment.role == "frame":
            found.setdefault(segment.media_index, []).append(segment)
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("family", [*CLIP_FAMILIES, *(row for row in GEMMA_ROWS if row == "gemma4")])
def test_segments_of_clips(family: str) -> None:
    model, roles = model_of(family), set[str]()
    for seed in range(12):
        given = tiny.build_inputs(model, seed, 2, images=[seed % 2, 1], videos=[1, (seed // 2) % 2])
        prompt = get_prompt(model, given)
        if prompt.grids:
            check_segments(model, given, prompt)
            frames = [segment for segment in prompt.grids if segment.role == "frame"]
            assert frames
            for clip in {segment.media_index for segment in frames}:
                times = [segment.frame for segment in frames if segment.media_index == clip]
                assert times == list(range(len(times))), "frames out of order"
            roles |= {segment.role for segment in prompt.grids}
    assert roles >= ({"base", "frame"} if zoo.FAMILIES[family].mixes_media else {"frame"})


@CLIPS
def test_clips_alone_and_side_by_side(family: str) -> None:
    """As many clips as in the input, each with its frames, with or without text between them."""
    model = model_of(family)
    for seed in range(8):
        given = tiny.build_inputs(
            model, seed, 2, images=[0, 0], videos=[2, 1], num_text_tokens=(1, 3) if seed % 2 else (6, 9)
        )
        prompt = get_prompt(model, given)
        check_segments(model, given, prompt)
        clips, pixels = frames_of(prompt), given["pixel_values_videos"]
        assert sorted(clips) == [0, 1, 2] and [frames[0].row for frames in clips.values()] == [0, 0, 1]
        lengths = [pixels.shape[1]] * 3
        if "video_grid_thw" in given:
            merge = getattr(model.config.vision_config, "temporal_merge_size", 1)
            lengths = (given["video_grid_thw"][:, 0] // merge).tolist()
        for length, frames in zip(lengths, clips.values(), strict=True):
            assert [frame.frame for frame in frames] == list(range(length))
            assert len({(frame.height, frame.width) for frame in frames}) == 1


@CLIPS
def test_the_grid_of_a_frame_has_its_positions(family: str) -> None:
    """Changing one frame of a clip changes the embeddings of its segment, and of no other frame."""
    model = model_of(family)
    given = tiny.build_inputs(model, 6, 1, images=[1], videos=[1])
    before = get_prompt(model, given)
    (frames,) = frames_of(before).values()
    for frame in frames:
        changed = {**given, "pixel_values_videos": given["pixel_values_videos"].clone()}
        pixels = changed["pixel_values_videos"]
        part = pixels.view(len(frames), -1)[frame.frame]  # Qwen's patches are in the order of time too
        part.neg_()
        after = get_prompt(model, changed)
        moved = (before.hidden_states[0] - after.hidden_states[0]).abs().amax(-1)[0] > 1e-6
        positions = range(frame.start, frame.start + frame.num_tokens)
        assert moved.nonzero().flatten().tolist() == list(positions)


def test_frames_of_llava_next_video_are_pooled_with_the_stride_of_the_config() -> None:
    model = model_of("llava_next_video")
    config = model.config
    side = config.vision_config.image_size // config.vision_config.patch_size
    assert side // config.spatial_pool_stride == 2
    given = tiny.build_inputs(model, 1, 1, images=[0], videos=[1])
    with torch.no_grad():
        whole = model.model.vision_resampler(torch.arange(side * side, dtype=torch.float)[None, :, None])[0, :, 0]
    for segment in get_prompt(model, given).grids:
        rows = whole.view(segment.height, segment.width)  # what transformers pools, in reading order
        assert (rows.diff(dim=1) == 2).all() and (rows.diff(dim=0) == 2 * side).all()


@CLIPS
def test_clips_that_do_not_fit_give_no_segments(family: str) -> None:
    model = model_of(family)
    given = tiny.build_inputs(model, 3, 2, images=[0, 0], videos=[1, 1])
    adapter = find_adapter(model)
    vision = {name: given[name] for name in adapter.layout.vision_args if name in given}
    assert adapter.layout.grids(given["input_ids"], vision)
    assert adapter.layout.grids(given["input_ids"], {name: part[:1] for name, part in vision.items()}) == ()
    special, ids = tiny.special_ids(model.tiny_spec), given["input_ids"].clone()
    ids[0, torch.isin(ids[0], torch.tensor([special.image, special.video])).nonzero()[-1]] = special.text[0]
    assert adapter.layout.grids(ids, vision) == ()


@pytest.mark.parametrize("family", ["llava_onevision", "llava_next_video"])
def test_clips_without_known_sizes(family: str) -> None:
    """Each run of placeholders is one clip, whatever its length; none where that is impossible."""
    model = model_of(family)
    given, special = tiny.build_inputs(model, 3, 2, images=[0, 0], videos=[1, 1]), tiny.special_ids(model.tiny_spec)
    adapter = find_adapter(model)
    vision = {name: given[name] for name in adapter.layout.vision_args if name in given}
    assert adapter.layout.grids(given["input_ids"], {}) == adapter.layout.grids(given["input_ids"], vision)
    if family == "llava_next_video":
        ids = torch.tensor([[9, *[special.video] * 7, 9]])
        assert adapter.layout.grids(ids, {}) == ()


@pytest.mark.every(2)
@WITH_GRIDS
def test_segments_of_several_sequences_per_prompt(family: str) -> None:
    model = model_of(family)
    if family in GRID_ROWS and "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters:
        pytest.skip("this transformers repeats the patches of the family one by one, which mixes its images up")
    given = tiny.build_inputs(model, 2, 2, images=[1, 1])
    once, thrice = get_prompt(model, given), get_prompt(model, given, num_return_sequences=3)
    assert thrice.input_ids.shape[0] == 6 and len(thrice.grids) == 3 * len(once.grids) > 0
    check_segments(model, given, thrice, repeats=3)
    for row in range(6):
        own = [(s.start, s.height, s.width, s.role) for s in thrice.grids if s.row == row]
        assert own == [(s.start, s.height, s.width, s.role) for s in once.grids if s.row == row // 3]


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision", "llava_next_video"])
def test_grids_of_tiles_end_their_lines_with_a_newline(family: str) -> None:
    """Recognised by their hidden states: every newline token has the same one."""
    model, shapes = model_of(family), set[tuple[int, int]]()
    for seed in range(30):
        given = tiny.build_inputs(model, seed, 1, images=[1])
        prompt = get_prompt(model, given)
        line = model.model.image_newline
        newline = (prompt.hidden_states[0] - line).abs().amax(-1) < 1e-5
        for segment in prompt.grids:
            grid = newline[segment.row, segment.start : segment.start + segment.num_tokens]
            grid = grid.view(segment.height, segment.width + segment.has_newlines)
            if segment.role != "newline":
                assert grid[:, segment.width :].all() and not grid[:, : segment.width].any()
            if segment.role == "tiles":
                shapes.add((segment.height, segment.width))
    assert len(shapes) > 2 and any(h != w for h, w in shapes)


def test_grids_of_tiles_at_the_sizes_of_real_models() -> None:
    """24 x 24 patches a tile: the grid is what transformers packs, long and thin pictures included."""
    model = tiny.build_model(tiny.ModelSpec("llava_next"))
    model.config.vision_config.image_size, model.config.vision_config.patch_size = 336, 14
    model.config.image_grid_pinpoints = LlavaNextConfig().image_grid_pinpoints
    adapter, rng = find_adapter(model), random.Random(4)
    sizes = [(1242, 86), (2660, 404), (562, 128)] + [(rng.randint(50, 2000), rng.randint(50, 2000)) for _ in range(20)]
    newline, pinpoints = torch.full((1,), -1.0), model.config.image_grid_pinpoints
    for size in sizes:
        crops = image_size_to_num_patches(size, pinpoints, 336)
        features = [torch.ones(crops, 576, 1)]
        packed, _ = model.model.pack_image_features(features, [size], "default", image_newline=newline)
        ids = torch.full((1, len(packed[0])), tiny.special_ids(model.tiny_spec).image)
        base, grid = adapter.layout.grids(ids, {"image_sizes": torch.tensor([size])})
        lines = packed[0][base.num_tokens :, 0].view(grid.height, grid.width + 1)
        assert (lines[:, :-1] == 1).all() and (lines[:, -1] == -1).all(), size


@pytest.mark.parametrize("family", ["qwen2_5_vl", *(row for row in GRID_ROWS if row != COMPRESSED)])
def test_grids_are_those_of_the_inputs(family: str) -> None:
    model = model_of(family)
    for seed in range(10):
        given = tiny.build_inputs(model, seed, 2, images=[2, 1])
        grids = [(int(h) // 2, int(w) // 2) for _, h, w in given["image_grid_thw"]]
        assert [(s.height, s.width) for s in get_prompt(model, given).grids if s.role == "base"] == grids


def test_compressed_videos_have_no_grids() -> None:
    model, special = model_of(COMPRESSED), tiny.special_ids(model_of(COMPRESSED).tiny_spec)
    drawn = (tiny.build_inputs(model, seed, 1, images=[1], videos=[1]) for seed in range(20))
    given = next(one for one in drawn if not one["video_compression_mask"].all())
    assert get_prompt(model, given).grids == ()
    steps, height, width = given["video_grid_thw"][0].tolist()
    frame = [20, *[special.video] * (height * width // 4)]
    text = given["input_ids"][given["input_ids"] != special.video].tolist()
    given["input_ids"] = torch.tensor([[*text, *(frame * steps), 9]])
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["video_compression_mask"] = torch.ones(steps * height * width // 4, dtype=torch.bool)
    prompt = get_prompt(model, given)
    assert [grid.frame for grid in prompt.grids if grid.role == "frame"] == list(range(steps))
    check_segments(model, given, prompt)


@pytest.mark.parametrize(
    "family", [*tiny.FAMILIES, *GRID_ROWS, *GEMMA_ROWS, "internvl", "idefics3", "smolvlm", "mistral3", "vipllava"]
)
def test_numbers_that_do_not_fit_give_no_segments(family: str) -> None:
    """Better none than wrong ones: a caller may pass embeddings of its own."""
    model = model_of(family)
    given = tiny.build_inputs(model, 2, 2, images=[1, 1])
    adapter = find_adapter(model)
    vision = {name: given[name] for name in adapter.layout.vision_args if name in given}
    special, ids = tiny.special_ids(model.tiny_spec), given["input_ids"].clone()
    first = (ids == special.image).nonzero()[0]
    ids[first[0], first[1]] = special.text[0]
    wrong = adapter.layout.grids(ids, vision)
    covered = torch.zeros_like(ids)
    for segment in wrong:
        covered[segment.row, list(segment.token_indices)] += 1
    assert not wrong or torch.equal(covered, (ids == special.image).long())
    if vision:
        assert adapter.layout.grids(given["input_ids"], {name: part[:1] for name, part in vision.items()}) == ()


# --- refusals and kernels ---------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> PreTrainedModel:
    """A model that a test may change."""
    return tiny.build_model(tiny.ModelSpec("llava", text="qwen2"))


def test_reasons_to_refuse(fresh: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_adapter(fresh).unsupported_reason() is None
    monkeypatch.setattr(type(fresh), "_is_stateful", True)
    assert find_adapter(fresh).unsupported_reason() == "a stateful model"
    monkeypatch.undo()
    text = fresh.config.get_text_config()
    text.layer_types = ["full_attention", "indexed_attention"]
    assert find_adapter(fresh).unsupported_reason() == "layers of type indexed_attention"
    text.layer_types = ["full_attention", "linear_attention"]
    assert find_adapter(fresh).unsupported_reason() is None and find_adapter(fresh).is_recurrent
    text.layer_types = ["full_attention", "full_attention"]
    text.attention_chunk_size = 8
    assert find_adapter(fresh).unsupported_reason() == "layers of type chunked_attention"
    text.attention_chunk_size = None
    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"full_attention": {"rope_type": "longrope"}}):
        monkeypatch.setattr(text, "rope_parameters", rope)
        reason = find_adapter(fresh).unsupported_reason()
        assert reason is not None and reason.startswith("rope_type=")
    monkeypatch.undo()
    monkeypatch.setattr(text, "rope_parameters", {"rope_type": "dynamic", "alpha": 1000.0})
    monkeypatch.setattr(find_adapter(fresh).text_model.rotary_emb, "rope_type", "ntk_alpha")
    assert find_adapter(fresh).unsupported_reason() is None
    monkeypatch.undo()
    for kernel in ("flash_attention_2", "flex_attention", "my_kernel"):
        text._attn_implementation_internal = kernel
        reason = find_adapter(fresh).unsupported_reason()
        assert reason is not None and reason.startswith(f"attn_implementation='{kernel}' of the text model")
    for kernel in ("sdpa", "eager"):
        text._attn_implementation_internal = kernel
        assert find_adapter(fresh).unsupported_reason() is None


def test_caches_that_are_refused(fresh: PreTrainedModel) -> None:
    adapter, text, ids = find_adapter(fresh), fresh.config.get_text_config(), torch.ones(2, 5, dtype=torch.long)
    assert HFTarget.unsupported_reason(adapter, ids, {CACHE_ARGUMENT: DynamicCache(config=text)}, 1) is None
    static = StaticCache(config=text, max_cache_len=10)
    assert HFTarget.unsupported_reason(adapter, ids, {CACHE_ARGUMENT: static}, 1) == "a StaticCache"
    assert HFTarget.unsupported_reason(adapter, ids, {}, 1) == "no key-value cache"


def test_masks_that_are_refused(fresh: PreTrainedModel) -> None:
    adapter, ids, cache = find_adapter(fresh), torch.ones(2, 5, dtype=torch.long), DynamicCache()
    for mask, reason in (
        (None, None),
        (torch.ones(2, 5), None),
        (torch.ones(2, 7), "an attention_mask of length 7 for 5 input ids"),
        (torch.ones(2, 1, 5, 5), "an attention_mask that is not [batch, length]"),
        ({"full_attention": torch.ones(2, 5)}, "an attention_mask that is not [batch, length]"),
    ):
        given = {CACHE_ARGUMENT: cache, "attention_mask": mask}
        assert HFTarget.unsupported_reason(adapter, ids, given, 1) == reason


@FAMILY
def test_flash_attention_is_switched_and_restored(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the text model only: the vision tower never scores a tree."""
    model = tiny.build_model(tiny.ModelSpec(family))
    given = tiny.build_inputs(model, 1, 2)
    plain = model.generate(**given, max_new_tokens=8, do_sample=False)
    believe = lambda self, kernel, *args, **kwargs: kernel  # noqa: E731  (nobody has flash attention here)
    for check in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
        monkeypatch.setattr(PreTrainedModel, check, believe)
    model.set_attn_implementation({"text_config": "flash_attention_2"})
    vision = model.config.vision_config._attn_implementation
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == vision
    assert torch.equal(model.generate(**given, max_new_tokens=8, do_sample=False), plain)
    assert not mmspec.stats(model).fallback_calls
    mmspec.unpatch(model)
    assert model.config.text_config._attn_implementation == "flash_attention_2"
    assert model.config.vision_config._attn_implementation == vision


def test_other_kernels_are_not_touched(fresh: PreTrainedModel) -> None:
    fresh.config.text_config._attn_implementation_internal = "flex_attention"
    mmspec.patch(fresh)
    assert fresh.config.text_config._attn_implementation == "flex_attention"
    mmspec.unpatch(fresh)
    assert fresh.config.text_config._attn_implementation == "flex_attention"


# --- who is supported -------------------------------------------------------------------------------------------------


def test_the_families() -> None:
    assert supported() == tuple(sorted(VISUAL_LAYOUTS)) and set(tiny.FAMILIES) <= set(supported())
    for kind, family in VISUAL_LAYOUTS.items():
        assert kind in family.model_types and isinstance(family.vision_args, tuple)
    for kind in tiny.FAMILIES:
        adapter, spec = find_adapter(model_of(kind)), model_of(kind).tiny_spec
        special = tiny.special_ids(spec)
        videos = (special.video,) if kind in tiny.VIDEO_FAMILIES else ()
        assert set(adapter.media_token_ids) == {special.image, *videos} and adapter.model_type == kind
        assert (adapter.num_layers, adapter.vocab_size) == (spec.layers, spec.vocab)


def test_a_family_without_a_layout_is_served_without_grids(fresh: PreTrainedModel) -> None:
    fresh.config.model_type = "newcomer"
    adapter = find_adapter(fresh)
    assert type(adapter.layout) is VisualLayout and adapter.unsupported_reason() is None
    assert adapter.layout.grids(torch.zeros(1, 1, dtype=torch.long), {}) == ()
    assert adapter.traits()["model type"] == "newcomer" and "full_attention" in adapter.traits()["layers"]


def test_runs_of_placeholders() -> None:
    adapter = find_adapter(model_of("llava"))
    ids = torch.tensor([[3, 3, 1, 3], [1, 1, 1, 1], [1, 3, 3, 1]])
    assert adapter.layout.placeholder_runs(ids, 3) == [(0, 0, 2), (0, 3, 1), (2, 1, 2)]
    assert adapter.layout.placeholder_runs(ids, 7) == []
