"""`mmspec caption --ray`: the same job on Ray. This process plans and writes, actors decode and caption.

Batches travel whole, so their rows stay together as in a job of one process, and captions are the same ones; and those
about the same pictures as one task, so that one actor has them and each picture is decoded, and encoded, once. A row
counts when it is durable in the output: whatever is killed, what was not written is captioned by the next run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from mmspec.app.caption.config import SCENES_MODEL, CaptionConfig, ProcessInfo
from mmspec.app.caption.executor import Executor, Results, decode_batches
from mmspec.app.caption.job import CaptionJob
from mmspec.app.caption.progress import print_stderr
from mmspec.app.caption.ray_messages import quiet_loggers, ray_messages_in_file
from mmspec.app.caption.report import JobReport
from mmspec.app.caption.rows import RowCaptioner
from mmspec.app.caption.stop import GracefulStop
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.images import Media
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Output
from mmspec.app.io.tables import needs_extra
from mmspec.app.modeling.random_models import SIZES
from mmspec.app.versions import mmspec_version
from mmspec.vision.video.decoder_pool import DecoderPool

PREFLIGHT_TIMEOUT_S = 120.0
"""Seconds that a node may take to import mmspec."""
TASKS_PER_ACTOR = 2
"""One is captioned while the pictures of the other are decoded."""
WAIT_S = 0.5
"""Seconds after which it is looked whether the job is to stop."""


def run_on_ray(config: CaptionConfig, output: Output, report: JobReport | None = None) -> int:
    """Run a job on a Ray cluster; returns and raises as `CaptionJob.run`. A report has no pictures: they stay there.

    Raises:
        UsageError: also if Ray cannot be reached, or a node lacks mmspec.
    """
    with needs_extra("--ray", "ray"):
        import ray
    executor = RayExecutor(config)
    with ray_messages_in_file() as file:
        print_stderr(f"mmspec: starting Ray; its own messages are in {file}")
        try:
            return CaptionJob(config, output, executor, report).run()
        except ray.exceptions.RayError as error:
            raise _explain(error) from error
        finally:
            if executor.has_started_ray:
                ray.shutdown()


class RayExecutor(Executor):
    """Captions on a Ray cluster, batches as of one process. See `Executor`.

    Attributes:
        has_started_ray: it was not running in this process before.
    """

    has_started_ray = False

    @cached_property
    def _processor(self) -> Any:
        """The processor of the model, without the model; None of bundled ones, for which all pictures are alike."""
        if self.config.model in (SCENES_MODEL, *SIZES):  # torch would take seconds
            return None
        from mmspec.app.modeling.load import load_processor

        try:
            return load_processor(self.config.model)
        except UsageError:  # the actors, which load the model, report it
            return None

    def _count_tokens(self, width: int, height: int) -> int | None:
        if self._processor is None:
            return None
        from mmspec.app.modeling.picture_size import count_visual_tokens

        return count_visual_tokens(self._processor, width, height, self.config.max_pixels)

    def _start(self) -> None:
        """Connect to the cluster, or start Ray on this machine.

        Raises:
            UsageError: neither is possible, or a node lacks mmspec.
        """
        import ray

        if not ray.is_initialized():
            try:
                local = {} if self.config.ray else {"include_dashboard": False}
                ray.init(
                    address=self.config.ray or None, logging_level=logging.ERROR, log_to_driver=False, **local
                )  # what workers print stays in the folder of Ray's session
            except (ConnectionError, OSError, ValueError, RuntimeError) as error:
                raise UsageError(f"--ray {self.config.ray or ''}: {one_line(error)}") from error
            self.has_started_ray = True
        if not self.has_started_ray or self.config.ray or "RAY_ADDRESS" in os.environ:  # else all are this machine
            check_nodes()
        quiet_loggers()

    def results(self, stop: GracefulStop, on_decoded: Callable[[Item, Media], None]) -> Results:
        import ray

        task = next(self._groups, None)
        if task is None:  # Ray was not started
            return
        starting = {one.ready.remote(): one for one in self._actors() for _ in range(TASKS_PER_ACTOR)}
        running: dict[Any, Any] = {}
        while running or task is not None:
            waited_for = [*running, *(() if task is None else starting)]  # not for actors that are not needed
            done, _ = ray.wait(waited_for, num_returns=1, timeout=WAIT_S)
            for reference in done:
                actor = running.pop(reference, None) or starting.pop(reference)
                yield from ray.get(reference)
                if task is not None:
                    running[actor.caption.remote(task)] = actor
                    task = next(self._groups, None)
            if stop.signal:
                return

    def _actors(self) -> list[Any]:
        """An actor for each GPU of the cluster, or each core if there is none. A killed one is replaced."""
        import ray

        kind = "GPU" if ray.cluster_resources().get("GPU") and self.config.device in ("auto", "cuda") else "CPU"
        resources = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_cpus": 1}
        number = self.config.actors or int(ray.cluster_resources().get(kind, 0)) or 1
        kept = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": TASKS_PER_ACTOR}
        actor = ray.remote(**kept, **resources)(CaptionWorker)
        return [actor.remote(self.config, os.getcwd()) for _ in range(number)]


class CaptionWorker:
    """The model in a process of Ray. Imports nothing of Ray."""

    def __init__(self, config: CaptionConfig, folder: str) -> None:
        """Load the model.

        Args:
            folder: the one that relative paths belong to; entered where it exists. Elsewhere the model and the
                drafter are looked for from there.
        """
        from mmspec.app.caption.command import build_captioner
        from mmspec.app.cli.arguments import hide_progress_bars

        located = config
        if os.path.isdir(folder):
            os.chdir(folder)
        else:
            model, drafter = (_found_from(folder, name) for name in (config.model, config.drafter))
            located = replace(config, model=model, drafter=drafter)
        hide_progress_bars(False)
        self._config, self._decoders, self._lock = config, DecoderPool(), threading.Lock()
        self._captioner = RowCaptioner(config, build_captioner(located, ProcessInfo()))

    def ready(self) -> list[tuple[list[Row], list[Item]]]:
        """No results, once the model is loaded."""
        return []

    def caption(self, group: list[list[Item]]) -> list[tuple[list[Row], list[Item]]]:
        """The rows of batches about the same pictures, and what of their items an output needs."""
        decoded = list(decode_batches([group], self._config, self._decoders))
        with self._lock:
            rows = [self._captioner.caption_rows(batch) for batch in decoded]
        items = [[item for item, _ in batch] for batch in decoded]
        if not self._config.stores_pictures:
            items = [[replace(item, content=None) for item in batch] for batch in items]
        return list(zip(rows, items, strict=True))


def _found_from(folder: str, name: str) -> str:
    """The absolute path of a folder named from `folder`; a name of something else as it is."""
    path = os.path.abspath(os.path.join(folder, name))
    return path if os.path.isdir(path) else name


def check_nodes() -> None:
    """Refuse a cluster with a node that lacks mmspec or has another version of it, before work begins.

    Raises:
        UsageError: there is such a node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def version() -> str:
        from mmspec.app.caption.ray_job import CaptionWorker
        from mmspec.app.versions import mmspec_version

        assert CaptionWorker is not None
        return mmspec_version()

    task = ray.remote(num_cpus=0, max_retries=0)(version)
    for node in (node for node in ray.nodes() if node["Alive"]):
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        name = node["NodeManagerAddress"]
        try:
            found = ray.get(task.options(scheduling_strategy=strategy).remote(), timeout=PREFLIGHT_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            reason = one_line(error.cause if getattr(error, "cause", None) else error)
            raise UsageError(
                f"the node {name} cannot run mmspec ({reason}): install the same version there with its extra, as "
                "pip install -e '.[ray]' in a clone does"
            ) from error
        if found != mmspec_version():
            raise UsageError(
                f"the node {name} has mmspec {found}, this process {mmspec_version()}: install one version"
            )


def _explain(error: Exception) -> Exception:
    """A usage error that was raised in a worker, else one line about the failure."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UsageError):
            return UsageError(str(cause))
        cause = getattr(cause, "cause", None) or cause.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next((line for line in reversed(lines) if "UsageError: " in line), None)
    if named:
        return UsageError(named.partition("UsageError: ")[2])
    return UsageError(f"Ray: {one_line(error, 600)}; run the same command again, finished rows are skipped")
