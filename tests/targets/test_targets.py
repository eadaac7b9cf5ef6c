"""The adapters: trees scored against transformers' own decoding, positions, masks, taps, segments and refusals.

Also run on the oldest supported transformers.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import adversarial as adversarial
import pytest
import tiny_models as tiny
import torch
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
from mmspec.interfaces import DrafterRequirements, Prompt, VerifyResult
from mmspec.targets.hf import HFTarget
from mmspec.targets.registry import ADAPTERS, UnsupportedModelError, find_adapter, supported

GRID_ROWS = ("gemma3", "gemma4", "paligemma")
"""Rows of the table of model types whose adapters derive grids."""
FAMILY = pytest.mark.parametrize("family", tiny.FAMILIES)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@lru_cache
def _model(spec: tiny.ModelSpec) -> PreTrainedModel:
    made = tiny.build_model(spec)
    made.generation_config.eos_token_id = None
    return made


def model_of(family: str = "llava", **changes: Any) -> PreTrainedModel:
    """A model that tests share."""
    return _model(tiny.ModelSpec(family, **{"seed": 8, **changes}))


def inside(model: PreTrainedModel, given: tiny.Inputs, use: Callable[[HFTarget], Any], **options: Any) -> Any:
    """Call `use` with a target made of what transformers prepared for this request, where the loop would be."""

    def loop(
        self: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kw: Any
    ) -> Tensor:
        use(HFTarget(find_adapter(model), input_ids, kw, generation_config, max_new_tokens=36))
        return input_ids

    options.setdefault("do_sample", False)
    type(model).generate(model, **given, custom_generate=loop, max_new_tokens=50, **options)


class Forced(LogitsProcessor):
    """Makes plain decoding say what it is told."""

    def __init__(self, words: Tensor) -> None:
        self.words, self.step = words, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        made = torch.full_like(scores, -1e9)
        if self.step < self.words.shape[1]:
            made = made.scatter(1, self.words[:, self.step : self.step + 1], 0.0)
        self.step += 1
        return made


def told(model: PreTrainedModel, given: tiny.Inputs, rows: Sequence[Sequence[int]], **options: Any) -> Any:
    """Plain decoding that is made to say these rows: logits and hidden states of every step."""
    steps = max(map(len, rows))
    words = torch.tensor([[*row, *[9] * (steps - len(row))] for row in rows])
    flags = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    forced = LogitsProcessorList([Forced(words)])
    kwargs = {**given, **flags, "do_sample": False, **options, "logits_processor": forced}
    return model.generate(**kwargs, max_new_tokens=steps + 1)


# --- trees against step-by-step decoding ------------------------------------------------------------------------------


def bush(rng: random.Random, roots: Sequence[int], nodes: int, text: Sequence[int]) -> DraftTree:
    """A random sealed tree per row, deep and wide, a few nodes of it invalid."""
    tokens = torch.tensor([[rng.choice(text) for _ in range(nodes)] for _ in roots])
    parents = torch.tensor([[max(0, i - rng.choice((1, 1, 2, 4))) for i in range(nodes)] for _ in roots])
    valid = torch.tensor([[rng.random() < 0.85 for _ in range(nodes)] for _ in roots])
    return sanitize(DraftTree(tokens, parents, valid), torch.tensor(roots), torch.ones(200, dtype=torch.bool))


def lines(tree: DraftTree, row: int) -> list[list[int]]:
    """Nodes from the root down to each leaf of a row, longest first."""
    assert tree.ancestor_mask is not None
    live = [i for i in range(tree.num_nodes) if tree.valid[row, i]]
    inner = {int(tree.parents[row, i]) for i in live}
    ends = [i for i in live if i not in inner]
    return sorted((tree.ancestor_mask[row, end].nonzero().flatten().tolist() for end in ends), key=len, reverse=True)


def verdict_of(tree: DraftTree, walked: list[list[int]]) -> VerifyResult:
    """As if these nodes had been walked."""
    path = torch.tensor([row + [0] * (tree.num_nodes - len(row)) for row in walked])
    rows = [[1] * len(row) for row in walked]
    return VerifyResult(tree, path, torch.tensor([len(row) for row in walked]), path, rows, walked)


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
        self.said: list[list[int]] = [[] for _ in range(batch)]
        plain = told(self.model, self.given, [[9]] * batch, **self.options)
        torch.testing.assert_close(first, plain.logits[0], **CLOSE)
        mask = self.given.get("attention_mask", torch.ones_like(self.given["input_ids"])).bool()
        mask = mask.repeat_interleave(batch // mask.shape[0], dim=0)
        for tap in self.taps:
            assert states[tap].shape == plain.hidden_states[0][tap].shape
            torch.testing.assert_close(states[tap][mask], plain.hidden_states[0][tap][mask], **CLOSE)
        for nodes in (8, 1, 6):
            self.round(target, batch, nodes)
        kept = [self.rng.randint(1, len(said)) for said in self.said]
        target.crop(kept)
        self.said = [said[:keep] for said, keep in zip(self.said, kept, strict=True)]
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
            said = [old + more for old, more in zip(self.said, new, strict=True)]
            plain = told(self.model, self.given, said, **self.options)
            for row, line in enumerate(chosen):
                for step, node in enumerate(line, len(self.said[row]) + 1):
                    torch.testing.assert_close(logits[row, node], plain.logits[step][row], **CLOSE)
                    for tap in self.taps:
                        state = plain.hidden_states[step][tap][row, -1]
                        torch.testing.assert_close(states[tap][row, node], state, **CLOSE)
                    self.nodes += 1
        walked = [self.rng.choice(path) for path in paths]
        walked = [line[: self.rng.randint(1 if not self.said[b] else 0, len(line))] for b, line in enumerate(walked)]
        target.commit(verdict_of(tree, walked))
        for row, line in enumerate(walked):
            self.said[row] += tree.tokens[row, line].tolist()


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
    assert len(probe.said) == 4


@FAMILY
def test_a_conversation_that_goes_on(family: str) -> None:
    """The prompt is what is new, or all of it, behind a cache that transformers filled."""
    model = model_of(family)
    given = tiny.build_inputs(model, 4, 2, num_text_tokens=(3, 6))
    for tail in (False, True):

        def before(tail: bool = tail) -> tuple[tiny.Inputs, Any]:
            text = model.config.get_text_config()
            said = told(model, given, [[11, 12, 13]] * 2, past_key_values=DynamicCache(config=text))
            more = tiny.build_next_turn(given, said.sequences, 1, model.tiny_spec)
            if tail:
                more["input_ids"] = more["input_ids"][:, said.past_key_values.get_seq_length() :]
            return more, said.past_key_values

        more, cache = before()

        def use(target: HFTarget) -> None:
            first, _ = target.prefill()
            plain, tree = [], bush(random.Random(0), [20, 21], 6, (30, 31, 32))
            logits, _ = target.score(tree)
            paths = [lines(tree, row)[0] for row in range(2)]
            rows = [tree.tokens[row, path].tolist() for row, path in enumerate(paths)]
            again, past = before()
            plain = told(model, again, rows, past_key_values=past).logits
            torch.testing.assert_close(first, plain[0], **CLOSE)
            for row, path in enumerate(paths):
                for step, node in enumerate(path, 1):
                    torch.testing.assert_close(logits[row, node], plain[step][row], **CLOSE)

        inside(model, more, use, past_key_values=cache)


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
    """Changing a node changes what it and those below it say, and nothing else."""
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
                for node in tree.valid[row].nonzero().flatten().tolist():
                    below = row == 0 and bool(tree.ancestor_mask[row, node, 3])
                    assert torch.equal(before[row, node], after[row, node]) != below

        inside(model, tiny.build_inputs(model, 6, 2), use)


def test_what_is_asked_of_the_text_model_is_what_decoding_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of a round are those of a decoding step of transformers, but for ids, positions, mask and cache."""
    for family in tiny.FAMILIES:
        model = model_of(family)
        given, seen = tiny.build_inputs(model, 7, 2), list[dict[str, Any]]()
        forward = type(model).forward

        @functools.wraps(forward)
        def spy(self: Any, *args: Any, _seen: list[Any] = seen, _forward: Any = forward, **kwargs: Any) -> Any:
            _seen.append(kwargs)
            return _forward(self, *args, **kwargs)

        with monkeypatch.context() as patching:
            patching.setattr(model, "forward", types.MethodType(spy, model))
            model.generate(**given, max_new_tokens=3, do_sample=False)
            plain = seen[-1]
            seen.clear()
            inside(
                model, given, lambda target: (target.prefill(), target.score(bush(random.Random(0), [9, 9], 4, [9])))
            )
        own = {"input_ids", "position_ids", "attention_mask", "past_key_values", "logits_to_keep", "cache_position"}
        assert set(seen[-1]) - own == set(plain) - own, family
        for name in set(plain) - own:
            mine, theirs = seen[-1][name], plain[name]
            if isinstance(theirs, Tensor):
                assert mine.dtype == theirs.dtype and mine.shape[:-1] == theirs.shape[:-1]
                assert torch.equal(mine[..., :1], theirs[..., -1:]), (family, name)  # 5.18 passes on the whole of it
            else:
                assert mine == theirs, (family, name)


