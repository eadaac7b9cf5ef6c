"""Ways out of the page: how to install mmspec, its repository, and the papers behind it. Independent of gradio."""

from __future__ import annotations

from html import escape
from importlib import metadata

from mmspec.hints import install_hint

PAPERS = (
    ("speculative decoding", "https://arxiv.org/abs/2211.17192"),
    ("EAGLE", "https://arxiv.org/abs/2401.15077"),
    ("MSD", "https://arxiv.org/abs/2505.14260"),
    ("FLASH", "https://arxiv.org/abs/2505.12728"),
    ("ViSpec", "https://arxiv.org/abs/2509.15235"),
)
"""{name: address} of what the drafters are built on; docs/drafters.md has them all."""


def project_links() -> tuple[tuple[str, str], ...]:
    """(label, address) of the project's pages, such as its repository and README, as its metadata names them."""
    try:
        entries = metadata.metadata("mmspec").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ()
    found = (entry.partition(",")[::2] for entry in entries)
    return tuple((label.strip(), url.strip()) for label, url in found if url.strip().startswith("https://"))


def render_links() -> str:
    """One paragraph. The page itself loads nothing from these addresses."""
    links = project_links()
    project = f"Project: {_join(links)}. " if links else "README.md and docs/ are in the folder of mmspec. "
    return (
        f'<p class="mm-links">Install: <code>{escape(install_hint("app"))}</code>, then '
        f"<code>mmspec.patch(model)</code>. {project}Papers: {_join(PAPERS)}.</p>"
    )


def _join(links: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(
        f'<a class="mm-link" href="{escape(url)}" target="_blank" rel="noopener noreferrer">{escape(label)}</a>'
        for label, url in links
    )
