"""Training modules: the vision tower with patch heads, and the whole model with auxiliary heads.

All heads are discarded after training; the exported model is a stock LLaVA. Shapes: B conversations, S tokens, F
images, P patches (visual tokens) per image, D text width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.app.scenes.sprites import SIGN_CHARACTERS
from mmspec.app.scenes.world import BACKGROUND_COLOURS, BACKGROUND_TEXTURES, SIZE_CLASSES
from research.scenes.data import NUM_ABOUT_CLASSES
from research.scenes.patch_labels import (
    ACTIONS,
    BACKGROUND_CLASS,
    IGNORE_INDEX,
    MAX_SIGN_LENGTH,
    MAX_THINGS,
    NUM_PATCH_CLASSES,
    REGION_INDEX,
    SIGN_CLASS,
)
from research.scenes.stages import TrainingStage

if TYPE_CHECKING:
    from transformers import LlamaModel, LlavaForConditionalGeneration, SiglipVisionModel

PATCH_HEAD_SHAPES: dict[str, tuple[int, ...]] = {
    "size_class": (),
    "region": (),
    "centre": (),
    "num_others": (),
    "rank": (),
    "total": (),
    "letter": (),
    "letter_index": (),
    "spelling": (MAX_SIGN_LENGTH,),
}
"""Auxiliary target of a patch (a field of `PatchLabels`) -> shape of the target per patch."""
HEAD_NUM_CLASSES = {
    "size_class": len(SIZE_CLASSES),
    "region": len(REGION_INDEX),
    "centre": 2,
    "num_others": MAX_THINGS,
    "rank": MAX_THINGS,
    "total": MAX_THINGS + 1,
    "letter": len(SIGN_CHARACTERS) + 1,
    "letter_index": MAX_SIGN_LENGTH,
    "spelling": len(SIGN_CHARACTERS) + 1,
}
"""Auxiliary target -> number of classes."""
VISION_LOSS_WEIGHTS = {
    "kind": 1.0,
    "offset": 2.0,
    "size_class": 0.3,
    "letter": 0.5,
    "colour": 0.2,
    "texture": 0.2,
    "region": 0.3,
    "centre": 0.5,
    "letter_index": 0.5,
    "spelling": 0.5,
    "num_others": 0.3,
    "rank": 0.3,
    "total": 0.3,
}
"""Weight of each loss of `VisionPretrainer`."""
PROBE_LAYER = 3
"""Number of text layers before the auxiliary heads `about` and `action`. The layers above can attend to what those
heads require; later tokens cannot attend to the output of the last layer."""


def aux_head_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the auxiliary heads, which a checkpoint holds apart from the exported model."""
    groups = ("heads", "ground", "norm")
    return {name: value for name, value in module.state_dict().items() if name.split(".")[0] in groups}


def build_head(name: str, width: int) -> nn.Linear:
    """Return the linear head of a target of `PATCH_HEAD_SHAPES`."""
    return nn.Linear(width, math.prod(PATCH_HEAD_SHAPES[name]) * HEAD_NUM_CLASSES[name])


def head_loss(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of a patch head; 0 if all labels are ignored.

    Args:
        name: A key of `PATCH_HEAD_SHAPES`. Patches with a centre are rare and have weight 8.
        logits: [N, targets x classes].
        labels: [N, *`PATCH_HEAD_SHAPES[name]`] int64.
    """
    if not (labels != IGNORE_INDEX).any():
        return logits.new_zeros(())
    weight = logits.new_tensor((1.0, 8.0)) if name == "centre" else None
    logits = logits.reshape(-1, HEAD_NUM_CLASSES[name])
    return functional.cross_entropy(logits, labels.flatten(), weight, ignore_index=IGNORE_INDEX)


class VisionPretrainer(nn.Module):
    """The vision tower with one head per patch label."""

    def __init__(self, tower: SiglipVisionModel, width: int) -> None:
        """
        Args:
            tower: The SigLIP tower; trained in place.
            width: Its hidden size.
        """
        super().__init__()
        self.tower = tower
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleDict({name: build_head(name, width) for name in PATCH_HEAD_SHAPES})
        self.heads.update({"kind": nn.Linear(width, NUM_PATCH_CLASSES), "offset": nn.Linear(width, 2)})
        self.ground = nn.ModuleDict(
            {"colour": nn.Linear(width, len(BACKGROUND_COLOURS)), "texture": nn.Linear(width, len(BACKGROUND_TEXTURES))}
        )

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the weighted loss (scalar) and metrics for the log, for a batch of `PatchDataset`."""
        hidden_states = self.tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-1]
        hidden_states = self.norm(hidden_states.float())
        outputs = {name: head(hidden_states) for name, head in self.heads.items()}
        kind = batch["kind"]
        is_thing = (kind >= 0) & (kind < BACKGROUND_CLASS)
        is_foreground = (kind >= 0) & (kind != BACKGROUND_CLASS)
        is_sign = kind == SIGN_CLASS
        has_sign = bool(is_sign.any())
        losses = {
            "kind": functional.cross_entropy(outputs["kind"].flatten(0, 1), kind.flatten(), ignore_index=IGNORE_INDEX),
            "offset": functional.smooth_l1_loss(
                outputs["offset"][is_foreground], batch["offset"][is_foreground], beta=0.1
            ),
            "letter": functional.cross_entropy(outputs["letter"][is_sign], batch["letter"][is_sign])
            if has_sign
            else 0.0,
        }
        for name in [name for name in PATCH_HEAD_SHAPES if name != "letter"]:
            losses[name] = head_loss(name, outputs[name].flatten(0, 1), batch[name].flatten(0, 1))
        pooled = hidden_states.mean(1)
        for name, head in self.ground.items():
            losses[name] = functional.cross_entropy(head(pooled), batch[name])
        loss = torch.stack([VISION_LOSS_WEIGHTS[name] * torch.as_tensor(value) for name, value in losses.items()]).sum()
        with torch.no_grad():
            kind_accuracy = (outputs["kind"].argmax(-1) == kind)[is_thing].float().mean()
            letter_hits = (outputs["letter"].argmax(-1) == batch["letter"])[is_sign].float()
        metrics = {"things": float(kind_accuracy), "letters": float(letter_hits.mean()) if has_sign else math.nan}
        return loss, metrics | {name: float(torch.as_tensor(value).detach()) for name, value in losses.items()}


