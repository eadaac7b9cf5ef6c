"""Train a draft head for a model and use it.

    python examples/train_head.py [FOLDER [STEPS [MODEL [PATH ...]]]]

Without arguments: the bundled toy model and example drawings, no download. A head that pays needs 400 steps and more;
the 40 of this script show that everything fits together.
"""

import sys

from PIL import Image

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.modeling.chat import build_inputs
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.examples import EXAMPLES_FOLDER, list_example_files

folder, steps, target = [*sys.argv[1:4], *["run", "40", "scenes"][len(sys.argv[1:4]) :]]
data = ["--data", *(sys.argv[4:] or [str(EXAMPLES_FOLDER)])]
options = ["--steps", steps, "--batch-size", "8", "--max-new-tokens", "60", "--evaluate", "2"]
code = main(["train", "--target", target, "--drafter", "flash", *data, *options, "--out", folder])  # resumes
if code:
    sys.exit(code)

model, processor = load_model(target)
mmspec.patch(model, drafter=f"{folder}/flash", processor=processor)
image = Image.open(sys.argv[4] if sys.argv[4:] else list_example_files()[0]).convert("RGB")
inputs = build_inputs(model, processor, [image], ["Describe the image."])
print(mmspec.compare(model, inputs, repeats=2, max_new_tokens=60))
