"""`StepwiseLoop`: one token of every row per round, by the calls that transformers makes.

User code that is called at every step may read and write the ids, draw random numbers, or change the model, so nothing
is drafted. Takes over in the middle of a call, once `OutputBuffer.stepwise` is set and the provisional tokens are
dropped.
"""

from __future__ import annotations

import time

from torch import Tensor

from mmspec.engine.output import OutputBuffer
from mmspec.engine.row_state import RowState
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import DraftTree, root_only
from mmspec.engine.verifier import Verified, Verifier
from mmspec.interfaces import Target
from mmspec.metrics.stats import RoundTimes, Stats


class StepwiseVerifier(Verifier):
    """Processors may be user code, which reads and writes the ids and the logits."""

    def verify(self, tree: DraftTree, logits: Tensor, rows: RowState, top_k: int = 0) -> Verified:
        return super().verify(tree, logits.clone() if logits.is_inference() else logits, rows, top_k)

    def sample(self, tree: DraftTree, logits: Tensor, rows: RowState) -> tuple[Tensor, Tensor, Tensor | None]:
        output = self.output
        output.hooks.before_user_code(output.steps)
        sampled = self.sampler.sample(
            logits,
            tree,
            output.user_input_ids(),
            rows.host_num_emitted,
            output.prompt_length,
            output.noise_end(1),
        )
        output.apply_user_edits()
        return sampled

    def confirm(self, logits: Tensor) -> bool:
        """Make the calls of the coming step, whose tokens are drafted, and correct them; whether drafting must end.

        Args:
            logits: [B, V] float32 of the step.

        Raises:
            Exception: of the processors, at the step at which transformers raises it.
        """
        output, noise, step = self.output, self.sampler.noise, self.output.steps
        output.hooks.before_user_code(step)
        if noise is not None:
            noise.claim(step - 1)
        scores = self.sampler.process_step(logits[:, None], output.user_input_ids())
        has_drawn = noise is not None and not noise.rng_contended and noise.rng_changed()
        if noise is not None and has_drawn:
            noise.disable_lookahead(step - 1)
        ids, scores, is_nan = self.sampler.sample_step(scores, step, step + 1)
        if is_nan is not None and is_nan.any():
            raise RuntimeError(self.sampler.nan_message)
        edited = output.apply_user_edits()
        return output.correct(ids[:, 0].tolist(), scores[:, 0]) or edited or has_drawn


class StepwiseLoop:
    """The rounds of a call, or of its rest.

    Attributes:
        verifier: of the call.
    """

    def __init__(self, target: Target, output: OutputBuffer, sampler: TreeSampler, stats: Stats) -> None:
        """
        Args:
            target: scores the last token of each row.
            output: the emitted tokens.
            sampler: samples the next ones.
            stats: counters of this call.
        """
        self.verifier = StepwiseVerifier(output, sampler)
        self._target, self._output, self._stats = target, output, stats

    def run(self) -> None:
        """Decode until all rows are finished, after `output.advance` has returned False."""
        target, output = self._target, self._output
        root = root_only(len(output.emitted), output.sequences.device)
        while True:
            start = time.perf_counter()
            target.crop(output.cached_lengths)
            rows = output.row_state(1)
            active = [n > 0 and not end for n, end in zip(rows.host_max_emit, output.finished, strict=True)]
            logits, _ = target.score(root.with_root(rows.root_ids))
            verified = self.verifier.verify(root, logits, rows)
            scored = time.perf_counter()
            target.commit(verified.result)
            output.emit(verified.result, verified.scores, verified.logits, rows)
            times = RoundTimes(0.0, scored - start, time.perf_counter() - scored)
            self._stats.add_round(1, verified.result.tree_sizes, verified.result.emitted_ids, active, times)
            if output.advance():
                return
