"""`mmspec env`: versions, devices and kernels for a bug report; with `--model` the verdict on a model."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mmspec.app.cli.arguments import add_device_options, goes_with
from mmspec.app.errors import one_line
from mmspec.app.versions import mmspec_version, version
from mmspec.messages import printable

if TYPE_CHECKING:
    from mmspec.interfaces import Drafter
    from mmspec.targets.base import ModelAdapter

_PACKAGES = """torch transformers accelerate tokenizers pillow safetensors numpy torchvision matplotlib gradio av
bitsandbytes peft"""
PACKAGES = _PACKAGES.split()
IMAGE_POSITIONS = {
    "placeholder": "placeholder (the embedding of the placeholder token)",
    "coupled": "coupled (the projected features, with the target's hidden states)",
    "decoupled": "decoupled (the projected features alone)",
    "text_only": "text_only (left out)",
}
"""Visual mode of a draft head -> what it reads at image positions."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK")


DESCRIPTION = (
    "Print versions, devices and kernels, for bug reports. Names no user, host or path.\n"
    "With --model: load the model and say whether its tokens can be verified in trees, and its drafter\n"
    "(docs/models.md)."
)
EPILOG = "examples\n  mmspec env\n  mmspec env --model Qwen/Qwen3-VL-4B-Instruct"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", metavar="M", help="hub id or local folder of a model to judge")
    drafter_help = "with --model: name, folder or hub id (default auto)"
    drafter = parser.add_argument("--drafter", metavar="D", default="auto", help=drafter_help)
    goes_with(drafter, "--model", lambda args: args.model is not None)
    add_device_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    _print(collect_info())
    if args.model is None:
        return 0
    lines, passed = judge_model(
        args.model, args.dtype, args.device, args.drafter
    )  # an error of it comes after the versions
    _print(lines)
    return 0 if passed else 1


def _print(lines: Iterable[tuple[str, str]]) -> None:
    for name, value in lines:
        print(printable(f"{name + ':':<24}{value}", lines=True), flush=True)


def judge_model(name: str, dtype: str, device: str, drafter: str = "auto") -> tuple[list[tuple[str, str]], bool]:
    """The traits of a model, its drafter and the verdict of its self-test, and whether it can be decoded in trees.

    Raises:
        UsageError: it cannot be loaded.
    """
    from mmspec.app.modeling.load import load_model, load_text_model
    from mmspec.app.modeling.text import is_text_model
    from mmspec.targets.registry import find_adapter
    from mmspec.targets.selftest import judge

    model, processor = (load_text_model if is_text_model(name) else load_model)(name, dtype, device)
    adapter = find_adapter(model)
    lines = [*adapter.traits().items(), *describe_drafter(drafter, adapter, processor)]
    reason = adapter.unsupported_reason()
    if reason is not None:
        return [*lines, ("verdict", f"decoded by transformers alone: {reason}")], False
    result = judge(adapter, processor)
    verdict = "speculative decoding" if result.passed else "not supported"
    return [*lines, *_huge_pages(model), ("self-test", result.describe()), ("verdict", verdict)], result.passed


def _huge_pages(model: Any) -> Iterator[tuple[str, str]]:
    """How many of a model's linear layers can lie in huge pages; nothing for a model that is on no CPU."""
    from mmspec.cpu.huge_pages import HugePages
    from mmspec.cpu.linear import find_linear_layers

    weights = [layer.weight for layer in find_linear_layers([model])]
    if not weights:
        return
    pages = HugePages()
    pages.add(weights)
    while not pages.is_done:
        pages.add(weights)
    yield "huge pages of weights", pages.describe()


def describe_drafter(name: str, adapter: ModelAdapter, processor: Any) -> Iterator[tuple[str, str]]:
    """The drafter of a model, what was found in its checkpoint, and of a trained head how image positions enter it."""
    from mmspec.config import resolve_tokenizer
    from mmspec.drafters.heads.base.drafter import HeadDrafter
    from mmspec.resolve import resolve_drafter

    try:
        drafter = resolve_drafter(name, adapter, resolve_tokenizer(processor))
    except (OSError, ValueError) as error:
        yield "drafter", f"{name}: {one_line(error)}"
        return
    yield "drafter", drafter.label
    if found := getattr(drafter, "description", ""):
        yield "draft head", str(found)
    elif name == "auto":
        yield from _without_own_drafter(adapter)
    yield from _rounds(drafter, adapter)
    if isinstance(drafter, HeadDrafter) and not drafter.requirements.target_keys:  # an assistant reads no prompt
        how = IMAGE_POSITIONS.get(drafter.visual_mode, drafter.visual_mode)
        yield "image positions", "compressed by the head" if drafter.compresses_visual_tokens else how


