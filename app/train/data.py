"""The target as a teacher: its answers to the training requests, and its hidden states over prompt and answer.

Answers are written to a file once and read again when a run resumes. Hidden states are computed when they are needed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmspec
from mmspec.app.io.images import ImageError, media_images
from mmspec.app.io.jsonl import replace_file
from mmspec.app.modeling.captioner import Captioner, out_of_memory
from mmspec.app.modeling.chat import max_positions
from mmspec.app.train.datasets import Request, Requests
from mmspec.cpu.bf16 import bf16_is_faster
from mmspec.drafters.checkpoints.format import tokenizer_fingerprint
from mmspec.drafters.heads.base.compressed_inputs import prompt_grids
from mmspec.drafters.heads.base.positions import NUM_AXES
from mmspec.drafters.training.batch import TrainBatch
from mmspec.interfaces import Prompt
from mmspec.targets.capture_hooks import layer_inputs
from mmspec.targets.hf import TOKEN_TYPE_INPUTS
from mmspec.targets.registry import find_adapter

ANSWERS = "answers.jsonl"
MAX_ANSWER_TOKENS = 2048
"""Tokens of an answer of the data; as many as an answer may have that the target writes, if that is more."""
LOGITS_AT_ONCE = 512
"""Positions whose logits over the whole vocabulary are in memory at once."""


class Teacher:
    """The target that generates the answers and computes hidden states over them.

    Attributes:
        data: the requests.
        answers: token ids of the answers so far, by request index.
        text_lengths: approximate number of tokens of prompt and answer, by request index.
        cache_bytes: host memory that is left for hidden states.
        max_new_tokens: of an answer that the target generates; one of the data may have more.
        aux_layers: indices of the hidden states that batches carry besides the last (`TrainBatch.aux_hidden_states`).
        has_axes: whether batches carry the target's own position ids, if it counts on several axes.
        finds_next_ids: whether batches carry the target's likeliest next tokens (`TrainBatch.next_ids`).
    """

    def __init__(self, model: Any, processor: Any, data: Requests, cache_bytes: int = 0) -> None:
        """
        Args:
            model: the target.
            processor: of the target.
            data: the requests.
            cache_bytes: host memory for hidden states. Nothing is evicted: requests come in epochs, so the sequence
                that was used last is the one that will be needed last.
        """
        self.cache_bytes = cache_bytes
        self._cache: dict[int, TrainBatch] = {}
        self.captioner, self.data, self.adapter = Captioner(model, processor), data, find_adapter(model)
        self.model, self.tokenizer = model, self.captioner.tokenizer
        self.aux_layers: tuple[int, ...] = ()
        self.has_axes = False
        self.finds_next_ids = False
        self.max_new_tokens = 0
        self.answers: dict[int, list[int]] = {}
        self.text_lengths: dict[int, int] = {}

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Placeholder ids of visual tokens."""
        return self.adapter.media_token_ids

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer."""
        return tokenizer_fingerprint(self.tokenizer)

    def most_common_ids(self, count: int) -> Tensor:
        """[count] int64, the ids that occur most often in the answers, increasing; end-of-sequence ids always."""
        counter = Counter(token for ids in self.answers.values() for token in ids)
        eos_ids = self.captioner.eos_ids
        ids = [*eos_ids, *(token for token, _ in counter.most_common() if token not in eos_ids)]
        return torch.tensor(sorted(ids[:count]))

    def draft_vocabulary(self, size: int) -> Tensor:
        """[size] int64, increasing: the most common ids, then the smallest of the others."""
        common = set(self.most_common_ids(size).tolist())
        others = (token for token in range(self.adapter.vocab_size) if token not in common)
        return torch.tensor(sorted([*common, *islice(others, size - len(common))]))

    def generate_answers(
        self,
        folder: Path,
        batch_size: int,
        max_new_tokens: int,
        on_progress: Callable[[int], None] = lambda count: None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        """Generate an answer to every request that has none; answers in the folder are read, not generated again.

        Args:
            folder: of the run.
            batch_size: requests per `generate` call.
            max_new_tokens: maximum length of an answer.
            on_progress: called with the number of answers that were read or generated.
            shard: (rank, world size); each process writes a file of its own, and `read_answers` reads all of them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.max_new_tokens = max_new_tokens
        rank, world_size = shard
        file = folder / (ANSWERS if world_size == 1 else f"answers-{rank}.jsonl")
        self._read(file, repair=True)
        self.read_answers(folder)
        indices = range(rank, len(self.data), world_size)
        missing = [index for index in indices if index not in self.answers]
        on_progress(len(indices) - len(missing))
        if not missing:
            return
        mmspec.patch(self.model, processor=self.captioner.processor)
        try:
            with file.open("a", encoding="utf-8") as out:
                for start in range(0, len(missing), batch_size):
                    batch = missing[start : start + batch_size]
                    outputs = self._answer(batch, max_new_tokens)
                    for index, (ids, prompt_length) in zip(batch, outputs, strict=True):
                        record = {"number": index, "ids": ids, "prompt": prompt_length}
                        self._add(record)
                        out.write(json.dumps(record) + "\n")
                    out.flush()
                    on_progress(len(batch))
        finally:
            mmspec.unpatch(self.model)

    def read_answers(self, folder: Path) -> None:
        """Read the answers of all processes so far."""
        for file in sorted(folder.glob("answers*.jsonl")):
            self._read(file)

    def _read(self, file: Path, repair: bool = False) -> None:
        """Read the answers in a file; with `repair`, remove an incomplete last line from it."""
        if not file.exists():
            return
        lines, text = [], file.read_text(encoding="utf-8")
        for line in text.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            self._add(record)
            lines.append(line)
        complete = "".join(f"{line}\n" for line in lines)
        if repair and complete != text:
            replace_file(file, complete.encode())  # written under another name first, in case the disk is full

    def _add(self, record: dict[str, Any]) -> None:
        """Store an answer, and about how many tokens prompt and answer have."""
        self.answers[record["number"]] = record["ids"]
        self.text_lengths[record["number"]] = len(record["ids"]) + record.get("prompt", 0)

    def _answer(self, indices: Sequence[int], max_new_tokens: int) -> list[tuple[list[int], int]]:
        """(ids of the answer, length of the prompt) of each request.

        Requests with the same number of images are generated together: beside a video all others would be padded to its
        length.
        """
        outputs: dict[int, tuple[list[int], int]] = {}
        groups: dict[tuple[bool, int], list[int]] = {}
        read = {index: self.data[index] for index in indices}
        for index, request in read.items():
            groups.setdefault((request.answer is None, len(media_images(request.media))), []).append(index)
        for group in groups.values():
            requests, inputs = self.build_inputs(self.data, group, [read[index] for index in group])
            is_wanted = any(request.answer is None for request in requests)
            answers = self._generate(inputs, max_new_tokens) if is_wanted else [[] for _ in group]
            lengths = inputs["attention_mask"].sum(1).tolist()
            for index, request, ids, length in zip(group, requests, answers, lengths, strict=True):
                outputs[index] = (ids if request.answer is None else self._tokenize(request.answer), length)
        return [outputs[index] for index in indices]

    def _tokenize(self, answer: str) -> list[int]:
        """Token ids of an answer of the data and its end."""
        return [*self.tokenizer(" " + answer.strip(), add_special_tokens=False).input_ids, *self.captioner.eos_ids[:1]]

    def _generate(self, inputs: dict[str, Any], max_new_tokens: int) -> list[list[int]]:
        """Ids of the answer to each request, up to the end-of-sequence id.

        An answer also ends before a placeholder id: there is no image for it when it is read back.
        """
        sequences = self.model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None
        )
        eos_ids, outputs = set(self.captioner.eos_ids), []
        for ids in sequences[:, inputs["input_ids"].shape[1] :].tolist():
            length = next((i + 1 for i, token in enumerate(ids) if token in eos_ids), len(ids))
            length = next((i for i, token in enumerate(ids[:length]) if token in self.media_token_ids), length)
            outputs.append(ids[:length])
        return outputs

    def build_inputs(
        self, data: Requests, indices: Sequence[int], requests: Sequence[Request] | None = None
    ) -> tuple[Sequence[Request], dict[str, Any]]:
        """Requests of `data`, and the target's inputs of them.

        One that the target cannot take (its processor refuses the picture, prompt or answer are too long) is left out,
        and another takes its place, in every run alike.

        Args:
            requests: those of the indices, where they were read already.

        Raises:
            UsageError: none can be used.
        """
        while True:
            requests = requests or [data[index] for index in indices]
            try:
                return requests, self._checked_inputs(requests)
            except Exception as error:  # processors raise nearly any type
                refused = None if out_of_memory(error) else self._first_refused(requests)
                if refused is None:
                    raise
                data.reject(indices[refused[0]], refused[1])
            requests = None

    def _checked_inputs(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The target's inputs of requests whose prompts and answers it can take."""
        inputs = self.captioner.checked_inputs([one.media for one in requests], [one.question for one in requests])
        for request, length in zip(requests, inputs["attention_mask"].sum(1).tolist(), strict=True):
            if request.answer is not None:
                self._check_answer(self._tokenize(request.answer), length)
        return inputs

    def _check_answer(self, ids: list[int], prompt_tokens: int) -> None:
        """Refuse an answer of the data that the target cannot read behind its prompt, as prompts are refused.

        Raises:
            ImageError: it is one.
        """
        if (found := next((token for token in ids if token in self.media_token_ids), None)) is not None:
            name = self.tokenizer.convert_ids_to_tokens(found)
            raise ImageError("BadText", f"the answer must not contain {name}: there is no picture for it")
        if len(ids) > (limit := max(MAX_ANSWER_TOKENS, self.max_new_tokens)):
            raise ImageError(
                "TooLong", f"the answer has {len(ids)} tokens; the limit is {limit}: --max-new-tokens raises it"
            )
        positions, total = max_positions(self.model), prompt_tokens + len(ids)
        if positions is not None and total > positions:
            raise ImageError(
                "TooLong", f"image, prompt and answer have {total} tokens, the model {positions} positions"
            )

    def _first_refused(self, requests: Sequence[Request]) -> tuple[int, Exception] | None:
        """The first request that is refused alone, and why."""
        for place, request in enumerate(requests):
            try:
                self._checked_inputs([request])
            except Exception as error:
                return place, error
        return None

    def make_batch(self, indices: Sequence[int]) -> TrainBatch:
        """The target's hidden states over prompt and answer of these requests."""
        new = [index for index in dict.fromkeys(indices) if index not in self._cache]
        computed = dict(zip(new, self._forward(new).split(), strict=True)) if new else {}
        sequences = [self._cache[index] if index in self._cache else computed[index] for index in indices]
        for index, sequence in computed.items():
            if sequence.nbytes <= self.cache_bytes:
                self.cache_bytes -= sequence.nbytes
                self._cache[index] = sequence.to("cpu")
        device = self.model.device
        return TrainBatch.collate([sequence.to(device) for sequence in sequences])

    def _forward(self, indices: Sequence[int]) -> TrainBatch:
        """One forward of the target over prompts and answers."""
        _, inputs = self.build_inputs(self.data, indices)
        inputs, response_mask = self._append_answers(inputs, [self.answers[index] for index in indices])
        device = self.model.device
        with (
            torch.no_grad(),
            torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cpu" and bf16_is_faster(device)),
            self._captured_axes() as axes,
            layer_inputs(self.adapter, self.aux_layers, inputs) as received,
        ):
            # As an index, which copies: torch 2.13 computes bfloat16 logits of rows that lie apart 90 times slower.
            last = torch.tensor([-1], device=device)
            outputs = self.model(**inputs, output_hidden_states=True, logits_to_keep=last, use_cache=False)
        input_ids, attention_mask = inputs["input_ids"], inputs["attention_mask"].bool()
        visual_mask = torch.isin(input_ids, torch.tensor(self.media_token_ids, device=input_ids.device))
        vision = {name: inputs[name] for name in self.adapter.layout.vision_args if inputs.get(name) is not None}
        prompt = Prompt(
            input_ids,
            attention_mask,
            visual_mask,
            position_ids=input_ids,
            grids=self.adapter.layout.grids(input_ids, vision),
        )
        return TrainBatch(
            input_ids=input_ids,
            attention_mask=attention_mask,
            visual_mask=visual_mask,
            response_mask=response_mask,
            inputs_embeds=outputs.hidden_states[0].float(),
            hidden_states=outputs.hidden_states[-1].float(),
            grids=prompt_grids(prompt, input_ids.shape[1]),
            aux_hidden_states={
                layer: received.get(layer, outputs.hidden_states[layer]).float() for layer in self.aux_layers
            },
            position_ids=axes[0].movedim(0, 1).expand(len(input_ids), -1, -1) if axes else None,
            next_ids=self._next_ids(outputs.hidden_states[-1], response_mask) if self.finds_next_ids else None,
        )

    @torch.no_grad()
    def _next_ids(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        """[B, L] the likeliest token behind each position of the mask, 0 elsewhere."""
        embeddings, rows = self.adapter.shared_embeddings, hidden_states[mask].split(LOGITS_AT_ONCE)
        found = [embeddings.logits(part).argmax(-1) for part in rows]
        return mask.long().masked_scatter(mask, torch.cat(found)) if found else mask.long()

    @contextmanager
    def _captured_axes(self) -> Iterator[list[Tensor]]:
        """Context of a forward: [3, B, L] position ids that the target's rotary embedding reads on three axes."""
        found: list[Tensor] = []
        if not self.has_axes:
            yield found
            return

        def note(module: Any, args: Any, kwargs: Any) -> None:
            position_ids = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
            if position_ids is not None and position_ids.dim() == 3 and len(position_ids) >= NUM_AXES:
                found.append(position_ids[-NUM_AXES:])

        handle = self.adapter.text_model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield found
        finally:
            handle.remove()

    def _append_answers(self, inputs: dict[str, Any], answers: Sequence[list[int]]) -> tuple[dict[str, Any], Tensor]:
        """Prompts (padded on the left) and answers as inputs padded on the right, and the response mask [B, L]."""
        prompt_ids, prompt_mask = inputs["input_ids"], inputs["attention_mask"].bool()
        device = prompt_ids.device
        prompts = _without_padding(prompt_ids, prompt_mask)
        sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        length = max(map(len, sequences))
        position = torch.arange(length, device=device)
        starts = torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
        ends = torch.tensor([len(sequence) for sequence in sequences], device=device)[:, None]

        def pad_right(sequences: Sequence[list[int]], value: int) -> Tensor:
            return torch.tensor([ids + [value] * (length - len(ids)) for ids in sequences], device=device)

        joined = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        for name in TOKEN_TYPE_INPUTS:
            if name in joined:
                value = self.adapter.response_token_type if name == "token_type_ids" else 0
                joined[name] = pad_right(_without_padding(joined[name], prompt_mask), value)
        joined["input_ids"] = pad_right(sequences, self.tokenizer.pad_token_id)
        joined["attention_mask"] = (position < ends).long()
        return joined, (position >= starts) & (position < ends)


def _without_padding(values: Tensor, mask: Tensor) -> list[list[int]]:
    """The values [B, n] of each row where the mask [B, n] is True."""
    return [row[row_mask].tolist() for row, row_mask in zip(values, mask, strict=True)]
