"""The smallest script: describe images with `generate`, and with the same call patched.

    python examples/script.py [MODEL [IMAGE ...]]

Without arguments: the bundled toy model on its own images, no download.
"""

import sys

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import mmspec
from mmspec.app.scenes import WEIGHTS_FOLDER
from mmspec.app.scenes.examples import list_example_files

name = sys.argv[1] if sys.argv[1:] else WEIGHTS_FOLDER
files = sys.argv[2:] or [file for file in list_example_files() if file.suffix == ".png"][:2]
model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto", device_map="auto")
processor = AutoProcessor.from_pretrained(name)
mmspec.patch(model, processor=processor)  # the only line that is new

chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Describe the image."}]}]
prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
for file in files:
    inputs = processor(images=Image.open(file).convert("RGB"), text=prompt, return_tensors="pt")
    inputs = inputs.to(model.device, model.dtype)
    output = model.generate(**inputs, max_new_tokens=100)
    answer = output[0, inputs["input_ids"].shape[1] :]
    print(f"{file}: {processor.decode(answer, skip_special_tokens=True)}")

with mmspec.disabled(model):  # plain generate: the same tokens in float32
    print("identical to plain generate:", output.equal(model.generate(**inputs, max_new_tokens=100)))
print(mmspec.stats(model))  # tokens per forward, tokens/s, acceptance
