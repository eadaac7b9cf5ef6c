"""`Learner`: learns a drafter's weights between calls and swaps them in. Affects speed only.

After each call (`after_call`) as much work is done as the budget allows, in the thread of that call. What starts from
nothing has a fit in closed form: the examples of a call are added to its sums and dropped, and it is solved at first
often, then ever more rarely. What was trained before goes on by optimiser steps on sequences of a reservoir. Any
exception ends learning with one warning; the drafter goes on with its last weights.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from mmspec.forks import new_lock
from mmspec.interfaces import Drafter, SharedEmbeddings
from mmspec.learning.budget import DEFAULT_SHARE, LearningBudget
from mmspec.learning.collecting import Collection
from mmspec.learning.protocols import (
    ClosedFormDrafter,
    ClosedFormFit,
    GradientDrafter,
    LearnableDrafter,
    LearningExample,
)
from mmspec.learning.reservoir import ExampleReservoir
from mmspec.learning.stats import LearningStats
from mmspec.learning.store import LearnedStore, model_fingerprint
from mmspec.learning.weights import WeightTrainer

SEQUENCES_PER_STEP = 2
"""Sequences of an optimiser step."""
FIRST_STEP_CALLS, FIRST_FIT_CALLS, FIRST_SOLUTION_CALLS = 0.6, 0.02, 0.3
"""What the first optimiser step, sums of a call and solution may cost, in mean calls; after that they are measured."""
MIN_SEQUENCES = 4
"""Before the first step, so that the head does not learn one text by heart."""
MAX_WAITING = 16
"""Calls whose examples wait for the fit in closed form; older ones are dropped."""
SOLUTION_GROWTH = 1.6
"""A fit is solved again when it holds this many times the examples of the last solution, ..."""
MAX_SOLUTION_INTERVAL = 16384
"""... but after so many more at the latest, so that a change of domain is followed."""
EAGER_EXAMPLES = 4096
"""Up to so many a fit uses the whole budget: before, its drafts cannot show what they save."""
SAVE_EVERY_S = 30.0
MAX_BAD_STEPS = 10
"""Consecutive steps without a finite loss after which learning ends."""


class Learner:
    """Learns one drafter on one target; shared by the threads of its calls.

    Attributes:
        drafter: what learns.
        key: name of its weights on disk.
        budget: time earned and spent.
        resumed: whether it continues from stored weights.
        num_updates: how often new weights were published.
        disabled_reason: why learning ended, or None.
    """

    def __init__(
        self,
        drafter: LearnableDrafter,
        shared_embeddings: SharedEmbeddings,
        store: LearnedStore | None,
        warn: Callable[[str], None],
        share: float = DEFAULT_SHARE,
    ) -> None:
        """
        Args:
            drafter: what learns; weights that are stored for it are published at once.
            shared_embeddings: of the target.
            store: of the target's learned weights; None to store nothing.
            warn: logs a message once.
            share: largest share of the time of the calls.
        """
        self.drafter = drafter
        self.shared_embeddings = shared_embeddings
        self.store = store
        self.warn = warn
        device = next(shared_embeddings.embed_tokens.parameters()).device
        self.device_type = device.type
        self.key = drafter.learning_key
        self.budget = LearningBudget(share)
        self.disabled_reason: str | None = None
        self._call_s = 0.0
        self.num_updates = 0
        self._fit: ClosedFormFit | None = None
        self._next_solution = 0
        self._reservoir = ExampleReservoir()
        self._trainer: WeightTrainer | None = None
        self._waiting: deque[LearningExample] = deque(maxlen=MAX_WAITING)
        self._unsaved: dict[str, Tensor] | None = None
        self._last_save = time.monotonic()
        self._rng = torch.Generator().manual_seed(0)
        self._lock = new_lock()  # of the reservoir, the queue and the budget
        self._work_lock = new_lock()  # of the thread that trains or saves
        with _plain_mode(self.device_type):  # `patch` may be called in inference mode
            if isinstance(drafter, ClosedFormDrafter):
                self._fit = drafter.closed_form(device)
            self.resumed = self._resume()
        _save_at_exit(self)

    @property
    def is_eager(self) -> bool:
        """Whether too little is learned for its drafts to show what they save."""
        fit = self._fit  # another thread may end learning
        return fit is not None and fit.num_examples < EAGER_EXAMPLES

    @property
    def wants_examples(self) -> bool:
        """Whether examples of the coming call could be learned soon; else none are recorded."""
        return self.disabled_reason is None and (self.is_eager or not (self._waiting or self.budget.is_overdrawn))

    def after_call(self, collecting: Collection | None, call_s: float, saved_s: float | None = None) -> bool:
        """Store what was collected of a call, and learn as much as the budget allows.

        Args:
            collecting: of the call, which is over; None if nothing is to be learned from it.
            call_s: seconds of the call.
            saved_s: of these, how many more it would have taken without drafts; None if that is not measured.

        Returns:
            Whether new weights were published meanwhile.
        """
        if self.disabled_reason is not None:
            return False
        num_updates = self.num_updates
        try:
            with _plain_mode(self.device_type):
                self._add(collecting, call_s, saved_s)
                if self._work_lock.acquire(blocking=False):  # else another thread is at it
                    try:
                        self._work()
                    finally:
                        self._work_lock.release()
        except Exception as error:
            self._disable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return self.num_updates > num_updates

    def save(self) -> None:
        """Store the last published weights, unless they are stored. A failure is one warning."""
        with self._work_lock:
            self._save()

    def stats(self) -> LearningStats:
        """What was learned so far, without the curve."""
        trainer, fit, store = self._trainer, self._fit, self.store  # other threads may drop them
        num_fitted = 0 if fit is None else fit.num_examples
        return LearningStats(
            enabled=self.disabled_reason is None,
            disabled_reason=self.disabled_reason,
            drafter=self.key,
            num_examples=num_fitted or len(self._reservoir),
            reservoir_bytes=self._reservoir.nbytes,
            num_fitted=num_fitted,
            num_steps=0 if trainer is None else trainer.num_steps,
            num_updates=self.num_updates,
            learn_s=self.budget.spent_s,
            call_s=self._call_s,
            share=self.budget.current_share,
            resumed=self.resumed,
            folder=None if store is None else str(store.folder),
        )

    # --- after a call -------------------------------------------------------------------------------------------------

    def _add(self, collecting: Collection | None, call_s: float, saved_s: float | None) -> None:
        """Count a call, and store its examples."""
        with self._timed("store"):
            examples = () if collecting is None else collecting.examples()
            with self._lock:
                self._call_s += call_s
                if saved_s is not None and not self.is_eager:
                    self.budget.add_savings(saved_s, call_s)
                self.budget.earn(call_s)
                for example in examples:
                    if self._fit is not None:
                        self._waiting.append(example)
                    else:
                        self._reservoir.add(example)

    def _work(self) -> None:
        """Fit or train, and save, as much as the budget allows."""
        if self._fit is not None:
            self._work_on_fit(self._fit)
        elif isinstance(self.drafter, GradientDrafter):
            self._train(self.drafter)
        if self._unsaved is not None and time.monotonic() - self._last_save > SAVE_EVERY_S:
            with self._timed("save"):
                self._save()

    def _work_on_fit(self, fit: ClosedFormFit) -> None:
        """Add the calls that wait, and solve if there are so many more examples that it is worth it."""
        self.budget.expect("fit", FIRST_FIT_CALLS)
        self.budget.expect("solve", FIRST_SOLUTION_CALLS)
        while self._waiting and self.budget.can_afford("fit"):
            with self._timed("fit"):
                fit.add(self._waiting.popleft())
        is_due = fit.is_determined and fit.num_examples >= self._next_solution
        if is_due and self.budget.can_afford("solve"):
            with self._timed("solve"):
                weights = fit.solve()
                if weights is not None:
                    self._publish(weights)
            interval = min(MAX_SOLUTION_INTERVAL, int((SOLUTION_GROWTH - 1) * fit.num_examples))
            self._next_solution = fit.num_examples + interval

    def _train(self, drafter: GradientDrafter) -> None:
        """Optimiser steps, and an update of the drafter after them."""
        if len(self._reservoir) < MIN_SEQUENCES:
            return
        num_steps = 0 if self._trainer is None else self._trainer.num_steps
        self.budget.expect("step", FIRST_STEP_CALLS)
        while self.budget.can_afford("step"):
            if self._trainer is None:
                with self._timed("copy"):
                    self._trainer = WeightTrainer(drafter, self.shared_embeddings)
            with self._timed("step"):
                self._step(self._trainer)
        if self._trainer is not None and self._trainer.num_steps > num_steps:
            with self._timed("publish"):
                self._publish(self._trainer.weights())

    def _step(self, trainer: WeightTrainer) -> None:
        """One optimiser step."""
        with self._lock:
            batch = self._reservoir.sample(SEQUENCES_PER_STEP, self._rng)
        loss = trainer.step(batch)
        if loss is None:
            if trainer.num_bad_steps >= MAX_BAD_STEPS:
                raise ArithmeticError(f"{MAX_BAD_STEPS} steps without a finite loss")
            return
        self.budget.add_loss(loss)

    def _publish(self, weights: dict[str, Tensor]) -> None:
        self.drafter.publish(weights)
        self.num_updates += 1
        self._unsaved = weights

    # --- storage ------------------------------------------------------------------------------------------------------

    def _resume(self) -> bool:
        """Publish the stored weights; False if there are none that can be used."""
        weights = None if self.store is None else self.store.load(self.key)
        if weights is None:
            return False
        try:
            self.drafter.publish(weights)
        except ValueError as error:
            self.warn(f"stored weights are ignored, learning starts anew: {error}")
            return False
        if "num_examples" in weights:  # new sums hold too few at first to replace what is stored
            self._next_solution = min(MAX_SOLUTION_INTERVAL, int(weights["num_examples"]))
        return True

    def _save(self) -> None:
        weights, self._unsaved = self._unsaved, None
        self._last_save = time.monotonic()
        if weights is None or self.store is None:
            return
        try:
            self.store.save(self.key, weights)
        except OSError as error:
            self.warn(f"learned weights are not stored in {self.store.folder}: {error}")
            self.store = None

    def _disable(self, reason: str) -> None:
        self.disabled_reason = reason
        self._trainer = self._fit = None
        self._reservoir = ExampleReservoir()
        self._waiting.clear()
        self.warn(f"learning has ended, the drafter keeps its last weights: {reason}")

    @contextmanager
    def _timed(self, work: str) -> Iterator[None]:
        """Charge the time within the context to the budget."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.budget.spend(time.perf_counter() - start, work)


@contextmanager
def _plain_mode(device_type: str) -> Iterator[None]:
    """With gradients, whatever inference mode, autocast or default device the caller of `generate` uses."""
    is_plain = torch.get_default_device().type == "cpu"
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device_type, enabled=False),
        nullcontext() if is_plain else torch.device("cpu"),
    ):
        yield


def start_learner(
    drafter: Drafter, model: nn.Module, shared_embeddings: SharedEmbeddings, warn: Callable[[str], None], share: float
) -> Learner | None:
    """A learner of a `LearnableDrafter` with the files of the target; None, with one warning, if something prevents it.

    Only speed depends on it.
    """
    assert isinstance(drafter, LearnableDrafter)
    try:
        return Learner(drafter, shared_embeddings, LearnedStore(model_fingerprint(model)), warn, share)
    except Exception as error:  # such as weights of a class that cannot be read one by one
        warn(f"the drafter does not learn ({type(error).__name__}: {error})")
        return None


def _save_at_exit(learner: Learner) -> None:
    """Store the weights when the process ends, if the learner still exists."""
    reference = weakref.ref(learner)

    def save() -> None:
        if (found := reference()) is not None:
            found.save()

    atexit.register(save)
    weakref.finalize(learner, atexit.unregister, save).atexit = False
