"""A task of lmms-eval with plain `generate` and with mmspec: in float32 the answers, so the scores, are the same.

    python examples/lmms_eval_scores.py [MODEL TASK]      # pip install lmms-eval; downloads both

Without arguments: questions about generated scenes to the bundled toy model, no download.
"""

import sys
from itertools import islice

from lmms_eval.api.instance import Instance

from mmspec.app.lmms_eval_model import MmspecHf
from research.scenes.tasks import generate_requests


def answer_scenes(drafter, count=4):
    """Answers about `count` scenes, asked for as lmms-eval asks."""
    documents = list(islice(generate_requests("answer", 50_200_000), count))
    model = MmspecHf(pretrained="scenes", drafter=drafter)
    model.task_dict = {"scenes": {"test": documents}}
    options = {"max_new_tokens": 24}
    places = [{"task": "scenes", "doc_id": number, "repeats": 1} for number in range(count)]
    requests = [
        Instance("generate_until", (one.question, options, lambda doc: list(doc.images), i, "scenes", "test"), i, place)
        for i, (one, place) in enumerate(zip(documents, places))
    ]
    return model.generate_until(requests)


for drafter in ("plain", "auto"):
    if sys.argv[2:]:
        from lmms_eval.evaluator import simple_evaluate

        arguments = f"pretrained={sys.argv[1]},drafter={drafter}"
        print(drafter, simple_evaluate("mmspec_hf", arguments, tasks=[sys.argv[2]], batch_size=1)["results"])
    else:
        print(drafter, answer_scenes(drafter))
