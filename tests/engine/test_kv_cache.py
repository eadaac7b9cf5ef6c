"""`RaggedKVCache` against lists of positions, over random sequences of the calls that the loop makes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, StaticCache

from mmspec.engine import kv_cache
from mmspec.engine.kv_cache import RaggedKVCache, RecordedKVCache, length_bucket

HEADS, SIZE = 2, 3
BUCKETS = (1, 2, 4, 8, 16)


class ReferenceCache:
    """The slow reference: for every layer and row a list of positions."""

    def __init__(self, layers: int, batch: int) -> None:
        self.positions: list[list[list[Tensor]]] = [[[] for _ in range(batch)] for _ in range(layers)]
        self.new: list[Tensor] = []

    def lengths(self) -> list[int]:
        """Positions of each row."""
        return [len(row) for row in self.positions[0]]

    def check(self, layer: int, keys: Tensor, values: Tensor, new: Tensor | None = None) -> None:
        """Compare views [B, H, kv_len, D] with all committed positions, and `new` [2, B, H, n, D] behind them."""
        views = torch.stack([keys, values])
        for b, row in enumerate(self.positions[layer]):
            if row:
                assert torch.equal(views[:, b, :, : len(row)], torch.stack(row, dim=-2))
            if new is not None:
                assert torch.equal(views[:, b, :, len(row) : len(row) + new.shape[3]], new[:, b])
        assert views.isfinite().all(), "masked positions must be finite: 0 * nan is nan"

    def keep(self, news: list[Tensor], accepted_nodes: list[list[int]]) -> None:
        """Append the accepted nodes of the last forward, of [2, B, H, n, D] for each layer."""
        for layer, new in zip(self.positions, news, strict=True):
            for b, nodes in enumerate(accepted_nodes):
                layer[b] += [new[:, b, :, node] for node in nodes]


def write_forward(buffer: RaggedKVCache, rows: ReferenceCache, nodes: int, rng: torch.Generator) -> list[Tensor]:
    """One forward: write random values to every layer, check the views."""
    batch = len(buffer.seq_lens)
    buffer.begin_forward(nodes)
    assert buffer.kv_len == max(rows.lengths()) + nodes
    news = [torch.randn(2, batch, HEADS, nodes, SIZE, generator=rng) for _ in rows.positions]
    for layer, new in enumerate(news):
        keys, values = buffer.write(layer, new[0], new[1])
        assert keys.shape == values.shape == (batch, HEADS, buffer.kv_len, SIZE)
        rows.check(layer, keys, values, new)
    return news


def random_path(rng: random.Random, batch: int, nodes: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Accepted nodes: ascending, node 0 first; none for rows that wait. The rest of `path` is random."""
    kind, accepted_nodes = rng.choice(("chain", "ragged", "level", "root")), []
    for _ in range(batch):
        count = rng.choice((0, 1, rng.randint(0, nodes))) if kind == "ragged" else rng.randint(1, nodes)
        count = 1 if kind == "root" else nodes if kind == "level" else count
        row = [0, *sorted(rng.sample(range(1, nodes), count - 1))] if count else []
        accepted_nodes.append(list(range(count)) if kind == "chain" else row)
    path = torch.tensor([row + [rng.randrange(nodes) for _ in range(nodes - len(row))] for row in accepted_nodes])
    return path, torch.tensor([len(row) for row in accepted_nodes]), accepted_nodes


@pytest.mark.every(2)
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_calls_equals_the_reference(batch: int, seed: int) -> None:
    rng, noise = random.Random(f"kv {seed} {batch}"), torch.Generator().manual_seed(seed)
    layers, limit = rng.choice((1, 3)), 300
    buffer, rows = RaggedKVCache(batch, limit), ReferenceCache(layers, batch)
    prompt = rng.randint(1, 40)
    news = write_forward(buffer, rows, prompt, noise)
    buffer.advance(prompt)
    rows.keep(news, [list(range(prompt))] * batch)
    while max(rows.lengths()) + max(BUCKETS) <= limit:
        nodes = rng.choice(BUCKETS)
        news = write_forward(buffer, rows, nodes, noise)
        path, counts, accepted_nodes = random_path(rng, batch, nodes)
        buffer.keep_path(path, counts, accepted_nodes)
        rows.keep(news, accepted_nodes)
        assert buffer.seq_lens == rows.lengths() and buffer.is_uniform == (len(set(rows.lengths())) == 1)
        if rng.random() < 0.2:
            cut = [max(0, n - rng.choice((-3, 0, 1, 5))) for n in rows.lengths()]
            buffer.crop(cut)
            for positions in rows.positions:
                for row, length in zip(positions, cut, strict=True):
                    del row[length:]
            assert buffer.seq_lens == rows.lengths()
    assert len(buffer.layers) == layers
    for layer in range(layers):
        rows.check(layer, *buffer.read(layer, max(rows.lengths())))


