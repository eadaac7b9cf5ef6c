"""Captions as a step of a Ray Data pipeline. Needs the extra `ray`: pip install '.[ray]' in the clone.

    python examples/ray_pipeline.py [OUT [MODEL [FOLDER]]]

Without arguments: the bundled toy model on its own images, no download.
"""

import sys

import ray

from mmspec.app.scenes.examples import list_example_files
from mmspec.ray import CaptionActor

out, model = [*sys.argv[1:3], *["captions", "scenes"][len(sys.argv[1:3]) :]]
paths = sys.argv[3:] or [str(file) for file in list_example_files() if file.suffix == ".png"]

dataset = ray.data.read_images(paths, mode="RGB", include_paths=True)
dataset = dataset.map_batches(
    CaptionActor,
    fn_constructor_kwargs={"model": model, "max_new_tokens": 64},
    batch_size=16,
    num_gpus=1 if "GPU" in ray.cluster_resources() else 0,
    compute=ray.data.ActorPoolStrategy(min_size=1, max_size=4),
)
dataset.drop_columns(["image"]).write_parquet(out)
for row in ray.data.read_parquet(out).take(3):
    print(row["path"], row["error"] or row["caption"], sep="\t")
