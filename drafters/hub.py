"""Whether the Hugging Face hub answers: one request within a few seconds, before anything retries for minutes.

`huggingface_hub` repeats every failed request several times, for each file of a repository: over two minutes until a
hub that cannot be reached is reported. Any HTTP answer below 500 counts as reachable, also 401 and 404.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PROBE_TIMEOUT_S = 4.0
"""Seconds for one attempt to connect, and for one read."""
MAX_PROBE_S = 7.0
"""Seconds for the whole probe; a name server that does not answer is outside of the client's own timeouts."""
ADVICE = (
    "check the network, HTTPS_PROXY and HF_ENDPOINT; or download it elsewhere and name the folder; "
    "HF_HUB_OFFLINE=1 uses what is cached"
)


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` forbids requests."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def unreachable_reason() -> str | None:
    """Why the hub cannot be used now, in one line with what to do; None if it answers, or if requests are forbidden.

    Takes at most `MAX_PROBE_S` seconds.
    """
    from huggingface_hub import constants

    if is_offline():
        return None
    problem = _run_for(MAX_PROBE_S, lambda: _probe(constants.ENDPOINT))
    return None if problem is None else f"the hub at {constants.ENDPOINT} cannot be reached ({problem}): {ADVICE}"


def _probe(endpoint: str) -> str | None:
    """The problem of one HEAD request, or None. Uses the session of `huggingface_hub`, with its proxies."""
    from huggingface_hub import get_session

    try:
        answer = get_session().head(f"{endpoint}/api/models", timeout=PROBE_TIMEOUT_S)
    except Exception as error:  # the client's own types differ between versions of huggingface_hub
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
    return f"it answers with HTTP status {answer.status_code}" if answer.status_code >= 500 else None


def _run_for(seconds: float, function: Callable[[], str | None]) -> str | None:
    """The result of `function`, or a text if it takes longer; its thread is then left behind."""
    results: list[str | None] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True, name="mmspec-hub-probe")
    thread.start()
    thread.join(seconds)
    return results[0] if results else f"no answer within {seconds:.0f} s"
