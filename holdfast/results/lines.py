"""Line charts with one value per round, as SVG. The page's script adds the values under the pointer and the zoom; it
reads them from the CSV link of the same figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from statistics import mean

from holdfast.results.svg import colour, dash, frame, legend, text

Values = Sequence[float | None]  # one per round; None where there is no value
STEP, TALL = 10, 1000  # units of the plot's own coordinates: per round, and from bottom to top
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640.0, 280.0, 46.0, 12.0, 20.0, 40.0
BANDS = 6  # more bands than this hide each other
LABEL = 62.0  # the width of "task 10" on a phone


@dataclass(frozen=True)
class Marks:
    """The rounds, counted from 0, in which tasks begin and in which the head of the model grew."""

    tasks: Sequence[int] = ()
    growths: Mapping[int, str] | None = None  # round -> its new classes


NONE = Marks()


def chart(curves: Mapping[str, Sequence[Values]], label: str, marks: Marks = NONE, percent: bool = True) -> str:
    """Per name the mean over its runs, and the band from the smallest to the largest value unless there are too many.
    `percent` values are between 0 and 1 on an axis up to 100; others have an axis that begins at 0."""
    rounds = max(len(run) for runs in curves.values() for run in runs)
    scale = 100.0 if percent else 1.0
    values = [scale * value for runs in curves.values() for run in runs for value in run if value is not None]
    ticks = [0.0, 20.0, 40.0, 60.0, 80.0, 100.0] if percent else nice_ticks(max(values, default=1.0))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    span = STEP * max(rounds - 1, 1)
    heights = [(tick, TOP + height * (1 - tick / ticks[-1])) for tick in ticks]
    grid = "".join(f"M{LEFT:g} {y:g}h{width:g}" for _, y in heights)
    labels = "".join(f'<text x="{LEFT - 6:g}" y="{y + 4:g}">{tick:g}</text>' for tick, y in heights)
    parts = [f'<path class="grid" d="{grid}"/><g text-anchor="end">{labels}</g>']
    parts.append(f'<g class="ticks" text-anchor="middle">{_round_ticks(rounds, width)}</g>')
    parts.append(text(LEFT + width / 2, HEIGHT - 4, "round"))
    parts.append(_task_labels(marks.tasks, rounds, width))
    bounds = "".join(f"M{STEP * start - STEP / 2:g} 0V{TALL}" for start in marks.tasks if start)
    inside = [f'<path d="{bounds}" class="task"/>'] if bounds else []
    for start, names in (marks.growths or {}).items():
        about = f"<title>round {start + 1}: new classes {escape(names)}</title>" if names else ""
        inside.append(f'<path d="M{STEP * start} {TALL}v-50" class="growth">{about}</path>')
    for i, runs in enumerate(curves.values()):
        ranges = [_column(runs, r) for r in range(max(map(len, runs)))]
        if len(runs) > 1 and len(curves) <= BANDS:
            inside.append(_band(ranges, scale / ticks[-1], i))
        means = [mean(found) if found else None for found in ranges]
        style = f"stroke:{colour(i)}{dash(i)}"
        inside.append(f'<path d="{path(means, scale / ticks[-1])}" style="{style}" class="curve"/>')
    place = f'x="{LEFT:g}" y="{TOP:g}" width="{width:g}" height="{height:g}"'
    plot = f'<svg class="plot" {place} viewBox="0 0 {span} {TALL}" preserveAspectRatio="none">{"".join(inside)}</svg>'
    parts.append(plot)
    names = legend(list(curves)) if len(curves) > 1 else ""
    return (
        frame(WIDTH, HEIGHT, label, "".join(parts), more=f' class="lines" tabindex="0" data-rounds="{rounds}"') + names
    )


def path(values: Values, scale: float) -> str:
    """The `d` of a line through these values; it is interrupted where there is none. Steps are relative and whole
    numbers, because pages hold thousands of them."""
    parts: list[str] = []
    last: int | None = None
    for i, value in enumerate(values):
        if value is None:
            last = None
            continue
        y = TALL - round(TALL * value * scale)
        if last is None:
            parts.append(f"M{STEP * i} {y}h0")
        else:
            command = "l" if parts[-1].endswith("h0") else " "
            parts.append(f"{command}{STEP}{y - last: d}")
        last = y
    return "".join(parts)


def _column(runs: Sequence[Values], index: int) -> list[float]:
    return [value for run in runs if index < len(run) and (value := run[index]) is not None]


def _band(ranges: Sequence[Sequence[float]], scale: float, index: int) -> str:
    known = [(STEP * i, found) for i, found in enumerate(ranges) if found]
    edge = [(x, max(found)) for x, found in known] + [(x, min(found)) for x, found in reversed(known)]
    points = " ".join(f"{x},{TALL - round(TALL * value * scale)}" for x, value in edge)
    return f'<polygon points="{points}" style="fill:{colour(index)}" class="band"/>'


def nice_ticks(most: float) -> list[float]:
    """Up to six round numbers from 0 to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** floor(log10(most))
    step = next(factor * power for factor in (0.2, 0.25, 0.5, 1.0, 2.0) if 5 * factor * power >= most)
    count = next(n for n in range(1, 6) if n * step >= most - 1e-12)
    return [round(step * n, 12) for n in range(count + 1)]


def _round_ticks(rounds: int, width: float) -> str:
    """Rounds are counted from 1. The script draws them anew after a zoom."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if rounds / s <= 10)
    shown = [1, *(r for r in range(step, rounds + 1, step) if r > 1 + step / 2)]
    y = HEIGHT - BOTTOM + 18
    return "".join(f'<text x="{LEFT + width * (r - 1) / max(rounds - 1, 1):.1f}" y="{y:g}">{r}</text>' for r in shown)


def _task_labels(tasks: Sequence[int], rounds: int, width: float) -> str:
    parts, free = [], 0.0
    for number, start in enumerate(tasks, 1):
        x = LEFT + width * max(start - 0.5, 0) / max(rounds - 1, 1)
        if x >= free and x <= WIDTH - LABEL:
            parts.append(text(x + 3, TOP - 6, f"task {number}", "start"))
            free = x + LABEL
    return f'<g class="tasks">{"".join(parts)}</g>'


def panel(curves: Mapping[int, Values], title: str, label: str, starts: Sequence[int]) -> str:
    """A small chart of percentages without an axis, one of many; `curves` are lines by the number of their colour."""
    span = STEP * max(len(next(iter(curves.values()))) - 1, 1)
    bounds = "".join(f"M{STEP * start - STEP / 2:g} 0V{TALL}" for start in starts if start)
    inside = f'<path d="{bounds}M0 {TALL // 2}H{span}" class="task"/>'
    inside += "".join(
        f'<path d="{path(values, 1.0)}" style="stroke:{colour(i)}" class="curve"/>' for i, values in curves.items()
    )
    about = f'role="img" aria-label="{escape(label, quote=True)}"'
    plot = f'<svg viewBox="0 0 {span} {TALL}" preserveAspectRatio="none" {about}>'
    return f'<div class="panel"><span>{escape(title)}</span>{plot}{inside}</svg></div>'
