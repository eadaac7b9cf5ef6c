"""How prompts are put before a model and how tokens are chosen: templates, thinking, sampling, size of pictures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from input_table import line
from PIL import Image
from test_app_inputs import picture, read
from transformers import GenerationConfig

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.io.content import Pictures
from mmspec.app.io.images import Video
from mmspec.app.modeling import load
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.chat import build_inputs, check_chat
from mmspec.app.modeling.picture_size import image_limits, shrink, shrink_media
from mmspec.app.modeling.prompt_format import ChatFormat, describe_prompt_format, strip_media_tokens, task_prompt
from mmspec.app.modeling.random_models import random_model
from mmspec.app.modeling.sampling import Sampling
from mmspec.app.modeling.thinking import opens_thoughts, without_thoughts
from research.bench.measure import Contestant, run_once
from research.synthetic_images import write_images

QWEN25_VL = {"do_sample": True, "top_k": 1, "top_p": 0.001, "temperature": 0.1, "repetition_penalty": 1.05}
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }} "
    "{% endfor %}{% endfor %}assistant : {% if enable_thinking is defined and not enable_thinking %}quiet "
    "{% else %}loud {% endif %}"
)


@pytest.fixture
def captioner() -> Captioner:
    model, processor = random_model("tiny")
    return Captioner(model.eval(), processor, max_new_tokens=12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model whose generation config is that of Qwen2.5-VL."""
    folder = tmp_path_factory.mktemp("model")
    model, processor = random_model("tiny")
    model.generation_config.update(**QWEN25_VL)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_images(folder, 4)
    return folder


def caption(*args: object) -> int:
    return main(["caption", *map(str, args), "--no-progress"])


def prompt_text(captioner: Captioner, question: str, **options: Any) -> str:
    inputs = build_inputs(
        captioner.model, captioner.processor, [Image.new("RGB", (40, 30))], [question], chat=ChatFormat(**options)
    )
    text: str = captioner.processor.tokenizer.decode(inputs["input_ids"][0])
    return " ".join(text.replace("<image>", "").split())


# --- sampling


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "own",
    [QWEN25_VL, {"top_k": 1}, {"top_p": 0.001}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.01}],
)
def test_a_temperature_samples_whatever_the_checkpoint_sets(captioner: Captioner, own: dict[str, Any]) -> None:
    captioner.model.generation_config.update(**own)
    captioner.sampling = Sampling(1.5)
    mmspec.patch(captioner.model, "lookup", processor=captioner.processor)
    image = Image.new("RGB", (40, 30), "red")
    texts = {captioner.caption([image], ["a"], seed)[0].caption for seed in range(3)}
    assert len(texts) == 3
    contestant = Contestant("mmspec", captioner.model)
    inputs = captioner.build_inputs([image], ["a"])
    runs = {tuple(run_once(contestant, inputs, 12, 1.5, seed).output_ids[0].tolist()) for seed in range(3)}
    assert len(runs) == 3
    assert any("not used" in line for line in captioner.describe())


def test_options_are_used_as_generate_uses_them(captioner: Captioner) -> None:
    own = GenerationConfig(top_k=7, top_p=0.8, repetition_penalty=1.05, do_sample=True)
    assert Sampling(0.7).generation_kwargs(own) == {"do_sample": True, "temperature": 0.7}
    assert Sampling(0.7).describe(own) == [
        "of the model's own generation config: top_k 7, top_p 0.8, repetition_penalty 1.05"
    ]
    assert Sampling().describe(own) == ["of the model's own generation config: repetition_penalty 1.05"]
    assert Sampling().describe(GenerationConfig()) == [] == Sampling(1.0).describe(GenerationConfig())
    chosen = Sampling(0.7, top_k=1, top_p=0.5, repetition_penalty=1.2)
    kwargs = chosen.generation_kwargs(GenerationConfig(**QWEN25_VL))
    assert kwargs == {"do_sample": True, "temperature": 0.7, "top_k": 1, "top_p": 0.5, "repetition_penalty": 1.2}
    assert chosen.settings(own) == {"top_p": 0.5, "top_k": 1, "repetition_penalty": 1.2}
    assert Sampling(0.7).settings(GenerationConfig(**QWEN25_VL)) == {
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.05,
    }
    model, image = captioner.model, Image.new("RGB", (40, 30), "red")
    captioner.sampling = Sampling(1.5, top_k=5, repetition_penalty=1.3)
    inputs = captioner.build_inputs([image], ["a"])
    torch.manual_seed(3)
    expected = model.generate(
        **inputs, max_new_tokens=12, do_sample=True, temperature=1.5, top_k=5, repetition_penalty=1.3
    )
    mmspec.patch(model, "lookup", processor=captioner.processor)
    found = captioner.caption([image], ["a"], 3)[0]
    text = captioner.processor.tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert found.caption == text.strip()


