"""What is trained of the scenes model, with heads that are thrown away afterwards: `Eyes` looks, `Mouth` answers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.app.scenes.sprites import SIGN_CHARACTERS
from mmspec.app.scenes.training.data import (
    ACTIONS,
    BACKGROUND_CLASS,
    IGNORE_INDEX,
    MAX_SIGN_LENGTH,
    MAX_THINGS,
    NUM_ABOUT_CLASSES,
    NUM_PATCH_CLASSES,
    SIGN_CLASS,
)
from mmspec.app.scenes.training.stages import TrainingStage
from mmspec.app.scenes.world import BACKGROUND_COLOURS, BACKGROUND_TEXTURES, SIZE_CLASSES

PATCH_HEAD_SHAPES: dict[str, tuple[int, ...]] = {
    "bulk": (),
    "place": (),
    "centre": (),
    "alike": (),
    "rank": (),
    "total": (),
    "letter": (),
    "nth": (),
    "spelled": (MAX_SIGN_LENGTH,),
}
"""What a patch of the tower, and later each visual token, is asked besides its kind -> how many questions that is."""
HEAD_NUM_CLASSES = {
    "bulk": len(SIZE_CLASSES),
    "place": 9,
    "centre": 2,
    "alike": MAX_THINGS,
    "rank": MAX_THINGS,
    "total": MAX_THINGS + 1,
    "letter": len(SIGN_CHARACTERS) + 1,
    "nth": MAX_SIGN_LENGTH,
    "spelled": len(SIGN_CHARACTERS) + 1,
}
PROBE_LAYER = 3
"""After so many layers of the text model words are asked what they know: those above can read it from them, and what a
word finds out in the last layer, no later word can read."""


def build_head(name: str, width: int) -> nn.Linear:
    """What answers one of the questions of `ASKED`."""
    return nn.Linear(width, math.prod(PATCH_HEAD_SHAPES[name]) * HEAD_NUM_CLASSES[name])


def head_loss(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of what such a head said: [n, questions x answers], [n, *questions]; 0 if nothing is known.

    Centres are rare, so they count more.
    """
    if not (labels != IGNORE_INDEX).any():
        return logits.new_zeros(())
    weight = logits.new_tensor((1.0, 8.0)) if name == "centre" else None
    logits = logits.reshape(-1, HEAD_NUM_CLASSES[name])
    return functional.cross_entropy(logits, labels.flatten(), weight, ignore_index=IGNORE_INDEX)


