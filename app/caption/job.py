"""`CaptionJob`: a stream of images and videos to rows of captions. May be killed at any moment and resumed.

Who captions (`Executor`) and the destination of the rows (`Output`) are arguments. What is in a batch is decided in
`plan`, what becomes of it in `rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.caption.executor import Executor
from mmspec.app.caption.pending import is_pending, survey
from mmspec.app.caption.plan import RowPlan
from mmspec.app.caption.progress import CaptionProgress, comparison_lines, file_line, print_stderr
from mmspec.app.caption.report import JobReport
from mmspec.app.caption.stop import GracefulStop
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Finished, JobSummary, Output


class CaptionJob:
    """One run of a caption job."""

    def __init__(
        self, config: CaptionConfig, output: Output, executor: Executor, report: JobReport | None = None
    ) -> None:
        """Set up; nothing is read or written before `run`.

        Args:
            executor: captions the rows.
            report: told of pictures and rows, and written at the end.
        """
        self.config, self.output, self.executor, self._job_report = config, output, executor, report
        self.process = executor.process
        self._finished: Mapping[str, Finished] = {}
        self._retried: set[str] = set()  # rows with an error that were repeated in this run

    def run(self) -> int:
        """Caption the pending rows.

        Returns:
            The exit code: 0, 1 if rows failed or differ, 128 + signal if interrupted.

        Raises:
            UsageError: inputs, settings or output that do not go together.
            OutputError: a row cannot be written.
        """
        config, executor = self.config, self.executor
        inputs = Inputs(config.paths, config.source_options(self.output.base), self.output.own_files())
        inputs.check()
        self._finished = self.output.open()
        plan = RowPlan(config, self.process, self._is_pending)
        complete = False
        try:
            total, replaced = survey(inputs, config, self.process, self._finished)
            self._print([*inputs.left_out(listed=True), *replaced])
            if executor.prepare(plan, inputs, self._finished):
                self._print([plan.describe(total)])
            self.output.begin(config.retry_errors)
            label = f"rank {self.process.rank}" if self.process.world_size > 1 else "caption"
            show = config.progress if self.process.rank == 0 else False
            on_decoded = self._job_report.add_picture if self._job_report else lambda item, media: None
            with GracefulStop() as stop, CaptionProgress(total, plan.num_finished, show, label) as progress:
                for rows, items in executor.results(stop, on_decoded):
                    self._write(rows, items, progress)
                    if stop.signal:
                        break
            complete = not stop.signal
        finally:
            summary = self.output.close(plan.ids, complete=complete)
        self._report(progress, plan.num_finished, stop, summary)
        self._print(executor.left_out())
        return 128 + stop.signal if stop.signal else self._exit_code(summary)

    def _print(self, lines: Sequence[str]) -> None:
        if self.process.rank == 0:
            for line in lines:
                print_stderr(f"mmspec: {line}")

    def _write(self, rows: list[Row], items: list[Item], progress: CaptionProgress) -> None:
        """Write the pending ones of the rows of a batch."""
        new = [(row, item) for row, item in zip(rows, items, strict=True) if self._is_pending(item)]
        columns = self.config.columns()
        self.output.write([{name: row[name] for name in columns} for row, _ in new], [item for _, item in new])
        if self.config.retry_errors:
            self._retried.update(row["id"] for row, _ in new)
        if self._job_report is not None:
            self._job_report.add_rows([row for row, _ in new])
        progress.add(row for row, _ in new)

    def _is_pending(self, item: Item) -> bool:
        return is_pending(item, self._finished, self.config) and item.id not in self._retried

    def _report(self, progress: CaptionProgress, skipped: int, stop: GracefulStop, summary: JobSummary | None) -> None:
        model = self.executor.model
        lines = progress.summary(skipped, model.acceptance if model else None)
        lines += comparison_lines(model.comparison, model.dtype != "float32") if model else []
        if self.config.writes_texts:
            lines.append(f"text files {'beside the pictures' if self.config.out == '-' else f'in {self.config.out}'}")
        elif self.config.out != "-":
            lines.append(file_line(summary, self.config.out, self.output, self.process))
        if stop.signal:
            lines.append("interrupted: run the same command again to continue")
        if self._job_report is not None:
            self._job_report.write(lines)
            lines.append(f"report in {self._job_report.file}")
        who = f"mmspec rank {self.process.rank}: " if self.process.world_size > 1 else "mmspec: "
        for line in lines:
            print_stderr(who + line)

    def _exit_code(self, summary: JobSummary | None) -> int:
        """Of several ranks only the last to finish reports failures: a launcher kills the others when one fails."""
        if summary is None:
            return 0
        if summary.num_errors and self.config.writes_texts:
            print_stderr(
                f"mmspec: {summary.num_errors} of {summary.num_rows} have no caption; the next run tries again"
            )
        elif summary.num_errors and not self.config.retry_errors:
            print_stderr(
                f"mmspec: {summary.num_errors} of {summary.num_rows} rows hold an error; --retry-errors repeats them"
            )
        return int(bool(summary.num_errors or summary.num_different))
