"""Answers that are JSON of a schema, by xgrammar (`pip install '.[json]'`), drafted; the same as plain `generate`.

    python examples/json_answers.py [MODEL [IMAGE ...]]

Whole jobs: `mmspec caption photos/ --model MODEL --json-schema schema.json --out captions.parquet`.
"""

import json
import sys

import xgrammar
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from xgrammar.contrib.hf import LogitsProcessor

import mmspec
from mmspec.app.scenes import WEIGHTS_FOLDER
from mmspec.app.scenes.examples import list_example_files

SCHEMA = {"type": "object", "properties": {"color": {"enum": ["red", "green", "blue"]}, "count": {"enum": [1, 2, 3]}}}
SCHEMA |= {"required": ["color", "count"], "additionalProperties": False}
name = sys.argv[1] if sys.argv[1:] else WEIGHTS_FOLDER
files = sys.argv[2:] or [file for file in list_example_files() if file.suffix == ".png"][:2]
model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto", device_map="auto")
processor = AutoProcessor.from_pretrained(name)
mmspec.patch(model, processor=processor)

info = xgrammar.TokenizerInfo.from_huggingface(processor.tokenizer, vocab_size=model.config.text_config.vocab_size)
grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Describe the image."}]}]
prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
for file in files:
    inputs = processor(images=Image.open(file).convert("RGB"), text=prompt, return_tensors="pt")
    inputs = inputs.to(model.device, model.dtype)
    output = model.generate(**inputs, max_new_tokens=60, logits_processor=[LogitsProcessor(grammar)])
    print(json.loads(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)))
    with mmspec.disabled(model):  # a new processor for each call
        plain = model.generate(**inputs, max_new_tokens=60, logits_processor=[LogitsProcessor(grammar)])
    print("identical to plain generate:", output.equal(plain))
