"""Plots and image sheets, made from results."""

import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from holdfast.data.images import DataSet
from holdfast.files import write_atomic
from holdfast.results.comparison import curve_of
from holdfast.results.record import Result
from holdfast.results.tables import names_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#1f3b4d", "#c9d3da"
LETTERS, TOP = 4.5, 102.0  # the height of a label on an axis in per cent, and its highest position


def accuracy_curve(result: Result, file: Path) -> None:
    """Accuracy on all seen classes after each task, and on each task separately."""
    from matplotlib.figure import Figure  # here, because the import takes a second that most commands do not need

    seen = list(accumulate(result.task_sizes))
    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for k in range(len(seen)):
        rows = result.accuracy_matrix[k:]
        axes.plot(
            seen[k:],
            [100 * row[k] for row in rows],
            color=FAINT,
            marker=".",
            label="each task by itself" if k == 0 else None,
        )
    axes.plot(
        seen,
        [100 * a for a in result.accuracy_after_task],
        color=INK,
        marker="o",
        linewidth=2.5,
        label="all seen classes",
    )
    for x, a in zip(seen, result.accuracy_after_task, strict=True):
        axes.annotate(f"{100 * a:.1f}", (x, 100 * a), textcoords="offset points", xytext=(0, 8), ha="center", color=INK)
    axes.set(xlabel="classes seen", ylabel="accuracy in %", ylim=(0, 105), xticks=seen)
    axes.set_title(f"{result.method} on {_short(result.dataset)}, seed {result.seed}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    _save(figure, file)


def comparison_curves(
    results: Sequence[Result], file: Path, measure: str = "accuracy", names: Mapping[str, str] | None = None
) -> None:
    """A measure on all seen classes after each task, one curve per experiment: the mean over its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    experiments: dict[str, list[Result]] = {}
    for result in results:
        experiments.setdefault(result.experiment, []).append(result)
    names = names or names_of(results)
    ends: dict[int, list[tuple[float, Any]]] = {}
    for experiment, runs in experiments.items():
        seen = list(accumulate(runs[0].task_sizes))
        means = [100 * float(np.mean(after)) for after in zip(*(curve_of(r, measure) for r in runs), strict=True)]
        [line] = axes.plot(seen, means, marker="o", linewidth=2.5, label=names[experiment])
        ends.setdefault(seen[-1], []).append((means[-1], line.get_color()))
    for where, there in ends.items():
        there.sort(key=lambda end: end[0])
        for (value, colour), height in zip(there, _spread([value for value, _ in there]), strict=True):
            axes.annotate(
                f"{value:.1f}",
                (where, height),
                textcoords="offset points",
                xytext=(8, -3),
                color=colour,
                annotation_clip=False,
            )
    ticks = sorted({classes for result in results for classes in accumulate(result.task_sizes)})
    axes.set(xlabel="classes seen", ylabel=f"{measure} in %", ylim=(0, 105), xticks=ticks)
    axes.set_title(_short(", ".join(sorted({result.dataset for result in results}))), loc="left")
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    _save(figure, file)


def _spread(values: Sequence[float]) -> list[float]:
    """Heights for the labels of these values, which are sorted: as close to the values as possible without overlapping,
    and below the top of the picture."""
    heights: list[float] = []
    for value in values:
        heights.append(max(value, heights[-1] + LETTERS) if heights else value)
    limit = TOP
    for i in reversed(range(len(heights))):
        heights[i] = limit = min(heights[i], limit)
        limit -= LETTERS
    return heights


Panels = Mapping[tuple[str, str], Mapping[str, Sequence[Sequence[float]]]]


def panels_of_curves(panels: Panels, across: str, file: Path, marks: bool = True) -> None:
    """A grid of (row, column) panels with one curve per method: the mean over its seeds, and their range."""
    from matplotlib.figure import Figure

    down, over = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    figure = Figure(
        figsize=(1.0 + 3.6 * max(1, len(over)), 0.8 + 2.6 * max(1, len(down))), dpi=120, layout="constrained"
    )
    grid = figure.subplots(max(1, len(down)), max(1, len(over)), squeeze=False)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for (row, column), curves in panels.items():
        axes = grid[down.index(row), over.index(column)]
        for name, runs in curves.items():
            if not runs:
                continue
            values = np.array(runs)
            steps = np.arange(1, values.shape[1] + 1)
            colour = f"C{names.index(name) % 10}"
            axes.plot(steps, values.mean(axis=0), color=colour, marker="." if marks else None, label=name)
            if len(values) > 1:
                axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel=across, ylabel=f"{row} in %", ylim=(0, 105))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(column, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    handles = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), frameon=False, loc="outside lower center", ncols=max(1, len(handles))
    )
    _save(figure, file)


def panels_of_bars(panels: Mapping[str, Mapping[str, Mapping[str, float]]], file: Path) -> None:
    """One panel per key, with one group of bars per measure and one bar per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.0 + 4.6 * max(1, len(panels)), 3.2), dpi=120, layout="constrained")
    grid = figure.subplots(1, max(1, len(panels)), squeeze=False)
    for axes, (title, methods) in zip(grid.flat, panels.items(), strict=False):
        measures = list(next(iter(methods.values())))
        width = 0.8 / len(methods)
        for k, (name, figures) in enumerate(methods.items()):
            places = [i + (k - (len(methods) - 1) / 2) * width for i in range(len(measures))]
            bars = axes.bar(places, [figures[m] for m in measures], width, label=name)
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.set(xticks=range(len(measures)), xticklabels=measures, ylabel="mean over tasks in %", ylim=(0, 105))
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    _save(figure, file)


