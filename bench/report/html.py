"""The HTML report: one file with its data, style and script inside; it asks the network for nothing."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from pathlib import Path

from megamoe.bench.records import Results

_HERE = Path(__file__).parent


def write_html(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(results), encoding="utf-8")


def render(results: Results) -> str:
    """The page as text."""
    data = json.dumps({"meta": results.meta, "records": [asdict(record) for record in results.records]})
    models = dict.fromkeys(record.model for record in results.records)
    parts = {
        "__TITLE__": html.escape(f"megamoe bench: {', '.join(models)}"),
        "__SCRIPT__": (_HERE / "page.js").read_text(encoding="utf-8"),
        "__DATA__": data.replace("<", "\\u003c"),  # nothing inside may end the script element
    }
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(name, text)
    return page
