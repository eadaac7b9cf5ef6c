"""Train an EAGLE-3 head, write it in vLLM's layout, and print the command that serves it.

    python examples/serve_head.py [FOLDER [STEPS [MODEL [PATH ...]]]]

Without arguments: the bundled toy model and example drawings, no download. A head that pays
needs a thousand steps and more; the 40 of this script show that everything fits together.
"""

import sys
from pathlib import Path

from mmspec.app.cli.main import main
from mmspec.app.scenes import WEIGHTS_FOLDER
from mmspec.app.scenes.examples import EXAMPLES_FOLDER

folder, steps, target = [*sys.argv[1:4], *["run", "40", "scenes"][len(sys.argv[1:4]) :]]
data = ["--data", *(sys.argv[4:] or [str(EXAMPLES_FOLDER)])]
options = ["--steps", steps, "--batch-size", "8", "--max-new-tokens", "60", "--evaluate", "2"]
served = str(Path(folder, "served"))
code = main(["train", "--target", target, "--drafter", "eagle3", *data, *options, "--out", folder])
code = code or main(["export", folder, "--format", "vllm", "--out", served])
if code:
    sys.exit(code)

method = f'{{"method": "eagle3", "model": "{served}", "num_speculative_tokens": 3}}'
print(f"vllm serve {WEIGHTS_FOLDER if target == 'scenes' else target} --speculative-config '{method}'")
