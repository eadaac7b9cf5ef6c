"""Training datasets, generated on demand: images with patch labels, and chats with token labels.

A sample is a function of its seed, so a resumed run sees the samples of an uninterrupted one. Independent of the model
and of the training loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.sprites import SIGN_CHARACTERS
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED, Scene, generate_scene
from research.scenes import grammar
from research.scenes.build_model import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    IMAGE_TOKEN_ID,
    NUM_VISUAL_TOKENS,
    PAD_TOKEN_ID,
    format_prompt,
)
from research.scenes.clips import Clip, generate_clip
from research.scenes.names import plural
from research.scenes.patch_labels import (
    ACTIONS,
    IGNORE_INDEX,
    MAX_SIGN_LENGTH,
    PATCH_LABEL_NAMES,
    REGION_INDEX,
    PatchLabels,
    label_actions,
    render_with_labels,
)

SceneOrClip = TypeVar("SceneOrClip", Scene, Clip)

ABOUT_ABSENT = len(REGION_INDEX)
"""Class of `ChatSample.about`: the scene has no thing of the named kind. Lower classes are regions."""
ABOUT_COUNT = ABOUT_ABSENT + 1
"""First of five classes: two to six things of the named kind."""
ABOUT_TOTAL = ABOUT_COUNT + 5
"""First of six classes, for the token "things": one to six things in all."""
ABOUT_ACTION = ABOUT_TOTAL + 6
"""First of the classes of `ACTIONS`: in a clip, the action of the named thing."""
NUM_ABOUT_CLASSES = ABOUT_ACTION + len(ACTIONS)
ALTERNATIVE_SEED_OFFSET = 10_000_000
"""Distance between a seed and the next one that may replace it (`_first_matching`)."""
INDEPENDENT_SHARE = 0.75
"""Share of the chat samples whose turns are independent."""


def to_pixel_values(image: Image.Image) -> Tensor:
    """Return [3, H, W] float32 in -1 to 1, equal to the processor's output for an image of the model's size."""
    array = np.asarray(image, dtype=np.float32) / 127.5 - 1
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


class PatchDataset(Dataset[dict[str, Tensor]]):
    """Images and their `PatchLabels`, as dicts with `pixel_values` [3, H, W]; one sample per seed."""

    def __init__(self, first_seed: int, count: int) -> None:
        """
        Raises:
            ValueError: The seeds reach the held-out range.
        """
        _check_seeds(first_seed, count)
        self.first_seed, self.count = first_seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        seed = self.first_seed + index
        num_things = choose_num_things(seed)
        scene = generate_scene(seed, num_things)
        if scene.sign is None and seed % 2:  # more signs: reading needs the largest number of samples
            scene = _first_matching(lambda n: generate_scene(n, num_things), seed, lambda it: it.sign is not None)
        image, patches = render_with_labels(scene)
        return {"pixel_values": to_pixel_values(image), **vars(patches)}


@dataclass
class ChatSample:
    """One conversation about a scene or a clip. S tokens, F images.

    Attributes:
        input_ids: S token ids; each image is a run of `NUM_VISUAL_TOKENS` placeholders.
        labels: S token ids of the answers and their end-of-sequence tokens; `IGNORE_INDEX` elsewhere.
        turn_ids: S turn numbers from 1 if turns are independent (each attends to the images and itself); 0 for the
            images, and for all tokens of a conversation whose turns attend to the earlier ones.
        pixel_values: [F, 3, H, W] float32.
        patches: F patch labels.
        about: S classes, on tokens that name an object kind or read "things": a region or an `ABOUT_...` class.
    """

    input_ids: list[int]
    labels: list[int]
    turn_ids: list[int]
    pixel_values: Tensor
    patches: list[PatchLabels]
    about: list[int]


class ChatDataset(Dataset[ChatSample]):
    """Chats about scenes and clips; one sample per seed.

    Clips are several times as long as scenes, so samples come in groups: all samples of a group are clips of one
    length, or none is a clip. Set the group size to the batch size.
    """

    def __init__(
        self,
        tokenizer: Any,
        first_seed: int,
        count: int,
        group_size: int = 16,
        clip_share: float = 0.1,
        prefer_full: bool = True,
    ) -> None:
        """
        Args:
            tokenizer: The scenes tokenizer.
            first_seed: Seed of sample 0.
            count: Number of samples.
            group_size: Samples per group.
            clip_share: Share of the groups that are clips.
            prefer_full: Half of the scenes have four to six things. If False, scenes follow the world's distribution
                and turns are balanced (`grammar.generate_qa_turns`).

        Raises:
            ValueError: The seeds reach the held-out range.
        """
        _check_seeds(first_seed, count)
        self.tokenizer = tokenizer
        self.first_seed, self.count = first_seed, count
        self.group_size = group_size
        self.clip_share = clip_share
        self.prefer_full = prefer_full
        self.kind_by_token = map_tokens_to_kinds(tokenizer)
        things_ids = tokenizer(" things", add_special_tokens=False).input_ids
        self.things_token_id = things_ids[0] if len(things_ids) == 1 else None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> ChatSample:
        seed = self.first_seed + index
        rng = random.Random(f"talk {seed}")
        group_rng = random.Random(f"group {seed // self.group_size}")
        if group_rng.random() < self.clip_share:
            num_frames = group_rng.choice((4, 4, 4, 4, 4, 5, 6, 8))  # long clips are expensive
            return self._build_clip_sample(seed, rng, num_frames)
        num_things = choose_num_things(seed) if self.prefer_full else None
        scene = generate_scene(seed, num_things)
        if scene.sign is None and rng.random() < 0.6:  # more signs: reading needs the largest number of samples
            scene = _first_matching(lambda n: generate_scene(n, num_things), seed, lambda it: it.sign is not None)
        if scene.sign is not None and rng.random() < 0.5:  # random text prevents memorising the list of sign words
            scene = replace(scene, sign=replace(scene.sign, text=_random_sign_text(rng)))
        image, patches = render_with_labels(scene)
        independent = rng.random() < INDEPENDENT_SHARE
        turns = sample_turns(scene, rng, not self.prefer_full, independent)
        encoded = encode_turns(self.tokenizer, turns, independent=independent)
        about = [self._label_entity(scene, token_id) for token_id in encoded[0]]
        return ChatSample(*encoded, to_pixel_values(image)[None], [patches], about)

    def _label_entity(self, scene: Scene, token_id: int) -> int:
        """Class of a token in a scene: region or number of the named things."""
        if token_id == self.things_token_id:
            return ABOUT_TOTAL + len(scene.things) - 1
        kind = self.kind_by_token.get(token_id)
        if kind is None:
            return IGNORE_INDEX
        named = [thing for thing in scene.things if thing.kind == kind]
        if len(named) < 2:
            return REGION_INDEX[named[0].region] if named else ABOUT_ABSENT
        return ABOUT_COUNT + len(named) - 2

    def _label_action(self, clip: Clip, token_id: int) -> int:
        """Class of a token in a clip: action of the named thing."""
        kind = self.kind_by_token.get(token_id)
        if kind is None:
            return IGNORE_INDEX
        others = {thing.kind for frame in clip.frames for thing in frame.things if thing.kind != clip.hero.kind}
        if kind == clip.hero.kind:
            is_unique = all(frame.count(kind) < 2 for frame in clip.frames)
            return ABOUT_ACTION + ACTIONS.index((clip.event.what, clip.event.way)) if is_unique else IGNORE_INDEX
        return ABOUT_ACTION + ACTIONS.index(("stays", "")) if kind in others else ABOUT_ABSENT

    def _build_clip_sample(self, seed: int, rng: random.Random, num_frames: int) -> ChatSample:
        # The world's clips often hold one thing; a model trained on those alone ignores motion beside other things.
        num_things = rng.choice((None, 2, 3))
        clip = _first_matching(
            lambda n: generate_clip(n, num_frames, num_things),
            seed,
            lambda it: it.event.what == "moves" or rng.random() < 0.4,
        )
        frames = [render_with_labels(frame) for frame in clip.frames]
        for (_, previous), (_, current) in pairwise(frames):
            current.action = label_actions(clip, previous, current)
        turns = [grammar.ask_clip(clip, rng), *grammar.generate_clip_qa_turns(clip, rng)[:6]]
        rng.shuffle(turns)
        encoded = encode_turns(self.tokenizer, turns, len(frames), independent=rng.random() < INDEPENDENT_SHARE)
        pixel_values = torch.stack([to_pixel_values(image) for image, _ in frames])
        about = [self._label_action(clip, token_id) for token_id in encoded[0]]
        return ChatSample(*encoded, pixel_values, [patches for _, patches in frames], about)


def map_tokens_to_kinds(tokenizer: Any) -> dict[int, int]:
    """Return {token id: object kind} for singular and plural names that are one token."""
    kinds: dict[int, int] = {}
    for index, kind in enumerate(OBJECT_KINDS):
        for name in (kind.name, plural(kind)):
            token_ids = tokenizer(" " + name, add_special_tokens=False).input_ids
            if len(token_ids) == 1:
                kinds[token_ids[0]] = index
    return kinds


def choose_num_things(seed: int) -> int | None:
    """Return the number of things of a training scene: four to six for half of the seeds, None (world's choice) else.

    Full scenes teach more names at the same cost, and errors concentrate in them.
    """
    return None if seed % 4 > 1 else 4 + seed % 3


def _check_seeds(first: int, count: int) -> None:
    last = first + count + 3 * ALTERNATIVE_SEED_OFFSET
    if last > FIRST_HELD_OUT_SEED:
        raise ValueError(
            f"training seeds end before {FIRST_HELD_OUT_SEED}; got {first} to {last} (alternatives included), so "
            "choose a lower first seed"
        )


def _first_matching(
    generate: Callable[[int], SceneOrClip], seed: int, matches: Callable[[SceneOrClip], bool]
) -> SceneOrClip:
    """Return the first match among a seed and three alternative seeds; without a match that of the seed itself."""
    candidates = (generate(seed + index * ALTERNATIVE_SEED_OFFSET) for index in range(4))
    return next((candidate for candidate in candidates if matches(candidate)), None) or generate(seed)


def _random_sign_text(rng: random.Random) -> str:
    """Return two or three random digits, or two to `MAX_SIGN_LENGTH` random letters."""
    if rng.random() < 0.6:
        return str(rng.randint(10, 999))
    letters = [letter for letter in SIGN_CHARACTERS if letter.isalpha()]
    return "".join(rng.choices(letters, k=rng.randint(2, MAX_SIGN_LENGTH)))


def sample_turns(
    scene: Scene, rng: random.Random, balanced: bool = False, independent: bool = False
) -> list[grammar.QATurn]:
    """Return up to ten short turns, or up to four and a long description at a random index.

    `balanced` and `independent` are those of `grammar.generate_qa_turns`.
    """
    if rng.random() < 0.5:
        return grammar.generate_qa_turns(scene, rng, 10, balanced, independent)
    turns = grammar.generate_qa_turns(scene, rng, 4, balanced, independent)
    turns.insert(rng.randint(0, len(turns)), grammar.ask_description(scene, rng))
    return turns


def encode_turns(
    tokenizer: Any, turns: Sequence[grammar.QATurn], num_images: int = 1, independent: bool = False
) -> tuple[list[int], list[int], list[int]]:
    """Tokenize a conversation.

    Args:
        tokenizer: The scenes tokenizer.
        turns: The turns in order.
        num_images: Images before the first question.
        independent: Each question directly follows the images, as if it were the first. One prefill of the images
            then serves all turns, and no answer can be copied from an earlier turn.

    Returns:
        (input_ids, labels, turn_ids), as in `ChatSample`.
    """
    input_ids, labels, turn_ids = [BOS_TOKEN_ID], [IGNORE_INDEX], [0]
    for number, turn in enumerate(turns, 1):
        text = format_prompt(turn.question, num_images if independent or number == 1 else 0)
        prompt_ids = [
            expanded
            for token_id in tokenizer(text, add_special_tokens=False).input_ids
            for expanded in ([IMAGE_TOKEN_ID] * NUM_VISUAL_TOKENS if token_id == IMAGE_TOKEN_ID else [token_id])
        ]
        answer_ids = [*tokenizer(" " + turn.answer, add_special_tokens=False).input_ids, EOS_TOKEN_ID]
        images_end = len(prompt_ids) - prompt_ids[::-1].index(IMAGE_TOKEN_ID) if independent else 0
        image_ids = prompt_ids[:images_end] if number == 1 else []  # shared by all turns
        question_ids = prompt_ids[images_end:]
        input_ids += [*image_ids, *question_ids, *answer_ids]
        labels += [IGNORE_INDEX] * (len(image_ids) + len(question_ids)) + answer_ids
        turn_id = number if independent else 0
        turn_ids += [0] * len(image_ids) + [turn_id] * (len(question_ids) + len(answer_ids))
    return input_ids, labels, turn_ids


def collate_chats(samples: Sequence[ChatSample]) -> dict[str, Tensor]:
    """Return a right-padded batch.

    Returns:
        `input_ids`, `labels`, `about`, `turns`, `attention_mask` [B, S] int64, `pixel_values` [F, 3, H, W] of all
        samples' images, and the labels of `PATCH_LABEL_NAMES`, [F, P] each (`spelling` [F, P, MAX_SIGN_LENGTH]).
    """
    shape = (len(samples), max(len(sample.input_ids) for sample in samples))
    input_ids = torch.full(shape, PAD_TOKEN_ID)
    labels = torch.full(shape, IGNORE_INDEX)
    about = torch.full(shape, IGNORE_INDEX)
    turn_ids = torch.zeros(shape, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        input_ids[row, :length] = torch.tensor(sample.input_ids)
        labels[row, :length] = torch.tensor(sample.labels)
        about[row, :length] = torch.tensor(sample.about)
        turn_ids[row, :length] = torch.tensor(sample.turn_ids)
        attention_mask[row, :length] = 1
    patches = [frame for sample in samples for frame in sample.patches]
    return {
        "input_ids": input_ids,
        "labels": labels,
        "about": about,
        "turns": turn_ids,
        "attention_mask": attention_mask,
        "pixel_values": torch.cat([sample.pixel_values for sample in samples]),
        **{name: torch.stack([getattr(frame, name) for frame in patches]) for name in PATCH_LABEL_NAMES},
    }


def generate_corpus(count: int, first_seed: int = 0) -> Iterator[str]:
    """Yield questions with their answers, from `count` scenes and a tenth as many clips, to train the tokenizer."""
    for seed in range(first_seed, first_seed + count):
        rng = random.Random(f"corpus {seed}")
        for turn in grammar.generate_chat(generate_scene(seed), rng, len(grammar.QA_TASKS)):
            yield f"{format_prompt(turn.question, 0)} {turn.answer}"
        if seed % 10 == 0:
            turn = grammar.ask_clip(generate_clip(seed), rng)
            yield f"{format_prompt(turn.question, 0)} {turn.answer}"
