"""`--report FOLDER`: what a job did as one HTML file, without scripts or other files.

Of this run: the lines of its summary, pictures with their captions, errors by kind. Of a large job the first pictures
are shown. Knows rows and decoded pictures, no models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mmspec.app.errors import explain_write
from mmspec.app.io.images import Media, media_images
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import make_output_folder
from mmspec.app.ui.thumbnails import to_data_uri
from mmspec.files import atomic_write

REPORT_NAME = "report.html"
MAX_SHOWN_PICTURES = 400
"""Captions that are shown with their picture: about 6 kB each."""
MAX_ERRORS = 20
"""Errors of one kind that are listed."""
REPORT_IMAGE_SIZE = 160
MAX_CAPTION = 2000
"""Characters of a caption."""
REPORT_STYLE = """:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;
margin:1.5rem auto;padding:0 1rem;overflow-wrap:anywhere}h1{font-size:24px}h2{font-size:18px;margin:2rem 0 .5rem}
td,th{padding:.2rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid #8885}
figure{display:flex;gap:1rem;margin:.6rem 0;border-bottom:1px solid #8885;padding-bottom:.6rem}
img{width:160px;height:auto;align-self:flex-start}figcaption{flex:1}small{opacity:.7}"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class JobReport:
    """Collects a run of a job and writes its report."""

    def __init__(self, folder: Path, title: str) -> None:
        """Set up.

        Args:
            folder: where `report.html` is written; created if its parent exists.
            title: of the page, such as the command.

        Raises:
            UsageError: the folder cannot be created.
            OutputError: it cannot be written.
        """
        self.file, self.title = folder / REPORT_NAME, title
        with explain_write(folder):
            make_output_folder(folder, "name a folder", "--report")
        self._pictures: dict[str, str] = {}  # id -> data URI
        self._shown: list[Row] = []
        self._errors: dict[str, list[str]] = {}
        self._error_counts: Counter[str] = Counter()
        self._captions = 0

    def add_picture(self, item: Item, media: Media) -> None:
        """A decoded picture, of a clip its first frame, of several the first."""
        if len(self._pictures) < MAX_SHOWN_PICTURES:
            self._pictures[item.id] = to_data_uri(media_images(media)[0], REPORT_IMAGE_SIZE, quality=70)

    def add_rows(self, rows: Sequence[Row]) -> None:
        """Rows that were written, with all their columns."""
        for row in rows:
            if row["error"]:
                kind = row["error"]["type"]
                self._error_counts[kind] += 1
                examples = self._errors.setdefault(kind, [])
                if len(examples) < MAX_ERRORS:
                    examples.append(f"{row['file_name']}: {row['error']['message']}")
                continue
            self._captions += 1
            if len(self._shown) < MAX_SHOWN_PICTURES:
                self._shown.append(row)

    def write(self, summary: Sequence[str]) -> None:
        """Write the file.

        Args:
            summary: lines of the job's own summary.

        Raises:
            OutputError: it cannot be written.
        """
        with explain_write(self.file), atomic_write(self.file) as part:
            part.write_text(self._page(summary), encoding="utf-8", errors="replace")

    def _page(self, summary: Sequence[str]) -> str:
        parts = [f"<p><code>{escape(self.title)}</code></p>", *(f"<p>{escape(line)}</p>" for line in summary)]
        parts += ["<h2>Errors</h2>", self._error_table()]
        more = f", the first of {self._captions}" if self._captions > len(self._shown) else ""
        parts += [f"<h2>{len(self._shown)} captions{more}</h2>", *map(self._figure, self._shown)]
        style = f"<style>{REPORT_STYLE}</style>"
        head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        view = '<meta name="viewport" content="width=device-width">'
        return (
            f"<!doctype html><html lang=en><head>{head}{view}<title>Captions</title>{style}</head>"
            f"<body><h1>Captions</h1>{''.join(parts)}</body></html>\n"
        )

    def _error_table(self) -> str:
        if not self._error_counts:
            return "<p>None.</p>"
        rows = [
            f"<tr><th>{count} {escape(kind)}</th><td>{'<br>'.join(map(escape, self._errors[kind]))}</td></tr>"
            for kind, count in self._error_counts.most_common()
        ]
        return f"<table>{''.join(rows)}</table>"

    def _figure(self, row: Row) -> str:
        uri = self._pictures.get(row["id"])
        image = f'<img src="{uri}" alt="" loading="lazy">' if uri else ""
        caption = row["caption"]
        text = escape(caption if len(caption) <= MAX_CAPTION else f"{caption[:MAX_CAPTION]}...")
        about = f"{row['file_name']}, {row['n_new_tokens']} tokens, {row['tau']:.2f} per forward pass"
        return f"<figure>{image}<figcaption>{text}<br><small>{escape(about)}</small></figcaption></figure>"
