"""`mmspec caption --ray` and `mmspec.ray.CaptionActor` on a Ray instance of this machine."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_app_inputs import picture, write_tar

from mmspec.app.caption import executor, ray_job
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.pending import is_pending
from mmspec.app.caption.plan import RowPlan
from mmspec.app.caption.ray_job import CaptionWorker, RayExecutor
from mmspec.app.cli.main import main
from mmspec.app.io import jsonl
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item
from mmspec.app.io.output import Finished
from mmspec.hints import install_hint
from mmspec.ray import CaptionActor
from research.synthetic_images import write_images

VARYING = ("seconds", "ttft_s", "n_rounds", "tau", "drafter")


def essence(path: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, path.read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in VARYING} for row in rows]


def test_ray_is_refused_with_one_line_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    args = ["caption", str(tmp_path), "--model", "tiny", "--out", str(tmp_path / "o.jsonl"), "--ray"]
    assert main(args) == 2
    assert capsys.readouterr().err.endswith(f"{install_hint('ray')}\n")
    assert main([*args, "--shard", "0/2"]) == 2 and "leave --shard away" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(args) == 2 and "start one process" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_node_without_the_folder_of_the_job_finds_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded by its absolute path; rows name it as the job does. Names of the hub stay."""
    loaded = list[CaptionConfig]()
    monkeypatch.setattr("mmspec.app.caption.command.build_captioner", lambda config, process: loaded.append(config))
    monkeypatch.setattr(ray_job, "RowCaptioner", lambda config, model: config)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "m").mkdir(parents=True)
    for model, expected in (("../models/m", str(tmp_path / "models" / "m")), ("owner/name", "owner/name")):
        config = CaptionConfig((".",), model, drafter="none")
        worker: Any = CaptionWorker(config, str(tmp_path / "gone"))
        assert (loaded[-1].model, loaded[-1].drafter) == (expected, "none") and worker._captioner.model == model
    assert os.getcwd() == str(tmp_path)


def plan_tasks(
    config: CaptionConfig, base: Path, finished: dict[str, Finished] | None = None
) -> tuple[list[list[list[Item]]], RowPlan]:
    """What a job sends to actors, and its plan; without Ray."""
    executor, rows = RayExecutor(config), finished or {}
    plan = RowPlan(config, ProcessInfo(), lambda item: is_pending(item, rows, config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayExecutor, "_start", lambda self: None)
        executor.prepare(plan, Inputs(config.paths, config.source_options(base)), rows)
    return list(executor._groups), plan


def write_tasks(out: Path, tasks: list[list[list[Item]]], config: CaptionConfig) -> list[list[int]]:
    """What an actor makes of a plan, called here without Ray; rows of each batch of each task."""
    worker, rows, sizes = CaptionWorker(config, os.getcwd()), list[Any](), []
    for task in tasks:
        found = worker.caption(pickle.loads(pickle.dumps(task)))
        assert all([row["id"] for row in batch] == [item.id for item in items] for batch, items in found)
        rows += [row for batch, _ in found for row in batch]
        sizes.append([len(batch) for batch, _ in found])
    out.write_bytes(b"".join(map(jsonl.encode_row, rows)))
    return sizes


def test_batches_about_the_same_pictures_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture is decoded once for all its prompts, and captions are those of a job of one process."""
    write_images(tmp_path / "p", 5)
    (tmp_path / "p" / "broken.png").write_bytes(b"no picture")
    (tmp_path / "q.txt").write_text("one ?\ntwo ?\nthree ?\n")
    out = tmp_path / "out.jsonl"
    args = ["caption", str(tmp_path / "p"), "--model", "tiny", "--out", str(out), "--max-new-tokens", "6"]
    assert main([*args, "--prompts", str(tmp_path / "q.txt"), "--batch-size", "4", "--no-progress"]) == 1
    prompts = ("one ?", "two ?", "three ?")
    config = CaptionConfig((str(tmp_path / "p"),), "tiny", max_new_tokens=6, prompts=prompts, batch_size=4)
    decoded: list[str] = []
    decode = executor.decode_item
    monkeypatch.setattr(executor, "decode_item", lambda item, *a: decoded.append(item.path.name) or decode(item, *a))
    tasks, _ = plan_tasks(config, tmp_path)
    assert write_tasks(tmp_path / "tasks.jsonl", tasks, config) == [[4, 4, 4], [2, 2, 2]]
    first = essence(tmp_path / "tasks.jsonl")
    assert sorted(first, key=lambda row: row["index"]) == essence(out) and len(decoded) == 6

    finished = {row["id"]: Finished(row["prompt_sha1"], False, False) for row in first[:5]}  # the job was killed
    again, plan = plan_tasks(config, tmp_path, finished)
    assert [len(task) for task in again] == [2, 3] and (plan.num_finished, len(plan.ids)) == (5, 18)


def test_an_actor_gives_the_rows_of_a_job_of_one_process(tmp_path: Path) -> None:
    members = {"1.png": picture(), "2.png": b"broken", "3.png": picture(50), "3.txt": b"what is it ?"}
    shard, out = write_tar(tmp_path / "x.tar", members), tmp_path / "out.jsonl"
    args = ["caption", str(shard), "--model", "tiny", "--out", str(out), "--max-new-tokens", "6", "--no-progress"]
    assert main([*args, "--prompt-column", "txt", "--batch-size", "2"]) == 1
    config = CaptionConfig((str(shard),), "tiny", max_new_tokens=6, prompt_column="txt", batch_size=2)
    assert write_tasks(tmp_path / "tasks.jsonl", plan_tasks(config, tmp_path)[0], config) == [[2], [1]]
    assert essence(tmp_path / "tasks.jsonl") == essence(out)


def test_the_driver_does_not_import_torch(tmp_path: Path) -> None:
    """Importing it takes seconds."""
    write_images(tmp_path / "p", 2)
    code = """
import sys
from pathlib import Path
from mmspec.app.caption import command, ray_job
from mmspec.app.caption.config import CaptionConfig
from mmspec.app.caption.plan import RowPlan
from mmspec.app.io.inputs import Inputs
config = CaptionConfig((sys.argv[1],), "tiny", out=sys.argv[1] + ".jsonl")
ray_job.RayExecutor._start = lambda self: None
executor, plan = ray_job.RayExecutor(config), RowPlan(config, ray_job.ProcessInfo(), lambda item: True)
assert executor.prepare(plan, Inputs(config.paths, config.source_options(Path())), {})
command.build_output(config, ray_job.ProcessInfo())
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "p")], check=True, timeout=120)


