"""Pictures, from results."""

from io import BytesIO
from itertools import accumulate
from pathlib import Path

from holdfast.files import write_atomic
from holdfast.results.record import Result

INK, FAINT = "#1f3b4d", "#c9d3da"


def accuracy_curve(result: Result, file: Path) -> None:
    """Accuracy on all seen classes after each task, over the accuracy on each task by itself."""
    from matplotlib.figure import Figure  # here, because it takes a second that most commands need not wait

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
    axes.set_title(f"{result.method} on {result.dataset}, seed {result.seed}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    write_atomic(file, buffer.getvalue())