def phases_bar(networks: Mapping[str, Mapping[str, float]], file: Path) -> None:
    """Where the time of a round goes: one bar per network, in per cent, with its seconds beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.1 + 0.7 * len(networks)), dpi=120, layout="constrained")
    axes = figure.subplots()
    names = list(next(iter(networks.values())))
    order = sorted(names, key=lambda name: -sum(phases[name] for phases in networks.values()))
    shades = [f"C{i}" for i in range(len(order))]
    totals = [sum(phases.values()) for phases in networks.values()]
    left = [0.0] * len(networks)
    for name, shade in zip(order, shades, strict=True):
        parts = [100 * phases[name] / total for phases, total in zip(networks.values(), totals, strict=True)]
        axes.barh(list(networks), parts, left=left, color=shade, label=name)
        left = [a + b for a, b in zip(left, parts, strict=True)]
    for row, total in enumerate(totals):
        axes.annotate(f"{total:.1f} s", (101, row), va="center", color=INK)
    axes.set(xlabel="% of a round", xlim=(0, 110))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=len(order), fontsize="small")
    _save(figure, file)


def contact_sheet(data: DataSet, file: Path) -> None:
    """The first eight training images of each class; with more than fifty classes, of fifty evenly spread ones."""
    count = len(data.classes)
    shown = range(count) if count <= 50 else [round(i * (count - 1) / 49) for i in range(50)]
    image_sheet({data.classes[c]: data.train.images[data.train.by_class[c][:8]] for c in shown}, file)


def image_sheet(rows: Mapping[str, Tensor], file: Path) -> None:
    """One row of images (N, 3, S, S) per name."""
    from matplotlib.figure import Figure

    longest = max(len(images) for images in rows.values())
    figure = Figure(figsize=(2.2 + 0.6 * longest, 0.3 + 0.62 * len(rows)), dpi=120)
    grid = figure.subplots(len(rows), longest, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for line, (name, images) in zip(grid, rows.items(), strict=True):
        for axes, image in zip(line, images, strict=False):
            axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
        short = name if len(name) < 26 else f"{name[:24]}…"
        line[0].text(-0.15, 0.5, short, transform=line[0].transAxes, ha="right", va="center", fontsize=8, color=INK)
    left = 2.1 / figure.get_figwidth()
    figure.subplots_adjust(left=left, right=0.99, top=0.99, bottom=0.01, wspace=0.06, hspace=0.06)
    _save(figure, file)


def prototype_sheet(columns: Sequence[tuple[str, Sequence[np.ndarray]]], file: Path) -> None:
    """The paper's Fig. 5: one column per prototype, with its class and its images (S, S, 3): the original, as its
    client perturbed it, and as the proxy reconstructed it."""
    from matplotlib.figure import Figure

    rows = ("original", "perturbed\nby its client", "reconstructed\nby the proxy")
    figure = Figure(figsize=(1.1 + 0.9 * len(columns), 3.2), dpi=120)
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for k, (name, images) in enumerate(columns):
        for axes, image in zip(grid[:, k], images, strict=True):
            axes.imshow(image, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        grid[0, k].set_title(name if len(name) < 12 else f"{name[:10]}…", fontsize=8)
    for axes, word in zip(grid[:, 0], rows, strict=True):
        axes.set_ylabel(word, rotation=0, ha="right", va="center", fontsize=8, color=INK)
    figure.subplots_adjust(left=1.0 / figure.get_figwidth(), right=0.99, top=0.9, bottom=0.01, wspace=0.06, hspace=0.06)
    _save(figure, file)


def _short(text: str) -> str:
    """The end of a long name, because the end of a path says more than its beginning."""
    return text if len(text) <= 40 else f"…{text[-39:]}"


def _save(figure: "Figure", file: Path) -> None:
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a dollar sign in a name is a dollar sign
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks is drawn as boxes
        figure.savefig(buffer, format="png")
    write_atomic(file, buffer.getvalue())
