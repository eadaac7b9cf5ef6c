"""`mmspec demo`: a chat in a browser. Torch and gradio are imported after the arguments are checked."""

from __future__ import annotations

import argparse
import gc
import re
import secrets
import signal
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mmspec.app.caption.progress import print_stderr
from mmspec.app.cli.arguments import (
    add_device_options,
    add_model_option,
    hide_progress_bars,
    positive_int,
    validate_drafter,
)
from mmspec.app.errors import UsageError, one_line
from mmspec.hints import install_hint

if TYPE_CHECKING:
    from mmspec.app.ui.limits import Limits
    from mmspec.app.ui.model import DemoModel

EPILOG = """\
examples
  mmspec demo                                            the small built-in model, at http://127.0.0.1:7860
  mmspec demo --model llava-hf/llava-1.5-7b-hf --port 8000
  mmspec demo --model ./my-text-model --drafter ./my-drafter
  mmspec demo --root-path https://example.org/demo       behind a proxy on this machine
  mmspec demo --share                                    from the internet, with a password

The page is served to this machine only; from another one, use ssh -L, a proxy or --share. Uploads are removed when the
command ends (Ctrl-C). For many files: mmspec caption. In a terminal, without gradio: mmspec examples.
"""
DEFAULT_PORT = 7860
SHARE_WARNING = """\
mmspec demo --share: warning
  Whoever has the address and the password can use this app from the internet: upload files, run the model on this
  machine. The traffic passes a server of Gradio, which can read it. Gradio downloads its tunnel program at the first
  use. The link ends with this command (Ctrl-C), at the latest after a week."""


DESCRIPTION = "Ask about pictures and clips in a browser: mmspec answers first, plain generate beside it."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", metavar="D", help="drafter (default auto)")
    add_device_options(parser)
    add(
        "--port",
        type=parse_port,
        default=None,
        metavar="P",
        help=f"default: {DEFAULT_PORT}, or the first free one after it",
    )
    add(
        "--root-path",
        type=root_path,
        default=None,
        metavar="URL",
        help="the address at which a proxy serves the page, such as https://example.org/demo (SECURITY.md)",
    )
    add("--auth", type=name_and_password, default=None, metavar="NAME:PASSWORD", help="ask for these (Gradio's login)")
    add(
        "--share",
        action="store_true",
        help="make the page reachable from the internet by Gradio's tunnel, with --auth or a password that is printed",
    )
    add(
        "--max-pixels", type=positive_int, default=None, metavar="N", help="refuse larger pictures (default 40,000,000)"
    )


def parse_port(text: str) -> int:
    """A port number; 0 lets the system choose."""
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)


def root_path(text: str) -> str:
    """An address with or without a path."""
    if not re.fullmatch(r"https?://[A-Za-z0-9_.-]+(:\d{1,5})?(/[A-Za-z0-9._~-]+)*/?", text):
        raise argparse.ArgumentTypeError(f"must be an address such as https://example.org/demo; got {text!r}")
    return text.rstrip("/")


def name_and_password(text: str) -> tuple[str, str]:
    """The two parts of NAME:PASSWORD."""
    name, _, password = text.partition(":")
    if not name or not password:
        raise argparse.ArgumentTypeError("must be NAME:PASSWORD, both not empty")
    return name, password


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, or until the model turns out to be unusable."""
    validate_drafter(args.drafter)
    if find_spec("gradio") is None:
        raise UsageError(f"mmspec demo needs gradio, which is not installed; install it: {install_hint('app')}")
    from mmspec.app.modeling.load import resolve_device
    from mmspec.app.ui.limits import Limits
    from mmspec.app.ui.model import DemoModel, ModelUnusableError

    hide_progress_bars(False)
    if args.device not in ("auto", "cpu"):  # these need no check, which would import torch
        resolve_device(args.device)
    limits = Limits() if args.max_pixels is None else Limits(max_pixels=args.max_pixels)
    try:
        model = DemoModel(args.model, args.drafter, dtype=args.dtype, device=args.device)
        _serve(model, limits, args)
    except ModelUnusableError as error:
        print_stderr(f"mmspec: error: {one_line(error)}")
        return 1
    return 0


def _serve(model: DemoModel, limits: Limits, args: argparse.Namespace) -> None:
    from mmspec.app.ui.server import serve

    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    auth = args.auth or (("mmspec", secrets.token_urlsafe(12)) if args.share else None)
    if args.share:
        for line in SHARE_WARNING.splitlines():
            print_stderr(line)
    try:
        with serve(
            model, limits=limits, port=args.port, auth=auth, share=args.share, root_path=args.root_path or ""
        ) as demo:
            print(f"mmspec demo: {demo.url} (Ctrl-C ends it)", flush=True)
            if demo.share_url is not None:
                print(f"shared at {demo.share_url}", flush=True)
            if auth is not None and not args.auth:
                print(f"name: {auth[0]}, password: {auth[1]}", flush=True)
            demo.wait(interrupted)
        gc.freeze()  # the process ends: looking once more through all that torch has made would take seconds
    except OSError as error:
        where = "" if args.port is None else f", port {args.port}"
        raise UsageError(f"cannot serve at 127.0.0.1{where} (--port): {one_line(error)}") from error
