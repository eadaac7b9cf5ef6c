"""`mmspec_hf`: a model of lmms-eval that decodes with mmspec, so that accuracy tasks run patched.

lmms-eval finds it by the entry point group "lmms_eval.models":

    python -m lmms_eval --model mmspec_hf --model_args pretrained=llava-hf/llava-1.5-7b-hf,drafter=auto --tasks mme

`drafter=plain` decodes with plain `generate`: the same task must give the same score. Written for lmms-eval 0.7, which
is imported here and nowhere else in mmspec. One request at a time; log-likelihoods, which decode nothing, are not
implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lmms_eval.api.model import lmms
from PIL import Image

import mmspec
from mmspec.app.compare.command import split_spec
from mmspec.app.modeling.chat import build_inputs
from mmspec.app.modeling.load import load_model

MODEL_ID = "mmspec_hf"
PLAIN_DRAFTER = "plain"
LMMS_NEW_TOKENS = 1024
"""Of tasks that set no limit, as in lmms-eval's own models."""
PLACEHOLDERS = ("<image>", "<video>")


class MmspecHf(lmms):
    """A vision-language model of transformers, patched.

    Args:
        pretrained: hub id, folder or built-in name.
        drafter: spec as for `mmspec compare`, or "plain" for `generate` as it is.
        dtype, device: of the model. batch_size: only 1.
    """

    is_simple = True

    def __init__(
        self,
        pretrained: str = "scenes",
        drafter: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        batch_size: int | str = 1,
        **unknown: Any,
    ) -> None:
        super().__init__()
        unexpected = {name for name, value in unknown.items() if value is not None} - {"max_batch_size"}
        if unexpected:
            raise ValueError(
                f"{MODEL_ID} takes pretrained, drafter, dtype and device; got {', '.join(sorted(unexpected))}"
            )
        if int(batch_size) != 1:
            raise ValueError(f"{MODEL_ID} runs one request at a time; got batch_size={batch_size}")
        self.model, self.processor = load_model(pretrained, dtype, device)
        if drafter != PLAIN_DRAFTER:
            mmspec.patch(self.model, *split_spec(drafter), self.processor)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answers of requests whose `args` are (context, options, images of a document, its id, task, split)."""
        return [self._answer(*request.args) for request in requests]

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not implemented: tasks of several rounds."""
        raise NotImplementedError(f"{MODEL_ID} answers single questions; choose tasks of one round")

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Not implemented: nothing is decoded, so nothing could differ."""
        raise NotImplementedError(f"{MODEL_ID} decodes; choose tasks with output_type generate_until")

    def _answer(
        self, context: str, options: dict[str, Any], visuals_of: Any, doc_id: Any, task: str, split: str
    ) -> str:
        """One answer, cut at the first of the stop texts."""
        images = [one for one in visuals_of(self.task_dict[task][split][doc_id]) if one is not None]
        if not all(isinstance(one, Image.Image) for one in images):
            raise ValueError(f"{MODEL_ID} reads images; task {task} has other media")
        for placeholder in PLACEHOLDERS:
            context = context.replace(placeholder, "")
        inputs = build_inputs(self.model, self.processor, [images], [context.strip()])
        with torch.inference_mode():
            ids = self.model.generate(**inputs, **_generation_options(options))
        answer = self.processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        until = options.get("until") or []
        for stop in [until] if isinstance(until, str) else until:
            answer = answer.split(stop)[0] if stop else answer
        return str(answer)

    @property
    def stats(self) -> mmspec.Stats:
        """Counters of all answers of a patched model."""
        return mmspec.stats(self.model)


def _generation_options(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` from a task's generation_kwargs, greedy unless a temperature is given."""
    temperature = float(options.get("temperature") or 0.0)
    sampling = {name: options.get(name) for name in ("top_p", "top_k")} | {"temperature": temperature}
    chosen: dict[str, Any] = sampling if temperature > 0 else dict.fromkeys(sampling)
    chosen |= {"do_sample": temperature > 0, "num_beams": int(options.get("num_beams") or 1)}
    return chosen | {"max_new_tokens": int(options.get("max_new_tokens") or LMMS_NEW_TOKENS)}


def model_manifest() -> Any:
    """The entry point: what lmms-eval registers."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(MODEL_ID, simple_class_path=f"{__name__}.{MmspecHf.__name__}")
