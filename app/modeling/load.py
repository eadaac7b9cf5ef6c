"""A model and its processor from a hub id, a local folder or a built-in name; errors in one line.

Remote code is never run. `HF_HUB_OFFLINE=1` forbids downloads, as in transformers. A hub that does not answer is
reported within 10 seconds (`mmspec.drafters.hub`).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app import scenes
from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.random_models import SIZES, random_model
from mmspec.drafters.hub import unreachable_reason
from mmspec.hints import looks_like_path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device called `name`; "auto" is this process's GPU if there is one."""
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank % torch.cuda.device_count())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # torch says "no such device" in a different type for each kind
        raise UsageError(f"--device {name}: {one_line(error, 120)}") from error
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def clone(model: PreTrainedModel) -> PreTrainedModel:
    """A second model with the same weight tensors (no copy of them) and its own modules and settings."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    local_rank: int = 0,
    check: Callable[[ProcessorMixin], None] | None = None,
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Model in eval mode on its device, and its processor, padding on the left.

    Args:
        name: hub id, local folder, "scenes" for the model that ships with mmspec, or "tiny" for a random one.
        dtype: "auto" is float32 on a CPU and the checkpoint's own elsewhere.
        check: called with the processor of a checkpoint before its weights are read, to refuse options.

    Raises:
        UsageError: it cannot be loaded, or would need code of its repository, which is never run.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    target_device, precision = _device_and_dtype(device, local_rank, dtype)
    if name == SCENES_MODEL or name in SIZES:
        model, processor = scenes.load_scenes_model() if name == SCENES_MODEL else random_model(name)
        model = model.to(dtype=getattr(torch, "float32" if precision == "auto" else precision))
        if check is not None:
            check(processor)
    else:
        processor, options, problem = _processor(name)
        if check is not None:
            check(processor)
        with _explained(f"--model {name}", name, problem):
            model = AutoModelForImageTextToText.from_pretrained(name, dtype=precision, **options)
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None or not hasattr(processor, "image_processor"):
        raise UsageError(f"--model {name} has no processor for images and text (it is a {type(processor).__name__})")
    return _ready(model, tokenizer, target_device), processor


def load_text_model(
    name: str, dtype: str = "auto", device: str = "auto", local_rank: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A language model without images in eval mode, and its tokenizer, padding on the left.

    Args:
        name: hub id, local folder, or a GGUF file, whose weights transformers turns into floats (needs `gguf`).
        dtype: "auto" is float32 on a CPU and the checkpoint's own elsewhere.

    Raises:
        UsageError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target_device, precision = _device_and_dtype(device, local_rank, dtype)
    is_gguf = name.endswith(".gguf")
    folder = os.path.dirname(os.path.abspath(name)) if is_gguf else name
    if not is_gguf:
        _check_folder(name)
    elif os.path.isdir(folder) and not os.path.isfile(name):  # transformers would point to a page of the hub
        raise UsageError(f"cannot load the language model {name}: there is no such file")
    options, problem = _source_options(folder)
    options |= {"gguf_file": os.path.basename(name)} if is_gguf else {}
    with _explained(f"the language model {name}", name, problem):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=precision, **options)
    return _ready(model, tokenizer, target_device), tokenizer


def _device_and_dtype(device: str, local_rank: int, dtype: str) -> tuple[torch.device, str]:
    found = resolve_device(device, local_rank)
    return found, "float32" if dtype == "auto" and found.type == "cpu" else dtype


def _source_options(name: str) -> tuple[dict[str, Any], str | None]:
    """Options to load from a folder or the hub, or what is cached of it; and why the hub does not answer."""
    problem = None if os.path.isdir(name) else unreachable_reason()
    return {"trust_remote_code": False, "local_files_only": problem is not None}, problem


@contextmanager
def _explained(what: str, name: str, problem: str | None) -> Iterator[None]:
    """Within the context any error is a `UsageError`: transformers raises nearly any type, AttributeError where
    torchvision is missing."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"cannot load {what}: {problem or _hint(name, error)}") from error


