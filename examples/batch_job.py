"""A caption job from Python: what `mmspec caption` does, resumed when the script is run again.

    python examples/batch_job.py [OUT.jsonl [MODEL [PATH ...]]]

Without arguments: the bundled toy model on its own images, no download. PATH: images, folders, archives, lists.
"""

import json
import sys
from pathlib import Path

from mmspec.app.caption.command import build_captioner, build_output
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.executor import LocalExecutor
from mmspec.app.caption.job import CaptionJob
from mmspec.app.scenes.examples import EXAMPLES_FOLDER

out, model = [*sys.argv[1:3], *["captions.jsonl", "scenes"][len(sys.argv[1:3]) :]]
paths = sys.argv[3:] or [f"{EXAMPLES_FOLDER}/*.png"]
config = CaptionConfig(tuple(paths), model, out, max_new_tokens=100, batch_size=4)
process = ProcessInfo()  # one process; ProcessInfo.from_env(os.environ) under torchrun
captioner = build_captioner(config, process)
try:
    code = CaptionJob(config, build_output(config, process), LocalExecutor(config, lambda: captioner, process)).run()
finally:
    captioner.close()

for line in Path(out).read_text(encoding="utf-8").splitlines():
    row = json.loads(line)
    print(row["file_name"], row.get("caption") or row["error"], sep="\t")
sys.exit(code)  # 1 if some rows failed