# --- segments ---------------------------------------------------------------------------------------------------------


def media(model: PreTrainedModel, given: tiny.Inputs) -> list[Tensor]:
    """What the vision side makes of each picture, in the order of the inputs: [tokens, D] each."""
    names = ("pixel_values", "image_sizes", "image_grid_thw", "image_position_ids")
    pictures = {name: given[name] for name in names if name in given}
    with torch.no_grad():
        found = list(model.model.get_image_features(**pictures, return_dict=True).pooler_output) if pictures else []
        if "pixel_values_videos" in given:
            names = ("pixel_values_videos", "video_grid_thw", "video_position_ids", "num_frames_per_video")
            clips = {name: given[name] for name in names if name in given}
            found += list(model.model.get_video_features(**clips, return_dict=True).pooler_output)
    return found


class Looking(adversarial.AdversarialDrafter):
    """Keeps the prompts it is shown."""

    name = "looking"

    def __init__(self) -> None:
        super().__init__()
        self.requirements = DrafterRequirements(hidden_state_indices=(0,))
        self.prompts: list[Prompt] = []

    def begin(self, prompt: Prompt) -> Any:
        self.prompts.append(prompt)
        return super().begin(prompt)


def shown(model: PreTrainedModel, given: tiny.Inputs, **options: Any) -> Prompt:
    """What a drafter is shown of a call."""
    looking = Looking()
    mmspec.patch(model, drafter=looking)
    try:
        model.generate(**given, max_new_tokens=2, do_sample=bool(options), **options)
        assert not mmspec.stats(model).fallback_calls
    finally:
        mmspec.unpatch(model)
    return looking.prompts[0]