def _rounds(drafter: Drafter, adapter: ModelAdapter) -> Iterator[tuple[str, str]]:
    """What earlier processes have measured of rounds of one row, and so which action the next one would take."""
    import torch

    from mmspec.costs import DrafterCosts
    from mmspec.economy.chooser import Chooser

    economy, threads = DrafterCosts().economy(drafter, adapter), torch.get_num_threads()
    plain_s, of = economy.round_s(1, 1), f"{str(adapter.model.dtype)[6:]}, {threads} threads"
    if plain_s is None:
        yield "the next round", f"a draft, then plain decoding: nothing was measured here yet ({of})"
        return
    sizes = [size for what, rows, size, _ in economy.rounds_s.snapshot() if (what, rows) == ("score", 1) and size > 1]
    slower = ", ".join(f"{size} together in {(economy.round_s(1, size) or 0) / plain_s:.2f}" for size in sizes)
    yield "measured here", f"a token in {1e3 * plain_s:.3g} ms ({of}); scored {slower or 'alone so far, 1'} times that"
    if drafter.requirements.optional_copy:
        yield "a copy in few bits", f"made in a process when it would have saved the {economy.make_s(1):.2g} s it takes"
    options = sorted(Chooser(economy, 1, sources=economy.sources()).options(plain_s), key=lambda one: -one.rate)
    for number, one in enumerate(options):
        name = "plain decoding" if one.source is None else f"a draft by {one.source.name}"
        if drafter.requirements.optional_copy and name.startswith("a draft by quantized"):
            name += " (once the copy is made)"
        cost = f"{one.tokens:.2f} tokens in {1e3 * one.seconds:.3g} ms, {one.rate:.1f} tokens/s"
        yield "rather than" if number else "the next round", f"{name}: {cost}"


def _without_own_drafter(adapter: ModelAdapter) -> Iterator[tuple[str, str]]:
    """Why the drafter that models of a family bring along is not used: it was looked for."""
    from mmspec.interfaces import OwnHeadError
    from mmspec.targets.assistant import TARGET_TYPES, find_assistant
    from mmspec.targets.own_head import read_own_head
    from mmspec.targets.own_head_layouts import LAYOUTS

    for own, types, read in (("mtp", LAYOUTS, read_own_head), ("assistant", TARGET_TYPES, find_assistant)):
        try:
            if adapter.model_type in types:
                read(adapter)
        except OwnHeadError as error:
            yield own, f"not used: {_without_home(one_line(error))}"


def collect_info() -> Iterator[tuple[str, str]]:
    """Name and value of each line of the report."""
    yield "mmspec", mmspec_version()
    yield "python", f"{sys.version.split()[0]} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    for package in PACKAGES:
        yield package, version(package) or "-"
    yield from _devices()
    yield from _support()
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cpu", f"{cores} cores, {torch.get_num_threads()} torch threads, {torch.backends.cpu.get_cpu_capability()}"
    yield "cuda", f"{torch.version.cuda}, {torch.cuda.device_count()} devices" if torch.cuda.is_available() else "-"
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        memory = card.total_memory / 2**30
        yield f"cuda:{index}", f"{card.name}, {memory:.1f} GiB, capability {card.major}.{card.minor}"
    yield "mps", "yes" if torch.backends.mps.is_available() else "-"


def _without_home(text: str) -> str:
    return text.replace(os.path.expanduser("~"), "~")


def _support() -> Iterator[tuple[str, str]]:
    import torch

    import mmspec
    from mmspec.cpu.c_kernel import describe_kernel
    from mmspec.cpu.huge_pages import describe_huge_pages
    from mmspec.drafters.registry import drafter_names

    kernels = ("flash", "mem_efficient", "math")
    on = [name for name in kernels if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    yield "sdpa kernels (cuda)", ", ".join(on)
    yield "C kernels", _without_home(one_line(RuntimeError(describe_kernel())))
    yield "huge pages", describe_huge_pages()
    yield "model types", ", ".join(mmspec.supported())
    yield "drafters", ", ".join(drafter_names())
