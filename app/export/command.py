"""`mmspec export`: a trained draft head in the layout of vLLM, SGLang or `speculators`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app.cli.arguments import output_path
from mmspec.app.errors import UsageError
from mmspec.drafters.heads.registry import EXPORT_FORMATS, methods

if TYPE_CHECKING:
    from mmspec.interfaces import SharedEmbeddings, TargetInfo

_EPILOG = """\
what can be served
{served}
  others    none: MSD's input of visual tokens has no counterpart, and no engine has the other architectures

The commands to serve it: docs/serving.md.

examples
  mmspec export run/eagle3 --format vllm --out served
  mmspec export run/dspark --format vllm --target llava-hf/llava-1.5-7b-hf --out served
"""


def export_help() -> str:
    """The help behind the options, with the methods of the registry."""
    served = [f"  {method.name:9} {method.served}" for method in methods().values() if method.served]
    return _EPILOG.format(served="\n".join(served))


DESCRIPTION = "Write a trained draft head in the layout of a serving engine."
EPILOG = export_help


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("head", metavar="RUN", help="folder of a trained head, or of a run with a single one")
    add("--format", choices=EXPORT_FORMATS, required=True, dest="format_name", help="the engine that reads it")
    add("--out", type=output_path, required=True, metavar="FOLDER", help="folder to write")
    add("--target", metavar="M", help="hub id or folder of the target; needed for dspark, dflash2 and mtp heads")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from mmspec.drafters.checkpoints.export import export_head
    from mmspec.drafters.checkpoints.load import load_trained

    folder = head_folder(Path(args.head))
    if folder.resolve() == args.out.resolve():
        raise UsageError(f"--out {args.out} is the folder of the head itself; name another one")
    try:
        info, embeddings = target_facts(folder, args.target)
        drafter = load_trained(folder, info if args.target else None)
        export_head(args.out, drafter, info, args.format_name, embeddings)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(f"{folder} is not exported: {error}") from error
    print(f"{args.out}: {drafter.name} for {args.format_name} (docs/serving.md has the command to serve it)")
    return 0


def head_folder(folder: Path) -> Path:
    """The folder of a head: the one that is named, or the only one in a run.

    Raises:
        UsageError: there is none, or there are several.
    """
    if (folder / "config.json").is_file():
        return folder
    found = sorted(file.parent for file in folder.glob("*/config.json"))
    if len(found) != 1:
        names = ", ".join(one.name for one in found) or "none"
        raise UsageError(f"{folder} must be a trained head or a run with one of them; heads in it: {names}")
    return found[0]


def target_facts(folder: Path, target: str | None) -> tuple[TargetInfo, SharedEmbeddings | None]:
    """What the head records about its target, or the target itself if it is named.

    Raises:
        ValueError: the config is not of a trained head.
    """
    from mmspec.drafters.checkpoints.format import read_metadata
    from mmspec.interfaces import TargetInfo

    if target is not None:
        from mmspec.app.modeling.load import load_model
        from mmspec.resolve import target_info
        from mmspec.targets.registry import find_adapter

        model, processor = load_model(target, device="cpu")
        adapter = find_adapter(model)
        info = target_info(adapter, processor.tokenizer)
        return replace(info, name=target), adapter.shared_embeddings
    metadata = read_metadata(folder)
    config, facts = metadata.config, dict[str, Any](metadata.facts)
    name = str(facts.get("target", ""))
    info = TargetInfo(metadata.model_type, config.hidden_size, config.vocab_size, metadata.num_layers, name=name)
    return info, None
