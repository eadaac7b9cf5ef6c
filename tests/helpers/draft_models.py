"""Draft models for tests: a tiny random one for a target, tokenizers, and one that continues given texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tiny_models as tiny
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mmspec.cpu.chain_types import ChainRequest
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import VerifyResult

CORPUS = (
    "A small test: 13 red foxes, two of them asleep. ",
    "Yes, 2.5 km away (or more). The foxes are red and small.",
)


def build_draft_model(spec: tiny.ModelSpec, seed: int, vocab: int = 0) -> Any:
    """A random Llama of one layer for a target of `spec`; some of its ids may be missing, or some more there."""
    vocab = vocab or spec.vocab
    dtype = spec.dtype if spec.attention == "sdpa" else "float32"
    draft = tiny.ModelSpec(family="llama", vocab=vocab, layers=1, dtype=dtype, attention=spec.attention, seed=seed)
    return tiny.build_model(draft)


def train_tokenizer(num_merges: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 256 bytes and so many merges, and `<pad>`, `<bos>`, `<eos>` in front."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=259 + num_merges,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


class ScriptedTarget:
    """A `DraftTarget` that continues the rows of `scripts`, and draws 0 behind a context that deviates."""

    chains_only = skips_rows = False
    setup_s = 0.0

    def __init__(self, scripts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.scripts, self.prompts = [list(row) for row in scripts], [list(row) for row in prompts]
        self.vocab_size = vocab_size
        self.cached: list[list[int]] = [[] for _ in scripts]
        self.num_read = 0
        self.active: list[list[bool] | None] = []  # rows of each `score`
        self._scored: list[list[int]] = []

    @property
    def cached_lengths(self) -> list[int]:
        return [len(row) for row in self.cached]

    def score(
        self, tree: DraftTree, hidden_state_indices: Sequence[int] = (), active: Sequence[bool] | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        self.active.append(None if active is None else list(active))
        self._scored = tree.tokens.tolist()
        logits = torch.zeros(*tree.tokens.shape, self.vocab_size)
        for row, ids in enumerate(self._scored):
            for node in range(len(ids)):
                context = self.prompts[row] + self.cached[row] + ids[: node + 1]
                script = self.scripts[row]
                is_right = context == script[: len(context)] and len(context) < len(script)
                logits[row, node, script[len(context)] if is_right else 0] = 9.0
        return logits, {}

    def commit(self, result: VerifyResult) -> None:
        for row, nodes in enumerate(result.accepted_nodes):
            self.cached[row] += self._scored[row][: len(nodes)]
            self.num_read += len(nodes)

    def draft_chain(self, request: ChainRequest) -> None:
        """Chains take one `score` after the other."""

    def crop(self, lengths: Sequence[int], zero_tail: bool = False) -> None:
        self.cached = [row[:length] for row, length in zip(self.cached, lengths, strict=True)]


class ScriptedSource:
    """A `DraftModelSource` of `ScriptedTarget`."""

    name = "scripted"

    def __init__(self, scripts: Sequence[Sequence[int]], vocab_size: int, tokenizer: Any = None) -> None:
        self.scripts, self.vocab_size, self.num_embeddings = scripts, vocab_size, vocab_size
        self.tokenizer = tokenizer
        self.media_token_ids: tuple[int, ...] = ()
        self.model: nn.Module = nn.Identity()
        self.target: ScriptedTarget | None = None

    def embed(self, inputs: Mapping[str, Any]) -> Tensor | None:
        return None

    def open(
        self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int, extra: Mapping[str, Any] | None = None
    ) -> ScriptedTarget:
        prompts = [
            [token for token, real in zip(ids, mask, strict=True) if real]
            for ids, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
        ]
        self.target = ScriptedTarget(self.scripts, prompts, self.vocab_size)
        return self.target
