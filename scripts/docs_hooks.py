"""Adds to the site what its Markdown files lack: the benchmarks and the reproduced pages. As a program: writes the
table of settings into docs/settings.md."""

import re
from pathlib import Path
from typing import Any

from holdfast.config import describe

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files that are not part of the site become plain text."""
    name = page.file.src_uri
    if name == "benchmarks.md":
        markdown = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
        markdown = re.sub(r"\[([^\]]+)\]\((?!http)[^)]*\)", r"\1", markdown)
    elif name == "results.md":
        pages = sorted((ROOT / "docs/reproduced").glob("*.md"), key=_place)
        markdown += "\n" + "\n".join(f"- [{_title(path)}](reproduced/{path.name})" for path in pages)
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def settings_table() -> str:
    """Every setting with its default, from the classes that validate them."""
    rows = [
        f"| `{name}` | {f'`{default}`' if default else ''} | {_cell(about)} |" for name, default, about in describe()
    ]
    return "\n".join(["| setting | default | what it is |", "| --- | --- | --- |", *rows]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _place(path: Path) -> tuple[str, int]:
    """Figures and tables by their numbers: table2, table10-paper, table12."""
    kind, number = re.match(r"([a-z]+)(\d+)", path.stem).groups()  # type: ignore[union-attr]
    return kind, int(number)


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def settings_page() -> str:
    """docs/settings.md with the table of today's settings."""
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    return text.partition("| setting |")[0] + settings_table()


if __name__ == "__main__":
    (ROOT / "docs" / "settings.md").write_text(settings_page(), encoding="utf-8")