def _ready(model: PreTrainedModel, tokenizer: Any, device: torch.device) -> PreTrainedModel:
    """The model on its device; its tokenizer pads on the left; the C kernels are there.

    If they are for this device and missing they are built, which is said: else the first call would be silent for as
    long as a compiler takes.
    """
    from mmspec.cpu import c_kernel, c_library

    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if device.type == "cpu" and c_library.needs_build():
        print_stderr("mmspec: building the C kernels, once; this takes some seconds")
        c_kernel.load_kernel()
    return model.to(device).eval()


def _processor(name: str) -> tuple[ProcessorMixin, dict[str, Any], str | None]:
    """The processor, the options to load its model with, and why the hub does not answer."""
    from transformers import AutoProcessor

    _check_folder(name)
    options, problem = _source_options(name)
    _refuse_remote_code(name)
    with _explained(f"the processor of --model {name}", name, problem):
        return AutoProcessor.from_pretrained(name, **options), options, problem


def check_several_pictures(name: str) -> None:
    """Refuse a model that does not take several pictures in a prompt; its processor is tried, nothing else is loaded.

    Raises:
        UsageError: it takes one, or has no processor.
    """
    from mmspec.app.modeling.chat import takes_several_pictures

    if name == SCENES_MODEL or name in SIZES:
        return
    if not takes_several_pictures(_processor(name)[0]):
        raise UsageError(
            f"--model {name} takes one picture per prompt, and rows of this input hold several: choose a model for "
            "several pictures, or name another column with --image-column"
        )


def load_processor(name: str) -> ProcessorMixin:
    """The processor of a checkpoint, without its weights.

    Raises:
        UsageError: it cannot be loaded.
    """
    return _processor(name)[0]


def read_model_config(name: str) -> dict[str, Any]:
    """The `config.json` of a local folder, or of a hub id whose file is in the local cache; {} if there is none.

    Nothing is downloaded and no code is run.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = os.path.join(name, "config.json") if os.path.isdir(name) else try_to_load_from_cache(name, "config.json")
        found = json.loads(Path(file).read_text(encoding="utf-8")) if isinstance(file, str) else {}
    except (OSError, ValueError, HFValidationError):  # loading the model reports what is wrong
        return {}
    return found if isinstance(found, dict) else {}


def model_revision(model: PreTrainedModel) -> str | None:
    """The commit that a model was loaded from, if it is one of the hub; None for a folder of one's own."""
    commit = getattr(model.config, "_commit_hash", None)
    parts = Path(str(getattr(model.config, "_name_or_path", ""))).parts
    if commit is None and "snapshots" in parts[:-1]:
        commit = parts[parts.index("snapshots") + 1]
    return commit


def _refuse_remote_code(name: str) -> None:
    """Refuse a model whose code lies in its repository.

    Raises:
        UsageError: transformers itself does not have the model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = read_model_config(name)
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING_NAMES:
        raise UsageError(_remote_code_message(name))


def _remote_code_message(name: str) -> str:
    where = name if len(name) <= 80 else f"...{name[-77:]}"
    return (
        f"--model {where} consists of code in its repository, not in transformers, and mmspec runs no code of "
        "repositories: use a conversion for transformers, often published as OWNER/NAME-hf"
    )


def _check_folder(name: str) -> None:
    """Refuse a local path without a model in it, before it is taken for a hub id.

    Raises:
        UsageError: no such folder, a file, or a folder without a `config.json`.
    """
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise UsageError(f"cannot load --model {name}: the folder holds no config.json")
    elif name.endswith(".gguf"):
        raise UsageError(
            f"--model {name}: a GGUF file holds a language model alone: name a folder of transformers or a hub id"
        )
    elif os.path.exists(name):
        raise UsageError(f"--model {name} is a file: name the folder of the model")
    elif not name.strip() or "\\" in name or looks_like_path(name):
        raise UsageError(f"--model {name}: no such folder; a hub id is OWNER/NAME, as in llava-hf/llava-1.5-7b-hf")


def _hint(name: str, error: Exception) -> str:
    """The error in one line, with what is known about it."""
    if "trust_remote_code" in str(error):
        return _remote_code_message(name)
    text = one_line(error)
    if "torchvision" in str(error).lower() or isinstance(error, AttributeError):
        text += " (this family's processor needs torchvision: pip install torchvision)"
    if "/" in name and not os.path.exists(name) and os.path.isdir(name.split("/")[0]):
        text += f" (and there is no folder {name} here)"
    return text
