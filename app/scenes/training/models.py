"""What is trained of the scenes model, with heads that are thrown away afterwards: `Eyes` looks, `Mouth` answers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.app.scenes.sprites import LETTERS
from mmspec.app.scenes.training.data import CLASSES, DOINGS, GROUND, IGNORE, LONGEST, MEANINGS, MOST, SIGN
from mmspec.app.scenes.training.stages import Stage
from mmspec.app.scenes.world import COLOURS, SIZES, TEXTURES

ASKED: dict[str, tuple[int, ...]] = {
    "bulk": (),
    "place": (),
    "centre": (),
    "alike": (),
    "rank": (),
    "total": (),
    "letter": (),
    "nth": (),
    "spelled": (LONGEST,),
}
"""What a patch of the tower, and later each visual token, is asked besides its kind -> how many questions that is."""
ANSWERS = {
    "bulk": len(SIZES),
    "place": 9,
    "centre": 2,
    "alike": MOST,
    "rank": MOST,
    "total": MOST + 1,
    "letter": len(LETTERS) + 1,
    "nth": LONGEST,
    "spelled": len(LETTERS) + 1,
}
READ = 3
"""After so many layers of the text model words are asked what they know: those above can read it from them, and what a
word finds out in the last layer, no later word can read."""


def head_of(name: str, width: int) -> nn.Linear:
    """What answers one of the questions of `ASKED`."""
    return nn.Linear(width, math.prod(ASKED[name]) * ANSWERS[name])


def asked(name: str, said: Tensor, answers: Tensor) -> Tensor:
    """The loss of what such a head said: [n, questions x answers], [n, *questions]; 0 if nothing is known.

    Centres are rare, so they count more.
    """
    if not (answers != IGNORE).any():
        return said.new_zeros(())
    weight = said.new_tensor((1.0, 8.0)) if name == "centre" else None
    said = said.reshape(-1, ANSWERS[name])
    return functional.cross_entropy(said, answers.flatten(), weight, ignore_index=IGNORE)


class Eyes(nn.Module):
    """The tower with heads that say what each patch shows. The heads are thrown away afterwards."""

    def __init__(self, tower: Any, width: int) -> None:
        super().__init__()
        self.tower = tower
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleDict({name: head_of(name, width) for name in ASKED})
        self.heads.update({"kind": nn.Linear(width, CLASSES), "offset": nn.Linear(width, 2)})
        self.ground = nn.ModuleDict(
            {"colour": nn.Linear(width, len(COLOURS)), "texture": nn.Linear(width, len(TEXTURES))}
        )

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss, and figures for the log."""
        states = self.tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-1]
        states = self.norm(states.float())
        said = {name: head(states) for name, head in self.heads.items()}
        kind = batch["kind"]
        thing = (kind >= 0) & (kind < GROUND)
        owned, sign = (kind >= 0) & (kind != GROUND), kind == SIGN
        losses = {
            "kind": functional.cross_entropy(said["kind"].flatten(0, 1), kind.flatten(), ignore_index=IGNORE),
            "offset": functional.smooth_l1_loss(said["offset"][owned], batch["offset"][owned], beta=0.1),
            "letter": functional.cross_entropy(said["letter"][sign], batch["letter"][sign]) if sign.any() else 0.0,
        }
        for name in [name for name in ASKED if name != "letter"]:
            losses[name] = asked(name, said[name].flatten(0, 1), batch[name].flatten(0, 1))
        pooled = states.mean(1)
        for name, head in self.ground.items():
            losses[name] = functional.cross_entropy(head(pooled), batch[name])
        weights = {"kind": 1.0, "offset": 2.0, "bulk": 0.3, "letter": 0.5, "colour": 0.2, "texture": 0.2}
        weights |= {"place": 0.3, "centre": 0.5, "nth": 0.5, "spelled": 0.5, "alike": 0.3, "rank": 0.3, "total": 0.3}
        loss = torch.stack([weights[name] * torch.as_tensor(part) for name, part in losses.items()]).sum()
        with torch.no_grad():
            right = (said["kind"].argmax(-1) == kind)[thing].float().mean()
            read = (said["letter"].argmax(-1) == batch["letter"])[sign].float().mean() if sign.any() else torch.nan
        figures = {"things": float(right), "letters": float(read)}
        return loss, figures | {name: float(torch.as_tensor(part).detach()) for name, part in losses.items()}