def test_keep_path_moves_the_path_to_the_front() -> None:
    buffer = RaggedKVCache(2, 20)
    buffer.begin_forward(4)
    new = torch.arange(2.0 * 4).reshape(2, 1, 4, 1)
    buffer.write(0, new, -new)
    accepted_nodes = [[0, 2, 3], [0]]
    buffer.keep_path(torch.tensor([[0, 2, 3, 0], [0, 3, 3, 3]]), torch.tensor([3, 1]), accepted_nodes)
    keys, values = buffer.read(0, 4)
    assert keys[0, 0, :3, 0].tolist() == [0, 2, 3] and values[0, 0, :3, 0].tolist() == [0, -2, -3]
    assert keys[1, 0, :1, 0].tolist() == [4] and buffer.seq_lens == [3, 1]
    assert keys[1, 0, 1:3, 0].tolist() == [4, 4], "what is not accepted may be nan: it becomes a copy of node 0"


def test_growth_copies_everything_and_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "AT_ONCE_BYTES", 0)
    limit, buffer = 1000, RaggedKVCache(3, 1000)
    noise, positions, sizes = torch.Generator().manual_seed(0), list[Tensor](), list[int]()
    one = 3 * HEADS * SIZE * 4 * 2  # bytes of a position
    for step in range(limit):
        buffer.begin_forward(1)
        positions.append(torch.randn(3, HEADS, 1, SIZE, generator=noise))
        buffer.write(0, positions[-1], 2 * positions[-1])
        buffer.advance(1)
        sizes.append(buffer.nbytes)
        assert (step + 1) * one <= buffer.nbytes <= min(limit, 1.25 * (step + 1) + 16) * one
    keys, values = buffer.read(0, limit)
    assert torch.equal(keys, torch.cat(positions, dim=2)) and torch.equal(values, 2 * keys)
    assert len(set(sizes)) < 25, "grown in too many steps"
    assert sizes[-1] == limit * one


def test_a_write_beyond_the_limit_succeeds() -> None:
    """The limit bounds what is allocated ahead; it never makes a write fail."""
    buffer = RaggedKVCache(1, 4)
    buffer.begin_forward(9)
    keys, _ = buffer.write(0, torch.ones(1, 1, 9, 1), torch.ones(1, 1, 9, 1))
    assert keys.shape[2] == 9 and buffer.nbytes == 2 * 9 * 4


