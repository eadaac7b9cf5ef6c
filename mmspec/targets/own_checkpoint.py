"""The checkpoint that a target was loaded from: where it is, and whether the target still is what it holds."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from mmspec.interfaces import OwnHeadError
from mmspec.targets.base import ModelAdapter
from mmspec.weight_files import TensorFiles

NUM_COMPARED = 64
"""Numbers of each weight that are compared with its file."""
CAST_TOLERANCE = {"rtol": 2**-7, "atol": 1e-6}
"""A weight may have been cast since: to half precision and back."""
LAYERS = "layers."


def checkpoint_folder(config: Any) -> Path:
    """The folder that a model was loaded from: the user's, or the snapshot of its own revision in the cache.

    Raises:
        OwnHeadError: there is none.
    """
    name = str(getattr(config, "_name_or_path", "") or "")
    if not name:
        raise OwnHeadError("the model was not loaded from a checkpoint, which would hold the head")
    if os.path.isdir(name):
        return Path(name)
    if os.path.isabs(name):
        raise OwnHeadError("the folder that it was loaded from is not there any more", is_expected=True)
    revision = getattr(config, "_commit_hash", None)
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:  # the hub's exception types change between versions
        raise OwnHeadError(f"the files of {name[:80]} are not in the local cache", is_expected=True) from error


def check_unchanged(adapter: ModelAdapter, files: TensorFiles, prefix: str = "") -> None:
    """Refuse a target whose decoder is not that of its checkpoint: cut, trained, or with merged adapters.

    Some numbers of each weight are compared. Weights that the files do not have under the same name (experts that are
    fused, for example) and quantised targets are not judged.

    Args:
        adapter: of the target.
        files: of its checkpoint.
        prefix: of tensors that are not the target's.

    Raises:
        OwnHeadError: it differs.
    """
    if getattr(adapter.model.config, "quantization_config", None) is not None:
        return
    live = {name: value for name, value in adapter.text_model.named_parameters() if name.startswith(LAYERS)}
    places = [(name, name.find(LAYERS)) for name in files.names if not (prefix and name.startswith(prefix))]
    stems = Counter(name[:start] for name, start in places if start >= 0 and name[start:] in live)
    if not stems:
        return
    stem = stems.most_common(1)[0][0]  # of the decoder: a vision tower may have layers, too
    has_more = LAYERS + str(adapter.num_layers) + "."
    is_cut = not prefix.startswith(stem + LAYERS) and any(name.startswith(stem + has_more) for name in files.names)
    names = (name for name in live if stem + name in files.names)
    first = has_more if is_cut else next((n for n in names if differs(live[n], files.read(stem + n))), None)
    if first is not None:
        raise OwnHeadError(
            f"the target is no longer as in its checkpoint (first {first[:60]}); naming its folder or hub id uses it "
            "all the same",
            is_expected=True,
        )


def differs(live: Tensor, stored: Tensor) -> bool:
    """Whether the first numbers of a weight are not those that its file holds, up to a cast."""
    if live.is_meta or not live.is_floating_point() or not stored.is_floating_point() or stored.itemsize < 2:
        return False
    if live.shape != stored.shape:
        return True
    some, others = (part.detach().flatten()[:NUM_COMPARED].float().cpu() for part in (live, stored))
    return not torch.allclose(some, others, **CAST_TOLERANCE, equal_nan=True)
