"""A drafter that learns while pictures are captioned: from nothing, beside one that does not learn.

Each picture is described twice: by a copy of the model that is patched with `learn=True`, and by the model with
`hybrid`, which needs no training. `LearningRun.run` is called in the worker's thread; other threads may read its fields
meanwhile.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from mmspec.app.caption.config import PROMPT, SCENES_MODEL
from mmspec.app.errors import UsageError, one_line
from mmspec.app.ui.model_store import ModelStore, RunSettings
from mmspec.app.ui.thumbnails import MEDIA_SIZE, to_data_uri
from mmspec.app.ui.worker import CancelSignal
from mmspec.files import CACHE_VARIABLE
from mmspec.learning.stats import CurvePoint, LearningStats, SpeedCurve

if TYPE_CHECKING:
    from mmspec.app.scenes.tasks import SceneRequest
    from mmspec.app.ui.loaded_model import LoadedModel

UNTRAINED_DRAFTER = "hybrid"
LEARNING_DRAFTERS = ("instant", "arbitrated")
"""Drafters that learn from nothing."""
CALLS_PER_MEAN = 8
"""Calls of a moving mean."""
CALLS_PER_RATE = 3
"""Pictures after which the time that is left is stated."""
MAX_PICTURES = 120
"""One point of `LearningStats.curve` for each call: the curve merges points above 128."""


class LearningRun:
    """Some pictures, described one after the other.

    Attributes:
        total: number of pictures.
        num_ahead: runs ahead of this one in the queue.
        cancelled: the run ended early.
        num_done: pictures that both have described.
        num_identical: of those, with the same tokens.
        learning: `mmspec.stats(model).learning` of the copy that learns.
        baseline: curve of the drafter that does not learn.
        text: the last description.
        picture: that it describes, as a data URI.
    """

    def __init__(self, model_store: ModelStore, settings: RunSettings, total: int) -> None:
        self.model_store = model_store
        self.settings = settings
        self.total = total
        self.num_ahead = 0
        self.cancelled = False
        self.num_done = 0
        self.num_identical = 0
        self.learning = LearningStats()
        self.text = ""
        self.picture = ""
        self._started_at = time.monotonic()
        self._baseline = SpeedCurve()

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest will take at the rate so far; None before a rate is known."""
        if self.num_done < CALLS_PER_RATE:
            return None
        return (time.monotonic() - self._started_at) / self.num_done * (self.total - self.num_done)

    @property
    def baseline(self) -> Sequence[CurvePoint]:
        """Points of the drafter that does not learn, one per picture."""
        return self._baseline.points()

    def run(self, cancel_signal: CancelSignal) -> LearningRun:
        """Describe all pictures, in the worker's thread.

        Raises:
            UsageError: the model cannot be used, or the drafter cannot learn on it.
        """
        import mmspec

        settings = self.settings
        self._started_at = time.monotonic()
        if cancel_signal.should_stop:
            self.cancelled = True
            return self
        loaded = self.model_store.get(settings.model)
        baseline = loaded.get_drafter(UNTRAINED_DRAFTER)
        with empty_cache_folder():
            learner = loaded.clone()
            try:
                mmspec.patch(learner, settings.drafter, processor=loaded.processor, learn=True)
            except (TypeError, ValueError) as error:
                raise UsageError(f"Drafter {settings.drafter}: {one_line(error, 300)}") from error
            try:
                for request in islice(draw_pictures(settings.seed), self.total):
                    self._describe(loaded, learner, baseline, request, cancel_signal)
                    if self.cancelled:
                        break
            finally:
                mmspec.unpatch(learner)  # stores its weights, which the folder takes with it
        return self

    def _describe(
        self, loaded: LoadedModel, learner: Any, baseline: Any, request: SceneRequest, cancel_signal: CancelSignal
    ) -> None:
        """One picture with both drafters. Only calls that ended by themselves count."""
        import mmspec
        from mmspec.app.modeling.captioner import Captioner
        from mmspec.app.modeling.chat import build_inputs, encode_media
        from mmspec.app.ui.cancel import build_stopping_criteria
        from mmspec.app.ui.run_comparison import copy_request

        question = request.question if self.settings.model == SCENES_MODEL else PROMPT
        inputs = build_inputs(loaded.model, loaded.processor, [request.images[0]], [question])
        encoded, _ = encode_media(loaded.model, inputs)
        captioner = Captioner(loaded.model, loaded.processor, self.settings.max_new_tokens)
        options = captioner.generation_kwargs() | {"stopping_criteria": build_stopping_criteria(cancel_signal)}
        learned = learner.generate(**copy_request(encoded), **options)
        plain = loaded.model.generate(**copy_request(encoded), **options, mmspec={"drafter": baseline})
        self.cancelled = cancel_signal.should_stop
        if self.cancelled:
            return
        self._baseline.add(mmspec.stats(loaded.model, last=True))
        self.learning = mmspec.stats(learner).learning
        self.num_identical += learned.tolist() == plain.tolist()
        new_ids = learned[0, inputs["input_ids"].shape[1] :]
        self.text = loaded.processor.tokenizer.decode(new_ids, skip_special_tokens=True).strip()
        self.picture = to_data_uri(request.images[0], MEDIA_SIZE)
        self.num_done += 1


def draw_pictures(seed: int) -> Iterator[SceneRequest]:
    """Pictures of which none is used twice, with a question about each."""
    from mmspec.app.scenes.tasks import generate_requests
    from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED

    return generate_requests("describe", FIRST_HELD_OUT_SEED + seed)


@contextmanager
def empty_cache_folder() -> Iterator[None]:
    """Within this block mmspec's cache folder is a new one, removed afterwards: no weights are read, none left."""
    previous = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="mmspec-learning-") as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            if previous is None:
                del os.environ[CACHE_VARIABLE]
            else:
                os.environ[CACHE_VARIABLE] = previous


def pool_calls(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """The mean of some calls; None for no calls."""
    pooled: CurvePoint | None = None
    for point in points:
        pooled = point if pooled is None else pooled.merge(point)
    return pooled


def moving_means(points: Sequence[CurvePoint]) -> list[float]:
    """Tokens per forward up to each point, over the last `CALLS_PER_MEAN` points."""
    windows = (points[max(0, end - CALLS_PER_MEAN) : end] for end in range(1, len(points) + 1))
    return [pooled.tokens_per_forward for window in windows if (pooled := pool_calls(window)) is not None]