class Mouth(nn.Module):
    """The whole model, learning to answer. The tower's gradient is cut unless it is to learn."""

    def __init__(self, model: Any, names: Tensor, stage: Stage) -> None:
        """
        Args:
            names: [kinds] the token that begins each kind's name.
        """
        super().__init__()
        self.names: Tensor
        self.model, self.named, self.frozen, self.layers = model, stage.named, stage.eyes == 0, stage.layers
        self.register_buffer("names", names, persistent=False)
        width = model.config.text_config.hidden_size
        self.heads = nn.ModuleDict({name: head_of(name, width) for name in ASKED})
        self.heads["about"] = nn.Linear(width, MEANINGS)
        self.heads["since"] = nn.Linear(width, len(DOINGS))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss, and figures for the log."""
        core = self.model.model
        text = core.language_model
        with torch.set_grad_enabled(not self.frozen):
            states = core.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-1]
        visual = core.multi_modal_projector(states)
        embedded = core.get_input_embeddings()(batch["input_ids"])
        place = batch["input_ids"] == self.model.config.image_token_index
        embedded = embedded.masked_scatter(place[:, :, None], visual.to(embedded.dtype))
        early, hidden = self._read(text, embedded, batch["turns"])
        labels = batch["labels"][:, 1:]
        learn = labels != IGNORE
        logits = self.model.lm_head(hidden[:, :-1][learn]).float()
        told = functional.cross_entropy(logits, labels[learn])
        kinds = batch["kind"]
        thing = (kinds >= 0) & (kinds < GROUND)
        read = self.model.lm_head(visual[thing]).float()
        names = self.names[kinds[thing]]
        named = functional.cross_entropy(read, names)
        with torch.no_grad():
            right = (logits.argmax(-1) == labels[learn]).float()
            is_name = torch.isin(labels[learn], self.names)
            figures = {
                "told": float(told.detach()),
                "named": float(named.detach()),
                "tokens": float(right.mean()),
                "names": float(right[is_name].mean()) if is_name.any() else math.nan,
                "patches": float((read.argmax(-1) == names).float().mean()),
            }
        answers = {name: self._asked(name, visual, batch[name], kinds) for name in ASKED}
        further = torch.stack(list(answers.values())).sum()
        figures |= {name: float(loss.detach()) for name, loss in answers.items()}
        # Every word that names a thing says where that is: questions need to find by name, and text teaches that late.
        where = batch["about"]
        meant = self.heads["about"](early[where != IGNORE]).float()
        found = functional.cross_entropy(meant, where[where != IGNORE]) if len(meant) else told.new_zeros(())
        if len(meant):
            figures["about"] = float((meant.argmax(-1) == where[where != IGNORE]).float().mean())
        # In a clip each visual token says what its thing has done since the picture before, which only the text model
        # can know: it is the first to see two pictures.
        since = batch["since"].flatten()
        done = self.heads["since"](early[place][since != IGNORE]).float()
        changed = functional.cross_entropy(done, since[since != IGNORE]) if len(done) else told.new_zeros(())
        if len(done):
            figures["since"] = float((done.argmax(-1) == since[since != IGNORE]).float().mean())
        return told + self.named * (named + further + found + changed), figures

    def _read(self, text: Any, rows: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """What the text model has found out after `READ` layers and after all, both normed; [B, n, D]."""
        every, norm = text.layers, text.norm
        given: dict[str, Any] = {"use_cache": False}
        if turns.any():  # else, padded on the right, what is causal needs no mask
            given |= {"attention_mask": mask_of(turns), "position_ids": places_of(turns)}
        try:
            if self.layers > READ:
                text.layers, text.norm = every[:READ], nn.Identity()
                rows = text(inputs_embeds=rows, **given).last_hidden_state
            text.layers, text.norm = every[READ if self.layers > READ else 0 : self.layers], norm
            hidden = text(inputs_embeds=rows, **given).last_hidden_state
        finally:
            text.layers, text.norm = every, norm
        return (norm(rows) if self.layers > READ else hidden), hidden

    def _asked(self, name: str, visual: Tensor, answers: Tensor, kinds: Tensor) -> Tensor:
        """The loss on what visual tokens say of their patches besides the name, by heads that are thrown away."""
        if name == "letter":  # there are none but on signs
            answers = answers.masked_fill(kinds != SIGN, IGNORE)
        known = (answers != IGNORE).flatten(2).any(-1) if answers.ndim > 2 else answers != IGNORE
        return asked(name, self.heads[name](visual[known]).float(), answers[known])


def mask_of(turns: Tensor) -> Tensor:
    """[B, 1, n, n] bool: what each token may see, for `Sample.turns` [B, n]: of what stands before it (or is itself)
    what belongs to no turn, and its own."""
    length = turns.size(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=turns.device).tril()
    here, there = turns[:, :, None], turns[:, None, :]
    return ((here == there) | (there == 0)).logical_and(causal)[:, None]


def places_of(turns: Tensor) -> Tensor:
    """[B, n] positions: each turn goes on where what all of them share ends."""
    at = torch.arange(turns.size(1), device=turns.device).expand_as(turns)
    begins = torch.ones_like(turns, dtype=torch.bool)
    begins[:, 1:] = turns[:, 1:] != turns[:, :-1]
    start = torch.where(begins, at, 0).cummax(1).values
    shared = torch.where(turns > 0, at, turns.size(1)).amin(1, keepdim=True)
    return torch.where(turns > 0, at - start + shared, at)