def test_a_job_says_once_what_the_checkpoint_sets(saved: Path, pictures: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "o.jsonl"
    args = (pictures, "--model", saved, "--out", out, "--temperature", 1.5, "--max-new-tokens", 8, "--batch-size", 2)
    assert caption(*args) == 0
    err = capsys.readouterr().err
    assert err.count("top_k 1, top_p 0.001") == 1 and err.count("repetition_penalty 1.05") == 1
    one = [json.loads(line)["caption"] for line in out.read_text().splitlines()]
    assert caption(*args, "--seed", 9, "--overwrite") == 0
    assert one != [json.loads(line)["caption"] for line in out.read_text().splitlines()]
    assert caption(*args, "--seed", 9, "--top-k", 5) == 2  # other settings: not mixed
    assert "top_k None (now 5)" in capsys.readouterr().err


# --- templates


def test_thinking_is_off_where_the_template_can_switch_it(captioner: Captioner) -> None:
    captioner.processor.chat_template = THINKING_TEMPLATE
    assert prompt_text(captioner, "a").endswith("quiet")
    assert prompt_text(captioner, "a", template_kwargs={"enable_thinking": True}).endswith("loud")
    captioner.processor.chat_template = THINKING_TEMPLATE.replace("enable_thinking", "thinking")
    assert prompt_text(captioner, "a").endswith("quiet")
    with pytest.raises(UsageError, match="no variable 'enable_thinking'; it has thinking"):
        prompt_text(captioner, "a", template_kwargs={"enable_thinking": False})
    captioner.processor.chat_template = THINKING_TEMPLATE.replace("enable_thinking", "m.enable_thinking")
    with pytest.raises(UsageError, match="has no variable"):  # an attribute is no variable
        prompt_text(captioner, "a", template_kwargs={"enable_thinking": False})


def test_a_system_prompt_is_in_the_prompt_or_refused(captioner: Captioner) -> None:
    processor, chat = captioner.processor, ChatFormat(system_prompt="be brief")
    processor.chat_template = THINKING_TEMPLATE
    check_chat(processor, "M", None, chat)
    assert "system : be brief user : a" in prompt_text(captioner, "a", system_prompt="be brief")
    processor.chat_template = "{% for m in messages if m.role == 'user' %}<image>{{ m.content[-1].text }}{% endfor %}"
    with pytest.raises(UsageError, match="leaves it out"):
        check_chat(processor, "M", None, chat)
    processor.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(UsageError, match=r"refuses it .*System role not supported"):
        check_chat(processor, "M", None, chat)
    processor.chat_template = None
    check_chat(processor, "M", None, chat)
    assert prompt_text(captioner, "a", system_prompt="be brief").startswith("be brief user:")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<image>\nDescribe it.", "Describe it."),
        ("<image> Describe it.", "Describe it."),
        (" <image>\n\nDescribe it.\n", "Describe it."),
        ("Describe it.\n<image>", "Describe it."),
        ("<image>\n<image>\nDescribe it.", "<image>\nDescribe it."),
        ("the <image>", "the <image>"),
        ("Describe it. \n", "Describe it. \n"),
        ("<video>\nDescribe it.", "Describe it."),
    ],
)
def test_one_placeholder_of_a_data_set_is_left_out(captioner: Captioner, prompt: str, expected: str) -> None:
    assert strip_media_tokens(captioner.processor, prompt) == expected
    captioner.processor.image_token = "<|image_pad|>"
    assert strip_media_tokens(captioner.processor, prompt) == expected
    assert strip_media_tokens(captioner.processor, "<|image_pad|>Describe it.") == "Describe it."


def test_a_prompt_with_its_placeholder_gives_the_same_caption(captioner: Captioner) -> None:
    assert prompt_text(captioner, "<image>\nwhat is it ?") == prompt_text(captioner, "what is it ?")
    with pytest.raises(UsageError, match="must not contain <image>"):
        prompt_text(captioner, "<image><image> what ?")
    images = [Image.new("RGB", (40, 30)), Image.new("RGB", (30, 40))]
    rows = [
        build_inputs(captioner.model, captioner.processor, [images], [text])["input_ids"]
        for text in ("what ?", "<image>\n<image>\nwhat ?")
    ]
    assert torch.equal(*rows)


class PaliGemmaProcessor:
    """Stands for the processor of a family without a chat template, which receives the text as it is."""

    image_token = "<image>"

    def __init__(self, inner: Any) -> None:
        self.tokenizer, self.image_processor, self._inner = inner.tokenizer, inner.image_processor, inner
        self.texts: list[str] = []

    def __call__(self, text: list[str], **options: Any) -> Any:
        self.texts += text
        return self._inner(text=text, **options)


