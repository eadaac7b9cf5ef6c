"""A drafter of your own: it proposes the token that followed the current one last time. It cannot change the output."""

from PIL import Image

import mmspec
from mmspec.app.modeling.chat import build_inputs
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.examples import list_example_files
from mmspec.engine.tree import build_tree
from mmspec.interfaces import DrafterRequirements


class LastBigram:
    name = "bigram"
    requirements = DrafterRequirements()  # no hidden states, no top-k ids
    vocab_size = None  # any target

    def begin(self, prompt):  # the state of one call: per row the successors and the last token
        rows = prompt.input_ids.masked_fill(~prompt.attention_mask, -1).tolist()
        return [{a: b for a, b in zip(row, row[1:]) if b not in prompt.banned_ids} | {"last": row[-1]} for row in rows]

    def propose(self, state, max_nodes, active):
        found = [row.get(row["last"]) if is_active else None for row, is_active in zip(state, active)]
        return build_tree([[] if token is None else [(token, 0, 0.5)] for token in found])  # token, parent, probability

    def observe(self, state, result, hidden_states):
        for successors, tokens in zip(state, result.emitted_ids):
            for token in tokens:
                successors[successors["last"]] = token
                successors["last"] = token


model, processor = load_model("scenes")
image = Image.open(list_example_files()[0]).convert("RGB")
inputs = build_inputs(model, processor, [image], ["Describe the image."])
mmspec.patch(model, drafter=LastBigram(), tree_size=16)  # a fixed size: every draft is verified
print(mmspec.compare(model, inputs, repeats=2, max_new_tokens=60))  # identical?, tokens per forward, speed
