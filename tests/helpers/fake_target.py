"""A target that was never there: words, states, prompts and rounds for tests of draft heads; and their layer, slow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.drafters.eagle.drafter import EagleDrafter, State
from mmspec.drafters.eagle.head import EagleHead, HeadConfig
from mmspec.drafters.training.losses import Lesson
from mmspec.engine.tree import DraftTree, bare
from mmspec.interfaces import Prompt, Verdict, Words

CONFIG = HeadConfig(32, 48, 4, 2, 40, qkv_bias=True)
LAYERS, PICTURE = 3, 39


@dataclass
class World:
    """A target that was never there: words, and states for every position of some texts."""

    words: Words
    head: EagleHead
    ids: Tensor
    states: Tensor

    def embedded(self, visual: Tensor) -> Tensor:
        """Merged embeddings: visual tokens have their own, not the placeholder's."""
        own = torch.randn(*self.ids.shape, 32, generator=torch.Generator().manual_seed(5))
        return torch.where(visual[..., None], own, self.words.embedding(self.ids))


def new_world() -> World:
    """Always the same."""
    dice = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        words = Words(nn.Embedding(40, 32), nn.Linear(32, 40, bias=False))
        head = EagleHead(CONFIG)
    for weight in head.parameters():
        weight.data.mul_(1.5)
    words.head.weight.data.mul_(3)  # type: ignore[operator,union-attr]
    ids = torch.randint(3, 38, (2, 16), generator=dice)
    return World(words, head.eval(), ids, torch.randn(2, 16, 32, generator=dice))


def prompt_of(world: World, length: int, pads: tuple[int, int] = (0, 0), right: bool = False, **more: Any) -> Prompt:
    """Row b: the first `length - pads[b]` words of its text, of which 2 to 4 are a picture, and padding."""
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    embedded = world.embedded(visual)
    parts: dict[str, list[Tensor]] = {"ids": [], "padding": [], "visual": [], "embedded": [], "states": []}
    for row, count in enumerate(pads):
        n = length - count
        real = torch.ones(n, dtype=torch.bool)
        whole = {"ids": torch.where(visual, PICTURE, world.ids)[row, :n], "padding": real, "visual": visual[row, :n]}
        whole |= {"embedded": embedded[row, :n], "states": world.states[row, :n]}
        for name, value in whole.items():
            fill = value.new_zeros(count, *value.shape[1:])
            parts[name].append(torch.cat([value, fill] if right else [fill, value]))
    joined = {name: torch.stack(values) for name, values in parts.items()}
    return Prompt(
        ids=joined["ids"], padding=joined["padding"], visual=joined["visual"], positions=joined["ids"],
        taps={0: joined["embedded"], LAYERS: joined["states"]}, vocab_size=40, banned=frozenset((0, PICTURE)),
        words=world.words, **more,
    )  # fmt: skip


def first_verdict(tokens: list[int]) -> Verdict:
    column = torch.tensor(tokens)[:, None]
    rows = [[token] for token in tokens]
    ones, zeros = torch.ones(len(tokens), dtype=torch.long), torch.zeros_like(column)
    return Verdict(bare(len(tokens)), zeros, ones, column, rows, [[0]] * len(tokens))


def emitted(tree: DraftTree, walked: list[list[int]], tokens: list[list[int]]) -> Verdict:
    """A round that walked these nodes and emitted these tokens."""
    longest = max(map(len, tokens))
    fill = (
        [[*row, *[0] * (longest - len(row))] for row in tokens],
        [[*row, *[0] * (longest - len(row))] for row in walked],
    )
    counts = torch.tensor([len(row) for row in tokens])
    return Verdict(tree, torch.tensor(fill[1]), counts, torch.tensor(fill[0]), tokens, walked)


def started(world: World, made: EagleDrafter, prompt: Prompt) -> State:
    """After the prompt was read, with the words that follow in the texts."""
    state = made.begin(prompt)
    lengths = prompt.padding.sum(1).tolist()
    made.observe(state, first_verdict([int(world.ids[row, n]) for row, n in enumerate(lengths)]), {})
    made.read(state)
    return state


def prompt_rows(world: World, head: EagleHead, rule: str, row: int, n: int) -> tuple[list[Tensor], list[int]]:
    """What a head reads by a rule of the first n words of a text, when the n-th is known, and the rows' positions."""
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    embed = world.words.embedding
    embedded = world.embedded(visual)[row]
    after = embed(world.ids[row, n])
    rows, places = [], []
    for p in range(n):
        following = embedded[p + 1] if p + 1 < n else after
        seen = p + 1 < n and bool(visual[row, p + 1])
        if rule == "textual" and seen:
            continue
        if rule == "blind" and seen:
            following = embed(torch.tensor(PICTURE))
        fused = head.fc(torch.cat([following, world.states[row, p]]))
        rows.append(following if rule == "decoupled" and seen else fused)
        places.append(p)
    return rows, places


def slow_pass(head: EagleHead, rows: Tensor, places: Tensor, sees: Tensor | None = None) -> Tensor:
    """The layer, written out. sees: [n, n] bool, which rows each row looks at; all up to itself if None."""
    layer, n, d = head.layer, len(rows), CONFIG.head_dim
    mixed = layer.qkv_proj(rows).view(n, 8, d)
    queries, keys, values = mixed[:, :4], mixed[:, 4:6], mixed[:, 6:]
    steps = 10000.0 ** (-torch.arange(0, d, 2) / d)
    angle = places[:, None] * steps
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def turned(v: Tensor) -> Tensor:
        pairs = torch.complex(v[..., : d // 2], v[..., d // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    queries, keys = turned(queries), turned(keys)
    out = torch.zeros(n, 4, d)
    for i in range(n):
        for h in range(4):
            seen = torch.arange(n) <= i if sees is None else sees[i]
            shares = (keys[seen, h // 2] @ queries[i, h] / math.sqrt(d)).softmax(0)
            out[i, h] = shares @ values[seen, h // 2]
    rows = rows + layer.o_proj(out.flatten(1))
    if not layer.feeds:
        return rows
    normed = rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.post_norm.weight
    gate, up = layer.gate_up_proj(normed).chunk(2, -1)
    result: Tensor = rows + layer.down_proj(torch.nn.functional.silu(gate) * up)
    return result


def paths_of(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """{tokens below the root: score} of a row's nodes."""
    assert tree.scores is not None
    found: dict[tuple[int, ...], float] = {}
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.nodes):
        parent = int(tree.parents[row, node])
        assert 0 <= parent < node, "parents first"
        paths.append((*paths[parent], int(tree.tokens[row, node])))
        if tree.valid[row, node]:
            assert paths[-1] not in found, "twins"
            found[paths[-1]] = float(tree.scores[row, node])
    return found


def lesson_of(world: World, seed: int = 0, length: int = 14) -> Lesson:
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    index = torch.arange(16)[:length]
    answer = (index >= 7) & (index < torch.tensor([[14], [12]]))
    real = index < torch.tensor([[14], [12]])
    ids = torch.where(visual, PICTURE, world.ids)[:, :length]
    return Lesson(ids, real, visual[:, :length], answer, world.embedded(visual)[:, :length], world.states[:, :length])