def check_segments(model: PreTrainedModel, given: tiny.Inputs, prompt: Prompt, repeats: int = 1) -> None:
    """They cover the placeholders once, and each source stands where its own features were put."""
    special = tiny.special_ids(model.tiny_spec)
    places = torch.isin(prompt.input_ids, torch.tensor([special.image, special.video]))
    assert torch.equal(prompt.visual_mask, places)
    covered, sources = torch.zeros_like(prompt.input_ids), dict[int, list[Any]]()
    for segment in prompt.grids:
        assert segment.num_tokens > 0 and segment.height > 0 and segment.width > 0
        covered[segment.row, segment.start : segment.start + segment.num_tokens] += 1
        if segment.row % repeats == 0:
            sources.setdefault(segment.media_index, []).append(segment)
    assert torch.equal(covered, places.long()), "not every visual token once"
    features = media(model, given)
    assert sorted(sources) == list(range(len(features)))
    for number, feature in enumerate(features):
        parts = sources[number]
        assert len({part.row for part in parts}) == 1, "a picture in two rows"
        ends = [part.start + part.num_tokens for part in parts]
        starts = [part.start for part in parts[1:]]
        # Gemma 4 has text between the frames of a video.
        is_apart = model.config.model_type == "gemma4" and all(map(int.__gt__, starts, ends))
        assert is_apart or starts == ends[:-1], "parts out of order"
        row = prompt.hidden_states[0][parts[0].row]
        states = torch.cat([row[part.start : part.start + part.num_tokens] for part in parts])
        states = states[: len(feature)]  # OneVision ends a clip with a newline token of its own
        torch.testing.assert_close(states, feature.reshape(-1, feature.shape[-1])[: len(states)], **CLOSE)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *GRID_ROWS])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_segments_cover_the_placeholders_of_their_pictures(family: str, padding: str) -> None:
    model = model_of(family)
    for seed in range(12):
        given = tiny.build_inputs(
            model, seed, 1 + seed % 3, padding=padding, images=None if seed % 2 else [1] * (1 + seed % 3)
        )
        prompt = shown(model, given)
        if not prompt.grids:  # pictures side by side, which these families cannot tell apart
            assert family in ("llava_next", "llava_onevision", "llava_next_video")
            continue
        check_segments(model, given, prompt)