class VisionPretrainer(nn.Module):
    """The tower with heads that say what each patch shows. The heads are thrown away afterwards."""

    def __init__(self, tower: Any, width: int) -> None:
        super().__init__()
        self.tower = tower
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleDict({name: build_head(name, width) for name in PATCH_HEAD_SHAPES})
        self.heads.update({"kind": nn.Linear(width, NUM_PATCH_CLASSES), "offset": nn.Linear(width, 2)})
        self.ground = nn.ModuleDict(
            {"colour": nn.Linear(width, len(BACKGROUND_COLOURS)), "texture": nn.Linear(width, len(BACKGROUND_TEXTURES))}
        )

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss, and figures for the log."""
        states = self.tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-1]
        states = self.norm(states.float())
        said = {name: head(states) for name, head in self.heads.items()}
        kind = batch["kind"]
        thing = (kind >= 0) & (kind < BACKGROUND_CLASS)
        owned, sign = (kind >= 0) & (kind != BACKGROUND_CLASS), kind == SIGN_CLASS
        losses = {
            "kind": functional.cross_entropy(said["kind"].flatten(0, 1), kind.flatten(), ignore_index=IGNORE_INDEX),
            "offset": functional.smooth_l1_loss(said["offset"][owned], batch["offset"][owned], beta=0.1),
            "letter": functional.cross_entropy(said["letter"][sign], batch["letter"][sign]) if sign.any() else 0.0,
        }
        for name in [name for name in PATCH_HEAD_SHAPES if name != "letter"]:
            losses[name] = head_loss(name, said[name].flatten(0, 1), batch[name].flatten(0, 1))
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


class VlmTrainer(nn.Module):
    """The whole model, learning to answer. The tower's gradient is cut unless it is to learn."""

    def __init__(self, model: Any, names: Tensor, stage: TrainingStage) -> None:
        """
        Args:
            names: [kinds] the token that begins each kind's name.
        """
        super().__init__()
        self.names: Tensor
        self.model, self.aux_loss_weight, self.tower_frozen, self.num_layers = (
            model,
            stage.named,
            stage.eyes == 0,
            stage.layers,
        )
        self.register_buffer("names", names, persistent=False)
        width = model.config.text_config.hidden_size
        self.heads = nn.ModuleDict({name: build_head(name, width) for name in PATCH_HEAD_SHAPES})
        self.heads["about"] = nn.Linear(width, NUM_ABOUT_CLASSES)
        self.heads["since"] = nn.Linear(width, len(ACTIONS))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss, and figures for the log."""
        core = self.model.model
        text = core.language_model
        with torch.set_grad_enabled(not self.tower_frozen):
            states = core.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-1]
        visual = core.multi_modal_projector(states)
        embedded = core.get_input_embeddings()(batch["input_ids"])
        place = batch["input_ids"] == self.model.config.image_token_index
        embedded = embedded.masked_scatter(place[:, :, None], visual.to(embedded.dtype))
        early, hidden = self._run_text_model(text, embedded, batch["turns"])
        labels = batch["labels"][:, 1:]
        learn = labels != IGNORE_INDEX
        logits = self.model.lm_head(hidden[:, :-1][learn]).float()
        told = functional.cross_entropy(logits, labels[learn])
        kinds = batch["kind"]
        thing = (kinds >= 0) & (kinds < BACKGROUND_CLASS)
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
        answers = {name: self._patch_loss(name, visual, batch[name], kinds) for name in PATCH_HEAD_SHAPES}
        further = torch.stack(list(answers.values())).sum()
        figures |= {name: float(loss.detach()) for name, loss in answers.items()}
        # Every word that names a thing says where that is: questions need to find by name, and text teaches that late.
        where = batch["about"]
        meant = self.heads["about"](early[where != IGNORE_INDEX]).float()
        found = functional.cross_entropy(meant, where[where != IGNORE_INDEX]) if len(meant) else told.new_zeros(())
        if len(meant):
            figures["about"] = float((meant.argmax(-1) == where[where != IGNORE_INDEX]).float().mean())
        # In a clip each visual token says what its thing has done since the picture before, which only the text model
        # can know: it is the first to see two pictures.
        since = batch["since"].flatten()
        done = self.heads["since"](early[place][since != IGNORE_INDEX]).float()
        changed = functional.cross_entropy(done, since[since != IGNORE_INDEX]) if len(done) else told.new_zeros(())
        if len(done):
            figures["since"] = float((done.argmax(-1) == since[since != IGNORE_INDEX]).float().mean())
        return told + self.aux_loss_weight * (named + further + found + changed), figures

    def _run_text_model(self, text: Any, rows: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """What the text model has found out after `READ` layers and after all, both normed; [B, n, D]."""
        every, norm = text.layers, text.norm
        given: dict[str, Any] = {"use_cache": False}
        if turns.any():  # else, padded on the right, what is causal needs no mask
            given |= {"attention_mask": build_turn_mask(turns), "position_ids": build_turn_position_ids(turns)}
        try:
            if self.num_layers > PROBE_LAYER:
                text.layers, text.norm = every[:PROBE_LAYER], nn.Identity()
                rows = text(inputs_embeds=rows, **given).last_hidden_state
            text.layers, text.norm = every[PROBE_LAYER if self.num_layers > PROBE_LAYER else 0 : self.num_layers], norm
            hidden = text(inputs_embeds=rows, **given).last_hidden_state
        finally:
            text.layers, text.norm = every, norm
        return (norm(rows) if self.num_layers > PROBE_LAYER else hidden), hidden

    def _patch_loss(self, name: str, visual: Tensor, answers: Tensor, kinds: Tensor) -> Tensor:
        """The loss on what visual tokens say of their patches besides the name, by heads that are thrown away."""
        if name == "letter":  # there are none but on signs
            answers = answers.masked_fill(kinds != SIGN_CLASS, IGNORE_INDEX)
        known = (answers != IGNORE_INDEX).flatten(2).any(-1) if answers.ndim > 2 else answers != IGNORE_INDEX
        return head_loss(name, self.heads[name](visual[known]).float(), answers[known])


def build_turn_mask(turn_ids: Tensor) -> Tensor:
    """[B, 1, n, n] bool: what each token may see, for `Sample.turns` [B, n]: of what stands before it (or is itself)
    what belongs to no turn, and its own."""
    length = turn_ids.size(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=turn_ids.device).tril()
    here, there = turn_ids[:, :, None], turn_ids[:, None, :]
    return ((here == there) | (there == 0)).logical_and(causal)[:, None]


def build_turn_position_ids(turn_ids: Tensor) -> Tensor:
    """[B, n] positions: each turn goes on where what all of them share ends."""
    at = torch.arange(turn_ids.size(1), device=turn_ids.device).expand_as(turn_ids)
    begins = torch.ones_like(turn_ids, dtype=torch.bool)
    begins[:, 1:] = turn_ids[:, 1:] != turn_ids[:, :-1]
    start = torch.where(begins, at, 0).cummax(1).values
    shared = torch.where(turn_ids > 0, at, turn_ids.size(1)).amin(1, keepdim=True)
    return torch.where(turn_ids > 0, at - start + shared, at)
