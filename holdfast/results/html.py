"""The building blocks of the report: sections, figures, sortable tables, numbers as CSV."""

import base64
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from holdfast.results.tables import NUMBER, as_csv


def section(title: str, body: str) -> str:
    return f"<section><h3>{title}</h3>{body}</section>"


def figure(chart: str, note: str, kind: str = "") -> str:
    """`kind` is the class by which the page's script finds the figure."""
    named = f' class="{kind}"' if kind else ""
    return f"<figure{named}>{chart}<figcaption>{note}</figcaption></figure>"


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], file: str) -> str:
    """A table that can be sorted by mouse or keyboard, with its numbers as CSV."""
    numbers = [bool(rows) and all(NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(head))]
    kinds = [' class="n"' if number else "" for number in numbers]
    top = "".join(
        f'<th scope="col" aria-sort="none"{kind}><button type="button">{escape(word)}</button></th>'
        for word, kind in zip(head, kinds, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    note = f"<p class=note>{escape(caption)} {link([head, *rows], file)}</p>"
    inner = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    name = escape(caption or file, quote=True)
    return f'{note}<div class="scroll"><table class="sortable" aria-label="{name}">{inner}</table></div>'


def link(rows: Sequence[Sequence[object]], file: str) -> str:
    """A link that downloads these rows as a CSV file."""
    numbers = quote(as_csv(rows), safe=",")
    return f'<a class="csv" download="{file}" href="data:text/csv;charset=utf-8,{numbers}">{file}</a>'


def embedded(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