class VlmTrainer(nn.Module):
    """The whole model with the answer loss and the auxiliary losses; no gradient reaches a tower at rate 0."""

    def __init__(self, model: LlavaForConditionalGeneration, name_token_ids: Tensor, stage: TrainingStage) -> None:
        """
        Args:
            model: The LLaVA; trained in place.
            name_token_ids: [object kinds] int64, the first token of each kind's name.
            stage: Number of text layers, weight of the auxiliary losses, whether the tower is frozen.
        """
        super().__init__()
        self.name_token_ids: Tensor
        self.model = model
        self.aux_loss_weight = stage.named
        self.tower_frozen = stage.eyes == 0
        self.num_layers = stage.layers
        self.register_buffer("name_token_ids", name_token_ids, persistent=False)
        width = model.config.text_config.hidden_size
        self.heads = nn.ModuleDict({name: build_head(name, width) for name in PATCH_HEAD_SHAPES})
        self.heads["about"] = nn.Linear(width, NUM_ABOUT_CLASSES)
        self.heads["action"] = nn.Linear(width, len(ACTIONS))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the loss (scalar) and metrics for the log, for a batch of `collate_chats`.

        The loss is the cross-entropy of the answers plus `aux_loss_weight` times four auxiliary losses: the name of the
        thing at each visual token, read with the model's own `lm_head`; the other patch labels; the class of each token
        that names a thing (`about`); the action at each visual token of a clip.
        """
        core = self.model.model
        with torch.set_grad_enabled(not self.tower_frozen):
            states = core.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-1]
        visual = core.multi_modal_projector(states)
        inputs_embeds = core.get_input_embeddings()(batch["input_ids"])
        visual_mask = batch["input_ids"] == self.model.config.image_token_index
        inputs_embeds = inputs_embeds.masked_scatter(visual_mask[:, :, None], visual.to(inputs_embeds.dtype))
        probed, hidden_states = self._run_text_model(core.language_model, inputs_embeds, batch["turns"])

        answer_loss, metrics = self._answer_loss(hidden_states, batch["labels"])
        name_loss, name_metrics = self._name_loss(visual, batch["kind"])
        patch_losses = {name: self._patch_loss(name, visual, batch[name], batch["kind"]) for name in PATCH_HEAD_SHAPES}
        # Answers to questions by name need the named thing's region early; the answer loss alone teaches that late.
        about_loss, about_accuracy = self._probe_loss("about", probed, batch["about"])
        # Only the text model attends to more than one frame, so actions are probed there and not in the tower.
        action_loss, action_accuracy = self._probe_loss("action", probed[visual_mask], batch["action"].flatten())

        metrics |= name_metrics
        metrics |= {name: float(loss.detach()) for name, loss in patch_losses.items()}
        for name, accuracy in (("about", about_accuracy), ("action", action_accuracy)):
            if accuracy is not None:
                metrics[name] = accuracy
        patch_loss = torch.stack(list(patch_losses.values())).sum()
        aux_loss = name_loss + patch_loss + about_loss + action_loss
        return answer_loss + self.aux_loss_weight * aux_loss, metrics

    def _answer_loss(self, hidden_states: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy of the next token from [B, S, D] and labels [B, S], and the accuracies."""
        labels = labels[:, 1:]
        loss_mask = labels != IGNORE_INDEX
        targets = labels[loss_mask]
        logits = self.model.lm_head(hidden_states[:, :-1][loss_mask]).float()
        loss = functional.cross_entropy(logits, targets)
        with torch.no_grad():
            hits = (logits.argmax(-1) == targets).float()
            is_name = torch.isin(targets, self.name_token_ids)
            metrics = {
                "answer_loss": float(loss.detach()),
                "tokens": float(hits.mean()),
                "names": float(hits[is_name].mean()) if is_name.any() else math.nan,
            }
        return loss, metrics

    def _name_loss(self, visual: Tensor, kinds: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy of the things' names at their visual tokens [F, P, D], with the model's `lm_head`."""
        is_thing = (kinds >= 0) & (kinds < BACKGROUND_CLASS)
        logits = self.model.lm_head(visual[is_thing]).float()
        targets = self.name_token_ids[kinds[is_thing]]
        loss = functional.cross_entropy(logits, targets)
        accuracy = (logits.detach().argmax(-1) == targets).float().mean()
        return loss, {"name_loss": float(loss.detach()), "patches": float(accuracy)}

    def _probe_loss(self, name: str, hidden_states: Tensor, labels: Tensor) -> tuple[Tensor, float | None]:
        """Cross-entropy and accuracy of a head on [..., D] where labels [...] are defined; (0, None) if none is."""
        known = labels != IGNORE_INDEX
        logits = self.heads[name](hidden_states[known]).float()
        if not len(logits):
            return logits.new_zeros(()), None
        accuracy = float((logits.detach().argmax(-1) == labels[known]).float().mean())
        return functional.cross_entropy(logits, labels[known]), accuracy

    def _patch_loss(self, name: str, visual: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
        """Loss of one patch label at the visual tokens [F, P, D]."""
        if name == "letter":  # letters occur only on signs
            labels = labels.masked_fill(kinds != SIGN_CLASS, IGNORE_INDEX)
        known = (labels != IGNORE_INDEX).flatten(2).any(-1) if labels.ndim > 2 else labels != IGNORE_INDEX
        return head_loss(name, self.heads[name](visual[known]).float(), labels[known])

    def _run_text_model(self, text_model: LlamaModel, inputs_embeds: Tensor, turn_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed hidden states after `PROBE_LAYER` layers and after `num_layers`, [B, S, D] each.

        With at most `PROBE_LAYER` layers both are those after the last layer.
        """
        layers = text_model.layers
        norm = text_model.norm
        kwargs: dict[str, Any] = {"use_cache": False}
        if turn_ids.any():  # otherwise the default causal mask is right: padding is on the right
            kwargs["attention_mask"] = build_turn_mask(turn_ids)
            kwargs["position_ids"] = build_turn_position_ids(turn_ids)
        has_probe = self.num_layers > PROBE_LAYER
        probed = inputs_embeds
        try:
            if has_probe:
                text_model.layers = layers[:PROBE_LAYER]
                text_model.norm = nn.Identity()
                probed = text_model(inputs_embeds=inputs_embeds, **kwargs).last_hidden_state
            text_model.layers = layers[PROBE_LAYER if has_probe else 0 : self.num_layers]
            text_model.norm = norm
            hidden_states = text_model(inputs_embeds=probed, **kwargs).last_hidden_state
        finally:
            text_model.layers = layers
            text_model.norm = norm
        return (norm(probed) if has_probe else hidden_states), hidden_states


def build_turn_mask(turn_ids: Tensor) -> Tensor:
    """Return the attention mask of independent turns.

    Args:
        turn_ids: [B, S] int64, as in `ChatSample`.

    Returns:
        [B, 1, S, S] bool, True where the query attends to the key: keys up to the query's index, of turn 0 or of the
        query's turn.
    """
    length = turn_ids.size(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=turn_ids.device).tril()
    query = turn_ids[:, :, None]
    key = turn_ids[:, None, :]
    return ((query == key) | (key == 0)).logical_and(causal)[:, None]


def build_turn_position_ids(turn_ids: Tensor) -> Tensor:
    """Return [B, S] position ids: every turn continues from the end of the shared prefix (turn 0)."""
    index = torch.arange(turn_ids.size(1), device=turn_ids.device).expand_as(turn_ids)
    is_start = torch.ones_like(turn_ids, dtype=torch.bool)
    is_start[:, 1:] = turn_ids[:, 1:] != turn_ids[:, :-1]
    start = torch.where(is_start, index, 0).cummax(1).values
    prefix_length = torch.where(turn_ids > 0, index, turn_ids.size(1)).amin(1, keepdim=True)
    return torch.where(turn_ids > 0, index - start + prefix_length, index)
