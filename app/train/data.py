"""The target as a teacher: its answers to the training requests, and its hidden states over prompt and answer.

Answers are written to a file once and read again when a run resumes. Hidden states are computed when they are needed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.app.io.images import media_images
from mmspec.app.io.jsonl import replace_file
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.train.datasets import Request, RequestDataset
from mmspec.cpu.bf16 import bf16_is_faster
from mmspec.drafters.checkpoints.format import tokenizer_fingerprint
from mmspec.drafters.eagle.visual_inputs import prompt_grids
from mmspec.drafters.training.batch import TrainBatch
from mmspec.interfaces import Prompt
from mmspec.targets.registry import find_adapter

ANSWERS = "answers.jsonl"


class Teacher:
    """A target that generates answers and hidden states; both are computed once, hidden states within `cache_bytes`."""

    def __init__(self, model: Any, processor: Any, data: RequestDataset, room: int = 0) -> None:
        """
        Args:
            room: bytes of states that may be kept on the host for when a text comes again. What comes first is kept:
                texts come in epochs, so whatever was thrown out last would be wanted next.
        """
        self.cache_bytes, self._cache = room, dict[int, TrainBatch]()
        self.captioner, self.data, self.adapter = Captioner(model, processor), data, find_adapter(model)
        self.model, self.tokenizer = model, processor.tokenizer
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
        """[count] int64, the ids that the answers use most, rising; the end is always among them."""
        counted = Counter(token for ids in self.answers.values() for token in ids)
        ends = self.captioner.eos_ids
        first = [*ends, *(token for token, _ in counted.most_common() if token not in ends)]
        return torch.tensor(sorted(first[:count]))

    def generate_answers(
        self,
        folder: Path,
        batch: int,
        most: int,
        tick: Callable[[int], None] = lambda done: None,
        share: tuple[int, int] = (0, 1),
        since: int = 0,
    ) -> None:
        """Generate an answer for every request that has none; answers in the folder are read, not generated again.

        Args:
            share: (rank, processes): each does its part, in a file of its own; `read_answers` brings them together.
            since: the first request that is asked; those before it are not needed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        rank, world = share
        file = folder / (ANSWERS if world == 1 else f"answers-{rank}.jsonl")
        self._read(file, mend=True)
        self.read_answers(folder)
        mine = range(since + rank, len(self.data), world)
        open_ = [number for number in mine if number not in self.answers]
        tick(len(mine) - len(open_))
        with file.open("a", encoding="utf-8") as out:
            for start in range(0, len(open_), batch):
                numbers = open_[start : start + batch]
                said = self._answer([self.data[n] for n in numbers], most)
                for number, (ids, prompt) in zip(numbers, said, strict=True):
                    row = {"number": number, "ids": ids, "prompt": prompt}
                    self._take(row)
                    out.write(json.dumps(row) + "\n")
                out.flush()
                tick(len(numbers))

    def read_answers(self, folder: Path) -> None:
        """Read the answers of all processes so far."""
        for file in sorted(folder.glob("answers*.jsonl")):
            self._read(file)

    def _read(self, file: Path, mend: bool = False) -> None:
        """Answers in a file; with `mend` a last line that was cut is taken out of it."""
        if not file.exists():
            return
        good, text = [], file.read_text(encoding="utf-8")
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            self._take(row)
            good.append(line)
        whole = "".join(f"{line}\n" for line in good)
        if mend and whole != text:
            replace_file(file, whole.encode())  # under another name first: a full disk must not cost the answers

    def _take(self, row: dict[str, Any]) -> None:
        """An answer, and about how long its whole text is."""
        self.answers[row["number"]] = row["ids"]
        self.text_lengths[row["number"]] = len(row["ids"]) + row.get("prompt", 0)

    def _answer(self, requests: Sequence[Request], most: int) -> list[tuple[list[int], int]]:
        """Per request the ids of its answer, and the length of its prompt, 0 if nobody had to know it.

        Those with as many pictures go together, since whoever stands beside a clip is padded to its length.
        """
        said = [(self._ids(one.answer), 0) if one.answer is not None else ([], 0) for one in requests]
        groups: dict[int, list[int]] = {}
        for place, one in enumerate(requests):
            if one.answer is None:
                groups.setdefault(len(media_images(one.media)), []).append(place)
        for places in groups.values():
            for place, answer in zip(places, self._generate([requests[p] for p in places], most), strict=True):
                said[place] = answer
        return said

    def _ids(self, answer: str) -> list[int]:
        ids = self.tokenizer(" " + answer.strip(), add_special_tokens=False).input_ids
        return [*ids, *self.captioner.eos_ids[:1]]

    def _generate(self, requests: Sequence[Request], most: int) -> list[tuple[list[int], int]]:
        inputs = self.captioner.build_inputs([one.media for one in requests], [one.question for one in requests])
        out = self.model.generate(
            **inputs, max_new_tokens=most, do_sample=False, temperature=None, top_p=None, top_k=None
        )
        ends, result = set(self.captioner.eos_ids), []
        prompts = inputs["attention_mask"].sum(1).tolist()
        for row, prompt in zip(out[:, inputs["input_ids"].shape[1] :].tolist(), prompts, strict=True):
            size = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            result.append((row[:size], prompt))
        return result

    def make_batch(self, numbers: Sequence[int]) -> TrainBatch:
        """The target's hidden states over prompt and answer of these requests."""
        new = [number for number in dict.fromkeys(numbers) if number not in self._cache]
        made = dict(zip(new, self._forward(new).split(), strict=True)) if new else {}
        rows = [self._cache[number] if number in self._cache else made[number] for number in numbers]
        for number, row in made.items():
            size = sum(part.nbytes for part in row.tensors())
            if size <= self.cache_bytes:
                self.cache_bytes -= size
                self._cache[number] = row.to("cpu")
        device = self.model.device
        return TrainBatch.collate([row.to(device) for row in rows])

    def _forward(self, numbers: Sequence[int]) -> TrainBatch:
        """One forward of the target over prompts and answers."""
        requests = [self.data[number] for number in numbers]
        inputs = self.captioner.build_inputs([one.media for one in requests], [one.question for one in requests])
        whole, answer = self._join(inputs, [self.answers[number] for number in numbers])
        device, capture = self.model.device, self.adapter.attention_capture()
        with (
            torch.no_grad(),
            torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cpu" and bf16_is_faster(device)),
            nullcontext() if capture is None else capture.active(),
        ):
            seen = self.model(**whole, output_hidden_states=True, logits_to_keep=1, use_cache=False)
        ids, real = whole["input_ids"], whole["attention_mask"].bool()
        visual = torch.isin(ids, torch.tensor(self.media_token_ids, device=ids.device))
        vision = {name: whole[name] for name in self.adapter.vision_args if whole.get(name) is not None}
        grids = self.adapter.grids(ids, vision)
        return TrainBatch(
            input_ids=ids,
            attention_mask=real,
            visual_mask=visual,
            response_mask=answer,
            inputs_embeds=seen.hidden_states[0].float(),
            hidden_states=seen.hidden_states[-1].float(),
            grids=prompt_grids(Prompt(ids, real, visual, position_ids=ids, grids=grids), ids.shape[1]),
            visual_saliency=self.adapter.visual_saliency(capture, visual, vision),
        )

    def _join(self, inputs: dict[str, Any], answers: Sequence[list[int]]) -> tuple[dict[str, Any], Tensor]:
        """Prompts (padded on the left) and answers to texts padded on the right, and where the answers are."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        rows = [row[on.bool()].tolist() for row, on in zip(ids, mask, strict=True)]
        texts = [prompt + answer for prompt, answer in zip(rows, answers, strict=True)]
        longest = max(map(len, texts))
        pad = self.tokenizer.pad_token_id
        joined = torch.tensor([text + [pad] * (longest - len(text)) for text in texts], device=ids.device)
        place = torch.arange(longest, device=ids.device)
        begins = torch.tensor([len(row) for row in rows], device=ids.device)[:, None]
        ends = torch.tensor([len(text) for text in texts], device=ids.device)[:, None]
        whole = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in whole:
                kinds = [row[on.bool()].tolist() for row, on in zip(whole[name], mask, strict=True)]
                whole[name] = torch.tensor([kind + [0] * (longest - len(kind)) for kind in kinds], device=ids.device)
        whole |= {"input_ids": joined, "attention_mask": (place < ends).long()}
        return whole, (place >= begins) & (place < ends)


__all__ = ["ANSWERS", "Teacher"]
