"""How well a trained model does by each of its answers: `python scripts/answers.py RUN ...` (folders or addresses in an
archive) prints one line per method and answer: average and last accuracy in %, the mean over the runs (seeds).

A run with `method.inference=gauss` is answered by the head, by the nearest mean, by Gaussians and by head and Gaussians
together; with `nme` by the head and by the nearest mean of exemplars. All are in its record, after every task."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from holdfast.results.record import read_result, read_run


def answers_of(run: Path) -> dict[str, tuple[float, float]]:
    """Average and last accuracy by every answer that the run's record has."""
    curves: dict[str, list[float]] = {}
    for line in read_run(run)[1]:
        for name, accuracy in line.get("answers", {}).items():
            curves.setdefault(name, []).append(accuracy)
    return {name: (fmean(curve), curve[-1]) for name, curve in curves.items()}


def table(runs: Sequence[Path]) -> str:
    """Markdown: the mean of runs of one experiment, with its standard error where there are several."""
    found: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for run in runs:
        result = read_result(run)
        for name, pair in answers_of(run).items():
            found.setdefault((result.experiment, result.dataset, result.method, name), []).append(pair)
    lines = ["| data | method | answer | runs | average | last |", "| --- | --- | --- | --- | --- | --- |"]
    for (_, data, method, name), pairs in found.items():
        average, last = (shown([pair[i] for pair in pairs]) for i in range(2))
        lines.append(f"| {data} | {method} | {name} | {len(pairs)} | {average} | {last} |")
    return "\n".join(lines)


def shown(values: Sequence[float]) -> str:
    error = f" ± {100 * stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{error}"


if __name__ == "__main__":
    print(table([Path(word) for word in sys.argv[1:]]))
