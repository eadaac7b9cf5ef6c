"""State shared by all tabs: models, worker, limits, temporary files; and how errors reach the page."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import gradio as gr

from mmspec.app.errors import UsageError
from mmspec.app.ui.credit import BASELINES, PLAIN_GENERATE
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model_store import COMPRESSOR_CHOICES, ModelStore, RunSettings
from mmspec.app.ui.report import TempStorage
from mmspec.app.ui.worker import MAX_QUEUED_RUNS, Client, SessionRegistry, Worker

logger = logging.getLogger("mmspec")

DEVICE_QUEUE: dict[str, Any] = {"concurrency_limit": MAX_QUEUED_RUNS + 4, "concurrency_id": "device"}
"""Event options of everything that uses the device. The queue is the worker's, which reports positions and lets a
waiting run leave; Gradio's own queue therefore admits all."""
PRIVATE_API: dict[str, Any] = {"api_visibility": "private"}
MAX_MORE_LANES = 4
"""Further drafters of one comparison."""
ANONYMOUS = "api"
"""Session of requests without one: they have nothing in common."""
INTERNAL_ERROR = "Internal error; details are in the terminal that runs mmspec demo."
"""What a page says of an unexpected error."""
UNQUEUED: dict[str, Any] = {"queue": False, "show_progress": "hidden", **PRIVATE_API}
VALIDATION: dict[str, Any] = {**UNQUEUED, "queue": True, "concurrency_limit": None}
"""Event options of quick handlers that may refuse: Gradio 6.31 shows no error of handlers outside its queue. Where an
output should not be covered by the label "Error", `show_progress_on` names another."""


@dataclass
class Context:
    """One running app."""

    model_store: ModelStore
    temp_storage: TempStorage
    limits: Limits = field(default_factory=Limits)
    worker: Worker = field(default_factory=Worker)
    sessions: SessionRegistry = field(default_factory=SessionRegistry)

    def parse_settings(
        self,
        model: str,
        drafter: str,
        compressor: str | None,
        temperature: float,
        seed: float,
        max_new_tokens: float,
        tree_size: str | None = None,
        more_drafters: Sequence[str] | None = None,
        baseline: str = PLAIN_GENERATE,
    ) -> RunSettings:
        """The settings sent by a page, validated.

        Raises:
            UsageError: a name that is not offered, or a number out of range.
        """
        check_number = self.limits.check_number
        self.model_store.check_names(model, drafter)
        lanes = self._check_lanes(model, drafter, more_drafters)
        if baseline not in BASELINES:
            raise UsageError(f"There is no baseline {str(baseline)[:60]!r}; choose one of {', '.join(BASELINES)}.")
        is_automatic = tree_size in (None, "", "automatic")
        return RunSettings(
            model=model,
            drafter=drafter,
            compressor=None if compressor in (None, "", "none") else str(compressor)[:40],
            temperature=check_number("Temperature", temperature, 0, 5),
            seed=int(check_number("Seed", seed, 0, 2**53)),
            max_new_tokens=int(check_number("Max new tokens", max_new_tokens, 1, self.limits.max_new_tokens)),
            tree_size=None if is_automatic else int(check_number("Tree size", _parse_int(tree_size), 1, 64)),
            more_drafters=lanes,
            baseline=baseline,
        )

    def end_page(self, session: str) -> None:
        """End the run of a page that was closed, then free what is kept of its conversation."""
        self.sessions.end(session)
        self.model_store.forget(session)

    def _check_lanes(self, model: str, drafter: str, more_drafters: Sequence[str] | None) -> tuple[str, ...]:
        """Drafters of further lanes, each once, without `drafter`."""
        names = more_drafters or ()
        if not isinstance(names, list | tuple) or len(names) > MAX_MORE_LANES:
            raise UsageError(f"Further lanes must be a list of at most {MAX_MORE_LANES} drafters.")
        for name in names:
            self.model_store.check_names(model, name)
        return tuple(dict.fromkeys(name for name in names if name != drafter))


def get_client(request: gr.Request | None) -> Client:
    """Session and network address of a request; the session `ANONYMOUS` if Gradio gives none."""
    session = str(getattr(request, "session_hash", None) or ANONYMOUS)
    address = getattr(getattr(request, "client", None), "host", None)
    return Client(session, str(address or ""))


def format_queue_position(num_ahead: int) -> str:
    """Status of a run that waits behind `num_ahead` others."""
    runs = "run" if num_ahead == 1 else "runs"
    return f"Queued at place {num_ahead + 1}: {num_ahead} {runs} ahead of yours. Stop leaves the queue."


def _parse_int(text: Any) -> Any:
    """The integer written in a string; anything else unchanged, for `check_number` to refuse."""
    return int(text) if isinstance(text, str) and text.isdecimal() else text