def test_what_ray_prints_goes_to_a_file_and_our_lines_do_not() -> None:
    code = """
import logging, os, sys
logging.getLogger("ray.data").addHandler(handler := logging.StreamHandler())
from mmspec.app.caption.progress import print_stderr
from mmspec.app.caption.ray_messages import quiet_loggers, ray_messages_in_file
with ray_messages_in_file() as file:
    os.system("echo native >&2")
    late = logging.StreamHandler()
    logging.getLogger("ray.late").addHandler(late)
    quiet_loggers()
    logging.getLogger("ray.data").error("early")
    logging.getLogger("ray.late").error("late")
    print_stderr("ours")
os.write(2, b"after\\n")
print(file.read_text().split())
with ray_messages_in_file() as other:
    pass
print(other.exists())
file.unlink()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == "ours\nafter\n" and done.stdout == "['native', 'early', 'late']\nFalse\n"


def test_the_public_actor_captions_arrays_and_bytes() -> None:
    actor = CaptionActor("tiny", max_new_tokens=6, prompt_column="q")
    array = np.asarray(Image.open(__import__("io").BytesIO(picture())))
    cells = np.empty(5, object)
    cells[:] = [array, picture(), {"bytes": picture(), "path": None}, b"broken", "/etc/hosts"]
    batch = {"image": cells, "q": ["a", "a", "a", "a", None], "key": np.arange(5)}
    found = actor(batch)
    assert list(found) == ["image", "q", "key", "caption", "error", "n_new_tokens", "tau", "finish_reason"]
    assert len(set(found["caption"][:3])) == 1 and found["caption"][0] and list(found["error"][:3]) == [""] * 3
    assert [text.split(":")[0] for text in found["error"][3:]] == ["NotAnImage"] * 2
    assert list(found["caption"][3:]) == [""] * 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="optional: mmspec[ray]")
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jsonl", "parquet", "webdataset"])
def test_a_job_of_two_actors_equals_one_process(cluster: None, tmp_path: Path, name: str) -> None:
    write_images(tmp_path / "p", 30)
    (tmp_path / "p" / "broken.png").write_text("no picture")
    args = ["caption", str(tmp_path / "p"), "--model", "tiny", "--max-new-tokens", "8", "--no-progress"]
    out = tmp_path / ("out.jsonl" if name == "jsonl" else "out")
    assert main([*args, "--out", str(out), "--format", name, "--ray", "--actors", "2"]) == 1
    if name == "jsonl":
        assert main([*args, "--out", str(tmp_path / "one.jsonl")]) == 1
        assert essence(out) == essence(tmp_path / "one.jsonl")
        lines = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(lines[:9]) + lines[9][:40])
        assert main([*args, "--out", str(out), "--ray"]) == 1
        assert essence(out) == essence(tmp_path / "one.jsonl")
    elif name == "parquet":
        import pyarrow.parquet as pq

        assert sorted(pq.read_table(next(out.glob("*.parquet")))["index"].to_pylist()) == list(range(31))
    else:
        import tarfile

        with tarfile.open(next(out.glob("*.tar"))) as archive:
            assert len(archive.getnames()) == 90


@pytest.mark.slow
def test_a_model_that_does_not_load_is_one_line(cluster: None, tmp_path: Path, capfd: Any) -> None:
    write_images(tmp_path / "p", 2)
    args = ["caption", str(tmp_path / "p"), "--model", "no/such/model", "--out", str(tmp_path / "o.jsonl"), "--ray"]
    assert main(args) == 2
    assert "mmspec: error: --model no/such/model: no such folder" in capfd.readouterr().err


@pytest.mark.slow
def test_the_documented_pipeline(cluster: None, tmp_path: Path) -> None:
    import ray

    write_images(tmp_path / "photos", 6)
    dataset = ray.data.read_images(str(tmp_path / "photos"), mode="RGB", include_paths=True)
    dataset = dataset.map_batches(
        CaptionActor,
        fn_constructor_kwargs={"model": "tiny", "max_new_tokens": 6},
        batch_size=4,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=2),
    )
    dataset.drop_columns(["image"]).write_parquet(str(tmp_path / "captions"))
    found = ray.data.read_parquet(str(tmp_path / "captions")).take_all()
    assert len(found) == 6 and all(row["caption"] and row["error"] == "" for row in found)
