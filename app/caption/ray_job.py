"""`mmspec caption --ray`: the same job on Ray Data. Tasks plan and decode, actors caption, this process writes.

The only writer is this process, through the same outputs as a job without Ray: a row counts when it is durable there.
Whatever is killed, what was not written is captioned by the next run; what Ray repeats is written once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.executor import Results
from mmspec.app.caption.job import CaptionJob
from mmspec.app.caption.plan import RowPlan
from mmspec.app.caption.progress import print_stderr
from mmspec.app.caption.ray_messages import quiet_loggers, ray_messages_in_file
from mmspec.app.caption.ray_stages import (
    COLUMN,
    CaptionedBatch,
    CaptionStage,
    EndOfPlan,
    absolute_paths,
    decode_stage,
    frame,
    plan_job,
)
from mmspec.app.caption.report import JobReport
from mmspec.app.caption.rows import CaptionModel
from mmspec.app.caption.stop import GracefulStop
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.images import Media
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item
from mmspec.app.io.output import Finished, Output
from mmspec.app.io.tables import needs_extra
from mmspec.app.versions import mmspec_version

PREFLIGHT_TIMEOUT_S = 120.0
"""Seconds that a node may take to import mmspec."""


def run_on_ray(config: CaptionConfig, output: Output, report: JobReport | None = None) -> int:
    """Run a job on a Ray cluster; returns and raises as `CaptionJob.run`. A report has no pictures: they stay there.

    Raises:
        UsageError: also if Ray cannot be reached, or a node lacks mmspec.
    """
    with needs_extra("--ray", "ray"):
        import ray
        import ray.data
    executor = RayExecutor(config, output)
    with ray_messages_in_file() as file:
        print_stderr(f"mmspec: starting Ray; its own messages are in {file}")
        try:
            return CaptionJob(config, output, executor, report).run()
        except ray.exceptions.RayError as error:
            raise _explain(error) from error
        finally:
            if executor.has_started_ray:
                ray.shutdown()


class RayExecutor:
    """Captions on a Ray cluster, batches as of one process. See `Executor`.

    Attributes:
        has_started_ray: it was not running in this process before.
    """

    def __init__(self, config: CaptionConfig, output: Output) -> None:
        """Set up; Ray starts in `prepare`."""
        self.config, self.output, self.process = config, output, ProcessInfo()
        self.model: CaptionModel | None = None
        self.has_started_ray = False
        self._end: EndOfPlan | None = None

    def prepare(self, plan: RowPlan, inputs: Inputs, finished: Mapping[str, Finished]) -> bool:
        import ray

        self._plan, plan.num_finished = plan, len(finished)
        plan.ids.update(finished)
        if not ray.is_initialized():
            try:
                local = {} if self.config.ray else {"include_dashboard": False}
                ray.init(
                    address=self.config.ray or None, logging_level=logging.ERROR, log_to_driver=False, **local
                )  # what workers print stays in the folder of Ray's session
            except (ConnectionError, OSError, ValueError, RuntimeError) as error:
                raise UsageError(f"--ray {self.config.ray or ''}: {one_line(error)}") from error
            self.has_started_ray = True
        is_cluster = not self.has_started_ray or self.config.ray or "RAY_ADDRESS" in os.environ
        if is_cluster:  # else all nodes are this machine
            check_nodes()
        quiet_loggers()
        self._dataset = build_dataset(self.config, self.output, dict(finished))
        return True

    def results(self, stop: GracefulStop, on_decoded: Callable[[Item, Media], None]) -> Results:
        number = 0
        for record in self._dataset.iter_rows():
            value = record[COLUMN]
            if isinstance(value, EndOfPlan):
                self._end, self._plan.num_finished = value, value.num_finished
            elif isinstance(value, CaptionedBatch):
                number += 1
                self._plan.ids.update(item.id for item in value.items)
                yield value.rows, value.items
            if stop.signal:
                return
        if self._end is None or number < self._end.num_batches:
            raise UsageError("Ray lost batches of this job: run the same command again, finished rows are skipped")

    def left_out(self) -> Sequence[str]:
        return self._end.left_out if self._end else ()


def uses_gpus(config: CaptionConfig) -> bool:
    """Whether the actors of a job are to have a GPU each."""
    import ray

    return bool(ray.cluster_resources().get("GPU", 0)) and config.device in ("auto", "cuda")


def build_dataset(config: CaptionConfig, output: Output, finished: dict[str, Any]) -> Any:
    """The dataset of captioned batches: plan -> decode (tasks) -> caption (actors)."""
    import ray

    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 1  # a batch is a block, so that it moves on at once and is repeated alone
    context.enable_progress_bars = False  # ours counts rows
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    worker_config = absolute_paths(config)
    plan = _plan_source(worker_config, output, ray.put(finished))
    num_gpus, num_cpus = (int(ray.cluster_resources().get(kind, 0)) for kind in ("GPU", "CPU"))
    accelerator = {"num_gpus": 1, "num_cpus": 0} if uses_gpus(config) else {"num_cpus": 1}
    num_actors = config.actors or (num_gpus if "num_gpus" in accelerator else num_cpus) or 1
    # Without GPUs the actors need the processors: a worker of Ray takes two seconds of one to start.
    num_decoders = num_cpus if "num_gpus" in accelerator else (num_cpus + 1) // 2
    decoders = ray.data.TaskPoolStrategy(size=max(1, num_decoders))
    pool = ray.data.ActorPoolStrategy(
        min_size=1, initial_size=num_actors, max_size=num_actors, max_tasks_in_flight_per_actor=2
    )
    # Tasks claim no processor: actors may have claimed all, and decoding must go on beside them.
    dataset = ray.data.read_datasource(plan, num_cpus=0)
    whole: dict[str, Any] = {"batch_size": None, "batch_format": "pandas"}
    dataset = dataset.map_batches(
        decode_stage, fn_kwargs={"config": worker_config}, num_cpus=0, compute=decoders, **whole
    )
    return dataset.map_batches(
        CaptionStage, fn_constructor_kwargs={"config": config}, compute=pool, **accelerator, **whole
    )


def _plan_source(config: CaptionConfig, output: Output, finished: Any) -> Any:
    """A datasource of one task that plans the job and streams its batches."""
    import ray
    from ray.data.block import BlockMetadata

    base, own_files = output.base.absolute(), [file.absolute() for file in output.own_files()]

    def read() -> Iterator[Any]:
        for value in plan_job(config, base, own_files, ray.get(finished)):
            yield frame([value])

    class PlanSource(ray.data.Datasource):
        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, *args: Any, **options: Any) -> list[Any]:
            metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [ray.data.ReadTask(read, metadata)]

    return PlanSource()


def check_nodes() -> None:
    """Refuse a cluster with a node that lacks mmspec or has another version of it, before work begins.

    Raises:
        UsageError: there is such a node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def version() -> str:
        from mmspec.app.caption.ray_stages import plan_job
        from mmspec.app.versions import mmspec_version

        assert plan_job is not None
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