@dataclass(frozen=True)
class Controls:
    """Input components of the settings."""

    model: Any
    drafter: Any
    compressor: Any
    temperature: Any
    seed: Any
    max_new_tokens: Any
    tree_size: Any
    more_drafters: Any = None
    baseline: Any = None

    @property
    def inputs(self) -> list[Any]:
        """The components in the order of the arguments of `Context.parse_settings`."""
        lanes = [] if self.more_drafters is None else [self.more_drafters, self.baseline]
        return [
            self.model,
            self.drafter,
            self.compressor,
            self.temperature,
            self.seed,
            self.max_new_tokens,
            self.tree_size,
            *lanes,
        ]


def build_controls(context: Context, max_new_tokens: int, name: str, *, with_lanes: bool = False) -> Controls:
    """Create the settings of a tab.

    Args:
        context: the app.
        max_new_tokens: initial value.
        name: prefix of the elements' ids, unique per tab.
        with_lanes: offer further drafters and another baseline.
    """
    store = context.model_store
    with gr.Accordion("Settings", open=False, elem_id=f"{name}-settings"):
        with gr.Row():
            model = gr.Dropdown(store.model_names, value=store.model_names[0], label="Model", elem_id=f"{name}-model")
            drafter = gr.Dropdown(
                store.drafter_names, value=store.drafter_names[0], label="Drafter", elem_id=f"{name}-drafter"
            )
            compressor = gr.Dropdown(
                list(COMPRESSOR_CHOICES),
                value="none",
                label="Compressor",
                info="Reduces the visual tokens that the drafter reads",
                allow_custom_value=True,
            )
        with gr.Row():
            max_tokens = gr.Slider(
                1, context.limits.max_new_tokens, value=max_new_tokens, step=1, label="Max new tokens"
            )
            temperature = gr.Slider(0, 2, value=0, step=0.1, label="Temperature", info="0 is greedy decoding")
            seed = gr.Number(0, precision=0, label="Seed", minimum=0)
            tree_size = gr.Dropdown(
                ["automatic", "2", "4", "8", "16", "32"],
                value="automatic",
                label="Tree size",
                info="Automatic drafts only when the measured cost is expected to pay; a fixed size always drafts",
            )
        lanes = baseline = None
        if with_lanes:
            baseline = gr.Radio(
                list(BASELINES),
                value=PLAIN_GENERATE,
                label="Baseline",
                info="What the answers are compared with. plain generate: transformers alone. mmspec without drafts: "
                "its own decode loop, so that the ratio shows the drafts alone",
                elem_id=f"{name}-baseline",
            )
            lanes = gr.CheckboxGroup(
                store.drafter_names,
                label="Further lanes",
                info=f"Drafters that race beside the chosen one, at most {MAX_MORE_LANES}",
                elem_id=f"{name}-lanes",
            )
    return Controls(model, drafter, compressor, temperature, seed, max_tokens, tree_size, lanes, baseline)


def report_errors(
    fn: Callable[..., Any], format_message: Callable[[str], str] = escape, sessions: SessionRegistry | None = None
) -> Callable[..., Any]:
    """Wrap a handler, function or generator, so that its errors reach the page as one sentence, never a stack trace.

    Args:
        fn: the handler.
        format_message: applied to the sentence. Pages render it as HTML, programs do not.
        sessions: stores the error with the page, whose `gr.Request` is the first argument; the status line then shows
            it until the next run.
    """

    def convert(error: Exception, args: tuple[Any, ...]) -> Exception:
        if sessions is not None:
            sessions.store_failure(get_client(args[0]).session, error)
        return to_gradio_error(error, format_message)

    if inspect.isgeneratorfunction(fn):

        @functools.wraps(fn)
        def iterate(*args: Any, **kwargs: Any) -> Iterator[Any]:
            try:
                yield from fn(*args, **kwargs)
            except Exception as error:
                raise convert(error, args) from None

        return iterate

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            raise convert(error, args) from None

    return call


def to_gradio_error(error: Exception, format_message: Callable[[str], str] = escape) -> gr.Error:
    """An error as one sentence. Messages of unexpected errors are logged and not sent to the page."""
    if isinstance(error, gr.Error):
        return error
    text = describe_error(error)
    if text == INTERNAL_ERROR:
        logger.error("mmspec: a page handler failed", exc_info=error)
    return gr.Error(format_message(text), print_exception=False)


def describe_error(error: Exception) -> str:
    """An error as one sentence for a visitor, which is not HTML; that of an unexpected one tells nothing."""
    from mmspec.app.modeling.captioner import out_of_memory

    if isinstance(error, UsageError):
        return str(error)
    if out_of_memory(error):
        return "Out of memory; reduce max new tokens, or use a smaller picture."
    return INTERNAL_ERROR