@pytest.mark.parametrize("length", [1000, 1024, 2048])
def test_memory_is_that_of_the_static_cache_and_a_tree(length: int) -> None:
    """From 1,000 positions on: at most 1.1 times the static cache of the same length, plus one tree of 64 nodes."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    batch, head = 2, 8

    def states(nodes: int) -> Tensor:
        return torch.ones(batch, config.num_key_value_heads, nodes, head)

    static = StaticCache(config=config, max_cache_len=length)
    for layer in range(2):
        static.update(states(1), states(1), layer)
    own = sum(part.nbytes for layer in static.layers for part in (layer.keys, layer.values))
    tree = own // length * 64
    rng, buffer, peak = random.Random(length), RaggedKVCache(batch, length + 64), 0
    nodes = prompt = length // 2
    while True:
        buffer.begin_forward(nodes)
        for layer in range(2):
            buffer.write(layer, states(nodes), states(nodes))
        peak = max(peak, buffer.nbytes)
        if nodes == prompt:
            buffer.advance(nodes)
        else:
            counts = [min(rng.randint(0, 4), nodes, length - have) for have in buffer.seq_lens]
            accepted_nodes = [list(range(count)) for count in counts]
            buffer.keep_path(torch.arange(nodes).expand(batch, nodes), torch.tensor(counts), accepted_nodes)
        if min(buffer.seq_lens) == length:
            break
        nodes = rng.choice((1, 8, 64))
    assert peak <= 1.1 * own + tree
    assert peak >= own


@pytest.mark.parametrize("batch", [1, 3])
def test_keys_and_values_may_differ_in_heads_and_size_and_layers_in_both(batch: int) -> None:
    """Multi-head latent attention, and models with a head size per layer."""
    rng, noise = random.Random(f"shapes {batch}"), torch.Generator().manual_seed(batch)
    shapes = [((2, 5), (2, 3)), ((1, 4), (1, 4)), ((2, 3), (4, 3))]
    buffer = RaggedKVCache(batch, 300)
    expected = [[[torch.empty(*shape[:1], 0, shape[1])] * batch for shape in layer] for layer in shapes]
    for nodes in (7, 4, 1, 8, 3, 8):
        buffer.begin_forward(nodes)
        path, counts, accepted = random_path(rng, batch, nodes)
        for layer, layer_shapes in enumerate(shapes):
            new = [torch.randn(batch, heads, nodes, size, generator=noise) for heads, size in layer_shapes]
            for part, view in enumerate(buffer.write(layer, new[0], new[1])):
                for b, length in enumerate(buffer.seq_lens):
                    assert torch.equal(view[b, :, :length], expected[layer][part][b])
                    assert torch.equal(view[b, :, length : length + nodes], new[part][b])
                expected[layer][part] = [
                    torch.cat([old, new[part][b][:, accepted[b]]], dim=1) for b, old in enumerate(expected[layer][part])
                ]
        buffer.keep_path(path, counts, accepted)
    buffer.zero_tail()
    for layer in range(len(shapes)):
        for part, view in enumerate(buffer.read(layer, max(buffer.seq_lens) + 1)):
            for b, length in enumerate(buffer.seq_lens):
                assert torch.equal(view[b, :, :length], expected[layer][part][b])
                assert not view[b, :, length:].any()


def test_buffers_of_all_layers_are_one_list_until_they_are_replaced() -> None:
    cache = RaggedKVCache(2, max_length=64)
    new = torch.ones(2, HEADS, 4, SIZE)
    cache.begin_forward(4)
    for layer in range(3):
        cache.write(layer, new, new)
    cache.advance(4)

    def buffers(nodes: int) -> list[Tensor]:
        cache.begin_forward(nodes)
        found = cache.common_buffers()
        assert found is not None
        assert [one.data_ptr() for one in found] == [parts[0].data_ptr() for parts in cache.layers]
        assert all(one.shape[3] >= cache.kv_len for one in found)
        return found

    first = buffers(1)
    assert buffers(2) is first
    grown = buffers(first[0].shape[3])
    assert grown is not first
    assert buffers(1) is grown
    assert cache.pack(64)
    assert buffers(1) is not grown
    cache.begin_forward(1)
    cache.write(0, new[:, :, :1].double(), new[:, :, :1].double())  # one layer alone, of a larger type
    buffers(1)


def test_growth_of_written_buffers_is_bounded() -> None:
    """Also where nothing new is written by torch, as before a forward in C, and no length of the call is known."""
    cache = RaggedKVCache(8, max_length=1 << 30)
    for nodes in (60, 3000):
        cache.begin_forward(nodes)
        if nodes == 60:
            cache.write(0, torch.ones(8, 2, nodes, 8), torch.ones(8, 2, nodes, 8))
        assert cache.common_buffers() is not None
        assert cache.nbytes <= max(kv_cache.AT_ONCE_BYTES, 1.25 * 8 * 2 * 8 * 8 * (nodes + 60) + 4096 * 64)
        cache.advance(nodes)


@pytest.mark.parametrize(("heads", "allocations"), [(2, 1), (2000, 3)])
def test_a_call_of_known_length_is_allocated_once(heads: int, allocations: int) -> None:
    """Below a mebibyte a layer; larger ones grow with the answer, which may end early."""
    cache, found = RaggedKVCache(1, max_length=150), set[int]()
    for nodes in (64, *[1] * 80):
        cache.begin_forward(nodes)
        cache.write(0, torch.ones(1, heads, nodes, 8), torch.ones(1, heads, nodes, 8))
        cache.advance(nodes)
        found.add(cache.layers[0][0].shape[3])
    assert len(found) == allocations and max(found) <= 150


# --- the cache of recorded rounds -------------------------------------------------------------------------------------


def test_length_buckets() -> None:
    buckets = sorted({length_bucket(length) for length in range(1, 4097)})
    assert buckets == [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert all(length <= length_bucket(length) for length in range(1, 4097))
    assert all(bucket % 16 == 0 for bucket in buckets), "the alignment of masks"


@pytest.mark.parametrize("batch", [1, 3])
def test_a_packed_cache_equals_a_growing_one(batch: int) -> None:
    """A prompt, random trees written as in a recorded function, and cuts; keys and values of two shapes."""
    rng = torch.Generator().manual_seed(batch)
    packed, growing = RaggedKVCache(batch, 256), RaggedKVCache(batch, 256)
    sizes = [(4, 4), (4, 4), (4, 6)]

    def random_parts(n: int, layer: int) -> list[Tensor]:
        return [torch.randn(batch, 2, n, size, generator=rng) for size in sizes[layer]]

    for layer in range(3):
        parts = random_parts(5, layer)
        for cache in (packed, growing):
            if layer == 0:
                cache.begin_forward(5)
            cache.write(layer, *parts)
    packed.advance(5)
    growing.advance(5)
    assert packed.pack(512) and not packed.pack(512), "moved once"
    assert len(packed.groups) == 3, "two layers of one shape, and keys and values of the third"
    for step in range(12):
        nodes = (1, 4, 8)[step % 3]
        growing.begin_forward(nodes)
        packed.begin_forward(nodes)
        view = RecordedKVCache(packed.layers, packed.lengths_on(torch.device("cpu")), 256)
        view.begin_forward(nodes)
        for layer in range(3):
            parts = random_parts(nodes, layer)
            growing.write(layer, *parts)
            for found, new in zip(view.write(layer, *parts), parts, strict=True):
                assert found.shape[2] == 256
                for row, length in enumerate(growing.seq_lens):
                    assert torch.equal(found[row, :, length : length + nodes], new[row])
        rows = [[0, *range(2, 2 + (row + step) % (nodes - 1))] if nodes > 1 else [0] for row in range(batch)]
        rows[-1] = [] if step == 5 and batch > 1 else rows[-1]
        path = torch.tensor([row + [0] * (nodes - len(row)) for row in rows])
        counts = torch.tensor([len(row) for row in rows])
        packed.keep_path(path, counts, rows)
        growing.keep_path(path, counts, rows)
        if step % 4 == 3:
            cut = [length - 1 for length in growing.seq_lens]
            packed.crop(cut)
            growing.crop(cut)
        assert packed.groups and packed.seq_lens == growing.seq_lens
        assert packed.seq_lens == packed.lengths_on(torch.device("cpu")).tolist()
        for layer, row in ((layer, row) for layer in range(3) for row in range(batch)):
            length = growing.seq_lens[row]
            for a, b in zip(packed.read(layer, length), growing.read(layer, length), strict=True):
                assert torch.equal(a[row], b[row])
    packed.zero_tail()
    assert not any(group[:, :, 0, :, packed.seq_lens[0] :].any() for group in packed.groups)
    packed.reset()
    assert not any(group.any() for group in packed.groups) and packed.seq_lens == [0] * batch


def test_nan_of_a_rejected_node_does_not_spread() -> None:
    """A masked position contributes 0 * value."""
    cache = RaggedKVCache(1, 256)
    cache.begin_forward(2)
    cache.write(0, torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    cache.advance(2)
    cache.pack(256)
    nodes = torch.ones(1, 1, 4, 4)
    nodes[:, :, 2:] = torch.nan
    cache.begin_forward(4)
    cache.write(0, nodes, nodes)
    cache.keep_path(torch.tensor([[0, 1, 2, 3]]), torch.tensor([2]), [[0, 1]])
    assert cache.seq_lens == [4] and cache.groups[0].isfinite().all()