def test_a_family_of_tasks_gets_a_task(captioner: Captioner, tmp_path: Path, pictures: Path, capsys: Any) -> None:
    processor: Any = PaliGemmaProcessor(captioner.processor)
    build_inputs(captioner.model, processor, [Image.new("RGB", (40, 30))], ["caption en"])
    assert processor.texts == ["<image>caption en"] and describe_prompt_format(processor) is None
    assert task_prompt("paligemma") == "caption en" and task_prompt("llava") is None is task_prompt(None)
    with pytest.raises(UsageError, match="leave it out"):
        check_chat(processor, "M", None, ChatFormat(system_prompt="be brief"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "paligemma"}))
    caption(pictures, "--model", tmp_path)
    assert "--prompt 'caption en' is used" in capsys.readouterr().err
    caption(pictures, "--model", tmp_path, "--prompt", "detect cat")
    assert "caption en" not in capsys.readouterr().err


def test_an_unknown_family_without_a_template_is_said_to_get_llavas(captioner: Captioner) -> None:
    assert describe_prompt_format(captioner.processor) is None
    captioner.processor.chat_template = None
    unknown = type("OtherProcessor", (PaliGemmaProcessor,), {})(captioner.processor)
    assert "LLaVA-1.5" in (describe_prompt_format(unknown) or "")


# --- thinking


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n</think>\n\nA ball.", False, ("\n\nA ball.", True, False)),
        ("hm</think>A ball.", True, ("A ball.", True, False)),
        ("hm</think>A ball.", False, ("A ball.", True, False)),
        ("<think>hm", False, ("", True, True)),
        ("hm", True, ("", True, True)),
        ("A ball.<think>hm</think> Red.<think>so", False, ("A ball. Red.", True, True)),
        ("A ball.", False, ("A ball.", False, False)),
        ("◁think▷hm◁/think▷A ball.", False, ("A ball.", True, False)),
        ("<|channel>thought\nhm<channel|>A ball.", False, ("A ball.", True, False)),
        ("", True, ("", True, True)),
        ("", False, ("", False, False)),
    ],
)
def test_thoughts_are_no_part_of_an_answer(text: str, inside: bool, expected: tuple[str, bool, bool]) -> None:
    assert tuple(without_thoughts(text, inside)) == expected


def test_whether_a_prompt_opens_thoughts() -> None:
    assert opens_thoughts("<|im_start|>assistant\n<think>\n")
    assert not opens_thoughts("<think>\n\n</think>\n\n") and not opens_thoughts("say <think> ?\nassistant")


@pytest.mark.parametrize("is_special", [False, True])
def test_thoughts_are_never_a_caption(captioner: Captioner, is_special: bool) -> None:
    tokenizer, ids = captioner.processor.tokenizer, captioner.processor.tokenizer.convert_tokens_to_ids
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=is_special)
    words = tokenizer("a red ball", add_special_tokens=False).input_ids
    thoughts = [ids("<think>"), *words, ids("</think>")]
    assert captioner._finish_row([*thoughts, *words[:1], 2]) == (
        tokenizer.decode(words[:1]).strip(),
        len(thoughts) + 2,
        "eos",
    )
    assert (
        captioner._finish_row([*words, ids("</think>"), *words[:1], 2], thinks=True)[0]
        == tokenizer.decode(words[:1]).strip()
    )
    for cut in (thoughts[:-1], [ids("<think>")]):
        assert captioner._finish_row(cut)[::2] == ("", "thinking")
    assert captioner._finish_row(words, thinks=True)[::2] == ("", "thinking")
    captioner.stop = (tokenizer.decode(words[-1:]).strip(),)
    assert captioner._finish_row(thoughts)[2] == "thinking"  # a stop text among the thoughts


def test_an_output_cut_while_thinking_is_an_error_row(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmspec.app.modeling.thinking.TAGS", (("assistant:", "</think>"),))  # the end of the prompt
    out = tmp_path / "o.jsonl"
    assert caption(pictures, "--model", "tiny", "--out", out, "--max-new-tokens", 4) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["error"]["type"] for row in rows} == {"Thinking"} and {row["caption"] for row in rows} == {None}
    assert "raise --max-new-tokens" in rows[0]["error"]["message"]


# --- models that would need code of their repository


