"""`mmspec demo`: the pages in a browser. Torch and gradio are imported after the arguments are checked."""

from __future__ import annotations

import argparse
import os
import re
from importlib.util import find_spec

from mmspec.app.caption.progress import print_stderr
from mmspec.app.cli.arguments import (
    Commands,
    add_command,
    add_device_options,
    add_model_option,
    goes_with,
    hide_progress_bars,
    positive_int,
    validate_drafter,
)
from mmspec.app.errors import UsageError, one_line

EPILOG = """\
examples
  mmspec demo                                            the small built-in model, at http://127.0.0.1:7860
  mmspec demo --model llava-hf/llava-1.5-7b-hf --port 8000
  mmspec demo --drafter ./my-drafter
  mmspec demo --host 0.0.0.0 --allowed-host demo.example.org
  mmspec demo --root-path /demo --allowed-host example.org   behind a proxy
  mmspec demo --share                                    from the internet, with a password

By default the pages are served to this machine only. Uploads are removed when the command ends (Ctrl-C).
Pages may choose among the built-in models, or have the one named here, and the drafters; no others.
mmspec examples runs the same comparison in the terminal, without gradio.
"""
DEFAULT_PORT = 7860
PASSWORD_VARIABLE = "MMSPEC_DEMO_PASSWORD"
SHARE_WARNING = """\
mmspec demo --share: warning
  Whoever has the address{and_password} can use this app from the internet: upload files, run the model on this machine.
  The traffic passes a server of Gradio, which can read it. Gradio downloads its tunnel program at the first use.
  The link ends with this command (Ctrl-C), at the latest after a week."""


def add_parser(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = add_command(
        commands,
        common,
        "demo",
        run,
        help="pages in a browser: plain and speculative answers side by side",
        description="Ask about pictures and clips in a browser: plain generate and mmspec side by side.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", metavar="D", help="drafter (default auto)")
    add_device_options(parser)
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on (default 127.0.0.1: this machine only)")
    add(
        "--allowed-host",
        action="append",
        default=[],
        type=host_name,
        metavar="NAME",
        help="also answer to this host name, NAME or NAME:PORT (may be repeated; needed with --host 0.0.0.0 and behind "
        "a proxy; addresses of this machine need none)",
    )
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
        default="",
        metavar="/P",
        help="the path under which a proxy serves the pages, and which it removes, such as /demo (default: none); "
        "docs/quickstart.md has a block for nginx",
    )
    add(
        "--share",
        action="store_true",
        help="make the pages reachable from the internet through a tunnel of Gradio; asks for a password, which is "
        f"printed, or that of the environment variable {PASSWORD_VARIABLE}",
    )
    no_password = add("--no-password", action="store_true", help="with --share: admit everybody who has the address")
    goes_with(no_password, "--share", lambda args: args.share)
    add(
        "--max-pixels", type=positive_int, default=None, metavar="N", help="refuse larger pictures (default 40,000,000)"
    )


def parse_port(text: str) -> int:
    """A port number; 0 lets the system choose."""
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)


def root_path(text: str) -> str:
    """A path such as /demo, without a slash at its end; a single slash is no path."""
    if not re.fullmatch(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*/?", text):
        raise argparse.ArgumentTypeError(f"must begin with a slash and be a plain path, such as /demo; got {text!r}")
    return text.rstrip("/")


def host_name(text: str) -> str:
    """A host name, with or without a port."""
    from mmspec.app.ui.middleware.names import parse_allowed_host

    try:
        parse_allowed_host(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    validate_drafter(args.drafter)
    require_gradio()
    from mmspec.app.modeling.load import resolve_device
    from mmspec.app.ui.limits import Limits
    from mmspec.app.ui.model_store import ModelStore
    from mmspec.app.ui.server import ShareError, serve

    hide_progress_bars(False)
    if args.device not in ("auto", "cpu"):  # these need no check, which would import torch
        resolve_device(args.device)
    limits = Limits() if args.max_pixels is None else Limits(max_pixels=args.max_pixels)
    store = ModelStore(args.model, args.drafter, dtype=args.dtype, device=args.device)
    password = choose_password(args.share, args.no_password)
    if args.share:
        for line in SHARE_WARNING.format(and_password=" and the password" if password else "").splitlines():
            print_stderr(line)
    try:
        with serve(
            store,
            limits=limits,
            host=args.host,
            port=args.port,
            allowed=args.allowed_host,
            record_opening=True,
            password=password,
            share=args.share,
            root_path=args.root_path,
        ) as server:
            print(f"mmspec demo: {server.url} (Ctrl-C ends it)", flush=True)
            if server.share_url is not None:
                print(f"shared at {server.share_url}", flush=True)
            if password is not None:
                print(f"password: {password} (any user name)", flush=True)
            wait_for_interrupt()
    except ShareError as error:
        raise UsageError(one_line(error)) from error
    except OSError as error:
        where = args.host if args.port is None else f"{args.host}, port {args.port}"
        raise UsageError(f"cannot serve at {where} (--host, --port): {one_line(error)}") from error
    return 0


def choose_password(share: bool, no_password: bool) -> str | None:
    """The password of the pages: that of the environment, else with `share` a random one, else none.

    Raises:
        UsageError: the password of the environment is refused.
    """
    from mmspec.app.ui.middleware.password import check_password, generate_password

    if no_password:
        return None
    chosen = os.environ.get(PASSWORD_VARIABLE)
    if chosen is not None:
        try:
            check_password(chosen)
        except ValueError as error:
            raise UsageError(f"{PASSWORD_VARIABLE} {error}") from None
    return chosen or (generate_password() if share else None)


def require_gradio() -> None:
    """Raise `UsageError` with the install command if gradio is missing."""
    if find_spec("gradio") is None:
        from mmspec.hints import install_hint

        raise UsageError(f"mmspec demo needs gradio: {install_hint('app')}")


def wait_for_interrupt() -> None:
    """Block until Ctrl-C or SIGTERM; both end the command cleanly."""
    import signal
    import threading

    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    while not interrupted.wait(1.0):
        pass
