"""The race that a page opens with: the first example, recorded once when the server starts, if nobody asks before."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mmspec.app.scenes.examples import EXAMPLES_FOLDER
from mmspec.app.ui.comparison import ComparisonRun
from mmspec.app.ui.comparison_stream import CompareResult, Conversation, build_result
from mmspec.app.ui.model_store import RunSettings
from mmspec.app.ui.worker import CancelSignal

if TYPE_CHECKING:
    from mmspec.app.ui.context import Context

OPENING_IMAGE = EXAMPLES_FOLDER / "rocket_rainbow_bucket_telescope.png"
OPENING_QUESTION = "Describe the picture in detail."
PICTURE_QUESTIONS = (OPENING_QUESTION, "What do you see?", "How many things are there?", "What is the background like?")
CLIP_QUESTIONS = ("What happens in the clip?", "Describe the video.", "How many pictures are there?")
"""Questions that a page offers; the toy model was trained on questions like these."""
GENERAL_CLIP_QUESTIONS = (*CLIP_QUESTIONS[:2], "What changes from beginning to end?")
"""For other models."""


class Opening:
    """Records the race in the background. A visitor's run ends it: then pages open without one."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._signal = CancelSignal(math.inf)
        self._recorded: Future[CompareResult | None] | None = None

    def start(self) -> None:
        """Queue the recording."""
        self._recorded = self.context.worker.submit_background(self._record, self._signal)

    def stop(self) -> None:
        """End the recording."""
        self._signal.cancel()

    def _record(self) -> CompareResult | None:
        context = self.context
        store = context.model_store
        settings = RunSettings(store.model_names[0], store.drafter_names[0])
        run = ComparisonRun(
            store,
            lambda: context.limits.load_media(OPENING_IMAGE),
            (),
            OPENING_QUESTION,
            settings,
            self._signal,
            OPENING_IMAGE,
        )
        run.run()
        if run.cancelled or run.loaded_model is None or run.identical is None:
            return None
        return build_result(run, Conversation(None))

    async def wait(self) -> CompareResult | None:
        """The recorded race; None if there is none, because it failed or was ended."""
        if self._recorded is None:
            return None
        recorded = asyncio.wrap_future(self._recorded)
        await asyncio.wait([recorded])  # unlike awaiting it, this does not cancel it when the page is closed
        is_failed = recorded.cancelled() or recorded.exception() is not None  # the terminal reports why
        return None if is_failed else recorded.result()