@pytest.mark.parametrize("file", ["config.json", "both"])
def test_code_of_a_repository_is_refused_in_our_own_words(
    file: str, tmp_path: Path, pictures: Path, capsys: Any
) -> None:
    config = {"model_type": "internvl_chat", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise AssertionError('this code was run')")
    if file == "both":
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "code.P"}}))
    assert caption(pictures, "--model", tmp_path) == 2
    err = capsys.readouterr().err
    assert "runs no code of repositories" in err and "trust_remote_code" not in err and len(err) < 320
    assert load._hint("OWNER/M", ValueError("pass `trust_remote_code=True`")).startswith("--model OWNER/M consists of")


# --- size of pictures


@pytest.mark.parametrize("size", [(300, 200), (1, 5000), (5000, 1), (71, 71)])
@pytest.mark.parametrize("limit", [1, 3, 5000, 60_000])
def test_pictures_are_shrunk_and_keep_their_aspect(size: tuple[int, int], limit: int) -> None:
    image = Image.new("RGB", size, "red")
    small = shrink(image, limit)
    assert small.width * small.height <= limit and min(small.size) >= 1
    if size[0] * size[1] <= limit:
        assert small is image
    elif limit >= 5000 and min(size) > 1:
        assert small.width / small.height == pytest.approx(size[0] / size[1], rel=0.03)
        assert small.width * small.height > 0.95 * limit
    frames = shrink_media(Video((image, image), {}), limit)
    assert isinstance(frames, Video) and {frame.size for frame in frames.frames} == {small.size}
    assert [one.size for one in shrink_media([image, image], limit)] == [small.size] * 2  # type: ignore[union-attr]


def test_a_processor_of_the_qwen_kind_shrinks_itself() -> None:
    class Kwargs:
        max_pixels: int

    class ImageProcessor:
        valid_kwargs = Kwargs
        size = {"shortest_edge": 3136, "longest_edge": 1_000_000}  # noqa: RUF012

    processor: Any = type("P", (), {"image_processor": ImageProcessor()})()
    assert image_limits(processor, 50_000) == {"size": {"shortest_edge": 3136, "longest_edge": 50_000}}
    assert image_limits(processor, 2_000_000) == {"size": {"shortest_edge": 3136, "longest_edge": 1_000_000}}
    assert image_limits(processor, None) == {} == image_limits(random_model("tiny")[1], 50_000)


def test_max_pixels_changes_what_the_model_sees(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    found = []
    for extra in ([], ["--max-pixels", 100], ["--max-pixels", 10_000]):
        out = tmp_path / f"{len(found)}.jsonl"
        assert caption(tmp_path / "a.png", "--model", "tiny", "--out", out, "--max-new-tokens", 8, *extra) == 0
        found.append(json.loads(out.read_text())["caption"])
    assert found[0] == found[2] != found[1]


@line("`<image>` between words")
@pytest.mark.parametrize("has_template", [True, False])
def test_pictures_stand_where_a_question_says(
    captioner: Captioner, has_template: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = "{% for message in messages %}{% for part in message.content %}"
    template += "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
    processor = captioner.processor
    monkeypatch.setattr(processor, "chat_template", template if has_template else None, raising=False)
    pictures = [Image.new("RGB", (40, 30), "red"), Image.new("RGB", (30, 40), "blue")]

    def ids(question: str, count: int = 2, in_place: bool = True) -> list[int]:
        chat = ChatFormat(in_place=in_place)
        media = tuple(pictures[:count])
        inputs = build_inputs(captioner.model, processor, [media], [question], chat=chat)
        assert len(inputs["pixel_values"]) == count
        return [key for key, _ in itertools.groupby(inputs["input_ids"][0].tolist())]

    question = "what is in <image> that <image> has not ?"
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    found = ids(question)
    places = [place for place, token in enumerate(found) if token == image]
    assert len(places) == 2 and places[1] - places[0] > 1 and places[0] > ids("what ?").index(image) + 1
    assert ids("<image>\n<image>\nwhat is it ?") == ids("what is it ?"), "in front as always"
    assert ids("what is <image> ?", 1).count(image) == 1
    for text, count in ((question, 1), ("<image> one <image> two <image>", 2)):
        with pytest.raises(UsageError, match=r"placeholders and the row [12] pictures or clips: give one for each"):
            ids(text, count)
    with pytest.raises(UsageError, match="must not contain <image>"):
        ids(question, in_place=False)
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(picture())
    parts = [{"text": "what is in"}, {"image": "a.png"}, {"text": "that"}, {"image": "b.png"}, {"text": "has not ?"}]
    turns = {"image": ["a.png", "b.png"], "conversations": [{"from": "human", "value": question}]}
    for record in (turns, {"messages": [{"role": "user", "content": parts}]}):
        (tmp_path / "l.jsonl").write_text(json.dumps(record))
        (item,) = read(tmp_path / "l.jsonl")
        assert item.prompt == question and isinstance(item.content, Pictures)
