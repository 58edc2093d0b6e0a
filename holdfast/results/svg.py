"""Small charts as SVG or HTML; they take their colours from the page's style, so that they fit light and dark mode."""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import mean

ROUND = 96.0  # the width of "round 100" on a phone
SERIES = 8  # colours --c0 to --c7 of the page


def colour(index: int) -> str:
    return f"var(--c{index % SERIES})"


def dash(index: int) -> str:
    """The style that tells curves apart where there are more of them than colours."""
    return ("", ";stroke-dasharray:7 4", ";stroke-dasharray:2 5")[min(index // SERIES, 2)]


def frame(width: float, height: float, label: str, body: str, most: float | None = None, more: str = "") -> str:
    """`most` is the maximum width in pixels; `more` are further attributes."""
    size = f' style="max-width:{most:g}px"' if most else ""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label, quote=True)}" '
        f'preserveAspectRatio="xMinYMin meet"{size}{more}>{body}</svg>'
    )


def text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


Series = Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]  # x values, and one curve per run


def curves(series: Series, x_label: str, label: str) -> str:
    """Percentages: per name the mean over runs, and the band from the smallest to the largest value."""
    width, height, left, bottom, top = 640.0, 320.0, 44.0, 40.0, 12.0
    across = sorted({x for places, _ in series.values() for x in places})
    low, high = min(across), max(across)

    def at(x: float, y: float) -> tuple[float, float]:
        place = (x - low) / (high - low) if high > low else 0.5
        return left + place * (width - left - 24), top + (1 - y / 100) * (height - top - bottom)

    parts = []
    for tick in range(0, 101, 20):
        _, y = at(low, tick)
        parts.append(line(left, y, width - 24, y, "grid") + text(left - 6, y + 4, str(tick), "end"))
    ticks = across if len(across) <= 12 else across[:: -(-len(across) // 12)]
    parts += [text(at(x, 0)[0], height - bottom + 18, f"{x:g}") for x in ticks]
    parts.append(text((left + width) / 2, height - 4, x_label))
    for i, (places, runs) in enumerate(series.values()):
        columns = list(zip(*runs, strict=True))
        if len(runs) > 1:
            edge = [at(x, max(c)) for x, c in zip(places, columns, strict=True)]
            edge += [at(x, min(c)) for x, c in reversed(list(zip(places, columns, strict=True)))]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
            parts.append(f'<polygon points="{points}" style="fill:{colour(i)}" class="band"/>')
        middle = [at(x, mean(c)) for x, c in zip(places, columns, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in middle)
        parts.append(f'<polyline points="{points}" style="stroke:{colour(i)}{dash(i)}" class="curve"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour(i)}"><title>{mean(c):.1f} %</title></circle>'
            for (x, y), c in zip(middle, columns, strict=True)
        ]
    return frame(width, height, label, "".join(parts)) + (legend(list(series)) if len(series) > 1 else "")


def legend(names: Sequence[str]) -> str:
    return f'<p class="legend">{"".join(f"<span>{mark(i)}{escape(name)}</span>" for i, name in enumerate(names))}</p>'


def mark(index: int) -> str:
    """A dot in the colour of a series; hollow if its curve is dashed or dotted."""
    if index < SERIES:
        return f'<i style="background:{colour(index)}"></i>'
    return f'<i style="border:3px {"dashed" if index < 2 * SERIES else "dotted"} {colour(index)}"></i>'


GAIN, LOSS = "var(--gain)", "var(--loss)"


def bars(
    values: Mapping[str, float],
    label: str,
    unit: str = "",
    shades: Sequence[int | str] | None = None,
    most: float | None = None,
) -> str:
    """Horizontal bars with their numbers, as HTML, so that names and numbers fit on any screen. `most` is the value
    of a bar of full width, the largest if not given; `shades` are numbers of series, or colours."""
    most = most or max([abs(value) for value in values.values()] + [1e-9])
    parts = []
    for i, (name, value) in enumerate(values.items()):
        chosen = shades[i] if shades else 0
        shade = chosen if isinstance(chosen, str) else colour(chosen)
        parts.append(_name(name))
        parts.append(f'<i style="width:{min(100.0, 100 * abs(value) / most):.1f}%;background:{shade}"></i>')
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        parts.append(f"<span>{number}{escape(unit)}</span>")
    return f'<div class="bars" role="img" aria-label="{escape(label, quote=True)}">{"".join(parts)}</div>'


def _name(name: str) -> str:
    """The browser shortens the name to fit; pointing at it shows the full name."""
    return f'<div class="name" title="{escape(name, quote=True)}">{escape(name)}</div>'


def _names(rows: Sequence[str], width: float, step: float, top: float = 0.0) -> list[str]:
    """Row names at the left, one below the other."""
    size = f'width="{width - 6:g}" height="{step:g}"'
    return [
        f'<foreignObject x="0" y="{top + i * step:.1f}" {size}>{_name(name)}</foreignObject>'
        for i, name in enumerate(rows)
    ]


def matrix(picture: str, rows: Sequence[str], columns: Sequence[str], label: str) -> str:
    """An enlarged picture with one pixel per entry of a matrix, and the names of its rows and columns."""
    name_width, step, top = 150.0, 22.0, 110.0
    width, height = step * len(columns), step * len(rows)
    place = f'x="{name_width:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    image = f'<image class="confusion" {place} preserveAspectRatio="none" href="{picture}"/>'
    heads = []
    for i, name in enumerate(columns):
        x, y = name_width + (i + 0.65) * step, top - 6
        short = name if len(name) <= 12 else f"{name[:11]}…"
        heads.append(f'<text class="col" transform="translate({x:.1f} {y:g})rotate(-90)">{escape(short)}</text>')
    body = "".join([*heads, *_names(rows, name_width, step, top), image])
    return frame(name_width + width, top + height, label, body, min(name_width + width, 760.0))


def events(
    rows: Sequence[str], columns: int, marks: Mapping[str, Sequence[tuple[int, int]]], bounds: Sequence[int], label: str
) -> str:
    """A timeline: one row per client, one column per round; `marks`: (row, round) by kind; `bounds`: where tasks
    begin."""
    name_width, width, step = 150.0, 640.0, 22.0
    across = (width - name_width - 8) / max(columns, 1)
    height = step * len(rows) + 26
    parts = [
        line(name_width + start * across, 0, name_width + start * across, step * len(rows), "grid") for start in bounds
    ]
    parts += _names(rows, name_width, step)
    parts += [line(name_width, (i + 0.5) * step, width - 8, (i + 0.5) * step, "faint") for i in range(len(rows))]
    for k, (kind, places) in enumerate(marks.items()):
        for row, column in places:
            x, y = name_width + (column + 0.5) * across, row * step + step / 2
            title = f"<title>{escape(kind)}: {escape(rows[row])}, round {column + 1}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:{colour(k)}">{title}</circle>')
    free = 0.0
    for start in bounds:
        x = name_width + (start + 0.5) * across
        if free <= x <= width - ROUND:
            parts.append(text(x, height - 6, f"round {start + 1}", "start"))
            free = x + ROUND
    return frame(width, height, label, "".join(parts)) + legend(list(marks))