CLIPS = pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)


def frames_of(prompt: Prompt) -> dict[int, list[Any]]:
    """{source: its frames} of a prompt."""
    found: dict[int, list[Any]] = {}
    for segment in prompt.grids:
        if segment.role == "frame":
            found.setdefault(segment.media_index, []).append(segment)
    return found


@pytest.mark.parametrize("family", [*tiny.VIDEO_FAMILIES, "gemma4"])
def test_segments_of_clips(family: str) -> None:
    model, seen = model_of(family), set[str]()
    for seed in range(12):
        given = tiny.build_inputs(model, seed, 2, images=[seed % 2, 1], videos=[1, (seed // 2) % 2])
        prompt = shown(model, given)
        if prompt.grids:
            check_segments(model, given, prompt)
            frames = [segment for segment in prompt.grids if segment.role == "frame"]
            assert frames
            for clip in {segment.media_index for segment in frames}:
                times = [segment.frame for segment in frames if segment.media_index == clip]
                assert times == list(range(len(times))), "frames out of order"
            seen |= {segment.role for segment in prompt.grids}
    assert seen >= {"base", "frame"}


@CLIPS
def test_clips_alone_and_side_by_side(family: str) -> None:
    """As many clips as were given, each with its frames, whether or not words stand between them."""
    model = model_of(family)
    for seed in range(8):
        given = tiny.build_inputs(
            model, seed, 2, images=[0, 0], videos=[2, 1], num_text_tokens=(1, 3) if seed % 2 else (6, 9)
        )
        prompt = shown(model, given)
        check_segments(model, given, prompt)
        clips, pixels = frames_of(prompt), given["pixel_values_videos"]
        assert sorted(clips) == [0, 1, 2] and [frames[0].row for frames in clips.values()] == [0, 0, 1]
        lengths = given["video_grid_thw"][:, 0].tolist() if family == "qwen2_5_vl" else [pixels.shape[1]] * 3
        for length, frames in zip(lengths, clips.values(), strict=True):
            assert [frame.frame for frame in frames] == list(range(length))
            assert len({(frame.height, frame.width) for frame in frames}) == 1


@CLIPS
def test_a_frame_stands_where_its_segment_says(family: str) -> None:
    """Changing one frame of a clip changes the embeddings of its segment, and of no other frame."""
    model = model_of(family)
    given = tiny.build_inputs(model, 6, 1, images=[1], videos=[1])
    before = shown(model, given)
    (frames,) = frames_of(before).values()
    for frame in frames:
        changed = {**given, "pixel_values_videos": given["pixel_values_videos"].clone()}
        pixels = changed["pixel_values_videos"]
        part = pixels.view(len(frames), -1)[frame.frame]  # Qwen's patches are in the order of time too
        part.neg_()
        after = shown(model, changed)
        moved = (before.hidden_states[0] - after.hidden_states[0]).abs().amax(-1)[0] > 1e-6
        places = range(frame.start, frame.start + frame.num_tokens)
        assert moved.nonzero().flatten().tolist() == list(places)


def test_frames_of_llava_next_video_are_pooled_with_the_stride_of_the_config() -> None:
    model = model_of("llava_next_video")
    config = model.config
    side = config.vision_config.image_size // config.vision_config.patch_size
    assert side // config.spatial_pool_stride == 2
    given = tiny.build_inputs(model, 1, 1, images=[0], videos=[1])
    with torch.no_grad():
        whole = model.model.vision_resampler(torch.arange(side * side, dtype=torch.float)[None, :, None])[0, :, 0]
    for segment in shown(model, given).grids:
        rows = whole.view(segment.height, segment.width)  # what transformers pools, in reading order
        assert (rows.diff(dim=1) == 2).all() and (rows.diff(dim=0) == 2 * side).all()


@CLIPS
def test_clips_that_do_not_fit_give_no_segments(family: str) -> None:
    model = model_of(family)
    given = tiny.build_inputs(model, 3, 2, images=[0, 0], videos=[1, 1])
    adapter = find_adapter(model)
    vision = {name: given[name] for name in adapter.vision_args if name in given}
    assert adapter.grids(given["input_ids"], vision)
    assert adapter.grids(given["input_ids"], {name: part[:1] for name, part in vision.items()}) == ()
    special, ids = tiny.special_ids(model.tiny_spec), given["input_ids"].clone()
    ids[0, (ids[0] == special.video).nonzero()[-1]] = special.text[0]
    assert adapter.grids(ids, vision) == ()


@pytest.mark.parametrize("family", ["llava_onevision", "llava_next_video"])
def test_clips_whose_pixels_nobody_knows(family: str) -> None:
    """Each run is one clip, whatever its length; none if that cannot be."""
    model = model_of(family)
    given, special = tiny.build_inputs(model, 3, 2, images=[0, 0], videos=[1, 1]), tiny.special_ids(model.tiny_spec)
    adapter = find_adapter(model)
    vision = {name: given[name] for name in adapter.vision_args if name in given}
    assert adapter.grids(given["input_ids"], {}) == adapter.grids(given["input_ids"], vision)
    if family == "llava_next_video":
        ids = torch.tensor([[9, *[special.video] * 7, 9]])
        assert adapter.grids(ids, {}) == ()


@FAMILY
def test_segments_of_several_sequences_per_prompt(family: str) -> None:
    model = model_of(family)
    given = tiny.build_inputs(model, 2, 2, images=[1, 1])
    once, thrice = shown(model, given), shown(model, given, num_return_sequences=3)
    assert thrice.input_ids.shape[0] == 6 and len(thrice.grids) == 3 * len(once.grids) > 0
    check_segments(model, given, thrice, repeats=3)
    for row in range(6):
        own = [(s.start, s.height, s.width, s.role) for s in thrice.grids if s.row == row]
        assert own == [(s.start, s.height, s.width, s.role) for s in once.grids if s.row == row // 3]


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision", "llava_next_video"])
def test_grids_of_tiles_end_their_lines_with_a_newline(family: str) -> None:
    """Told apart by the states: every newline token has the same one."""
    model, shapes = model_of(family), set[tuple[int, int]]()
    for seed in range(30):
        given = tiny.build_inputs(model, seed, 1, images=[1])
        prompt = shown(model, given)
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
        base, grid = adapter.grids(ids, {"image_sizes": torch.tensor([size])})
        lines = packed[0][base.num_tokens :, 0].view(grid.height, grid.width + 1)
        assert (lines[:, :-1] == 1).all() and (lines[:, -1] == -1).all(), size


def test_grids_of_qwen_are_those_of_the_inputs() -> None:
    model = model_of("qwen2_5_vl")
    for seed in range(10):
        given = tiny.build_inputs(model, seed, 2, images=[2, 1])
        grids = [(int(h) // 2, int(w) // 2) for _, h, w in given["image_grid_thw"]]
        assert [(s.height, s.width) for s in shown(model, given).grids] == grids


@FAMILY
def test_numbers_that_do_not_fit_give_no_segments(family: str) -> None:
    """Better none than wrong ones: a caller may hand in embeddings of pictures of its own."""
    model = model_of(family)
    given = tiny.build_inputs(model, 2, 2, images=[1, 1])
    adapter = find_adapter(model)
    vision = {name: given[name] for name in adapter.vision_args if name in given}
    special, ids = tiny.special_ids(model.tiny_spec), given["input_ids"].clone()
    first = (ids == special.image).nonzero()[0]
    ids[first[0], first[1]] = special.text[0]
    wrong = adapter.grids(ids, vision)
    covered = torch.zeros_like(ids)
    for segment in wrong:
        covered[segment.row, segment.start : segment.start + segment.num_tokens] += 1
    assert not wrong or torch.equal(covered, (ids == special.image).long())
    if vision:
        assert adapter.grids(given["input_ids"], {name: part[:1] for name, part in vision.items()}) == ()


# --- refusals and kernels ---------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> PreTrainedModel:
    """A model of one's own, to bend."""
    return tiny.build_model(tiny.ModelSpec("llava", text="qwen2"))


def test_reasons_to_refuse(fresh: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_adapter(fresh).unsupported_reason() is None
    monkeypatch.setattr(type(fresh), "_is_stateful", True)
    assert find_adapter(fresh).unsupported_reason() == "a stateful model"
    monkeypatch.undo()
    text = fresh.config.get_text_config()
    text.layer_types = ["full_attention", "linear_attention"]
    assert find_adapter(fresh).unsupported_reason() == "layers of type linear_attention"
    text.layer_types = ["full_attention", "full_attention"]
    text.attention_chunk_size = 8
    assert find_adapter(fresh).unsupported_reason() == "layers of type chunked_attention"
    text.attention_chunk_size = None
    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"full_attention": {"rope_type": "longrope"}}):
        monkeypatch.setattr(text, "rope_parameters", rope)
        reason = find_adapter(fresh).unsupported_reason()
        assert reason is not None and reason.startswith("rope_type=")
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
    assert HFTarget.unsupported_reason(adapter, ids, {"past_key_values": DynamicCache(config=text)}) is None
    static = StaticCache(config=text, max_cache_len=10)
    assert HFTarget.unsupported_reason(adapter, ids, {"past_key_values": static}) == "a StaticCache"
    assert HFTarget.unsupported_reason(adapter, ids, {}) == "no key-value cache"


def test_masks_that_are_refused(fresh: PreTrainedModel) -> None:
    adapter, ids, cache = find_adapter(fresh), torch.ones(2, 5, dtype=torch.long), DynamicCache()
    for mask, reason in (
        (None, None),
        (torch.ones(2, 5), None),
        (torch.ones(2, 7), "an attention_mask of length 7 for 5 input ids"),
        (torch.ones(2, 1, 5, 5), "an attention_mask that is not [batch, length]"),
        ({"full_attention": torch.ones(2, 5)}, "an attention_mask that is not [batch, length]"),
    ):
        given = {"past_key_values": cache, "attention_mask": mask}
        assert HFTarget.unsupported_reason(adapter, ids, given) == reason


@FAMILY
def test_flash_attention_is_switched_and_restored(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the text model only: pictures never meet a tree."""
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
    assert supported() == tuple(sorted(ADAPTERS)) and set(tiny.FAMILIES) <= set(supported())
    for kind, family in ADAPTERS.items():
        assert family.model_type == kind and isinstance(family.vision_args, tuple)
    for kind in tiny.FAMILIES:
        adapter, spec = find_adapter(model_of(kind)), model_of(kind).tiny_spec
        special = tiny.special_ids(spec)
        videos = (special.video,) if kind in tiny.VIDEO_FAMILIES else ()
        assert set(adapter.media_token_ids) == {special.image, *videos}
        assert (adapter.num_layers, adapter.vocab_size) == (spec.layers, spec.vocab)


def test_an_unsupported_family_is_named(fresh: PreTrainedModel) -> None:
    fresh.config.model_type = "blip-2"
    with pytest.raises(UnsupportedModelError) as failed:
        find_adapter(fresh)
    words = str(failed.value)
    assert "'blip-2' (LlavaForConditionalGeneration)" in words and all(kind in words for kind in supported())


def test_runs_of_placeholders() -> None:
    adapter = find_adapter(model_of("llava"))
    ids = torch.tensor([[3, 3, 1, 3], [1, 1, 1, 1], [1, 3, 3, 1]])
    assert adapter.placeholder_runs(ids, 3) == [(0, 0, 2), (0, 3, 1), (2, 1, 2)]
    assert adapter.placeholder_runs(ids, 7) == []
