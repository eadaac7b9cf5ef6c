"""A chat with turns about one image. The drafter also drafts from the earlier answers, which are in the prompt.

    python examples/chat.py [MODEL [IMAGE [QUESTION ...]]]

Without arguments: the bundled toy model on one of its own images, no download.
"""

import sys

from PIL import Image

import mmspec
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.examples import list_example_files

name = sys.argv[1] if sys.argv[1:] else "scenes"
image = Image.open(sys.argv[2] if sys.argv[2:] else list_example_files()[0]).convert("RGB")
questions = sys.argv[3:] or ["Describe the image.", "How many things are there?", "Describe the image."]

model, processor = load_model(name)  # a hub id, a folder, or the bundled model
mmspec.patch(model, processor=processor)

messages = []
for number, question in enumerate(questions):
    content = [{"type": "text", "text": question}]
    messages.append({"role": "user", "content": content if number else [{"type": "image"}, *content]})
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(images=image, text=prompt, return_tensors="pt").to(model.device, model.dtype)
    output = model.generate(**inputs, max_new_tokens=120)
    answer = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    print(f"> {question}\n{answer}\n  ({mmspec.stats(model, last=True).tau:.2f} tokens per forward)")
