"""What the report shows round by round: accuracy, losses, refused and absent clients, and each task by itself."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import isfinite
from typing import Any

from holdfast.results import html, lines
from holdfast.results.lines import Marks, Values
from holdfast.results.tables import percent

Line = Mapping[str, Any]  # of a record
REFUSALS = 50  # rows of the table of refused updates
ROWS = 10_000  # of a CSV file with the tasks of all experiments


def task_starts(record: Sequence[Line]) -> list[int]:
    """The rounds, counted from 0, in which tasks begin."""
    return [0, *(i for i, (a, b) in enumerate(pairwise(record), 1) if a["task"] != b["task"])] if record else []


def marks_of(record: Sequence[Line]) -> Marks:
    growths = {i: ", ".join(map(str, one["grown"])) for i, one in enumerate(record) if one.get("grown")}
    return Marks(task_starts(record), growths)


def series(record: Sequence[Line], key: str) -> Values:
    return [_number(one.get(key)) for one in record]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def of_run(record: Sequence[Line]) -> str:
    """The section of one run."""
    marks = marks_of(record)
    scores = {"accuracy": series(record, "accuracy"), "macro F1": series(record, "macro_f1")}
    body = _figure(record, scores, "accuracy and macro F1 on all classes seen by then, in %", "rounds.csv", marks, 100)
    terms = list(dict.fromkeys(term for one in record for term in one.get("losses", {})))
    if terms:
        losses = {term: [_number(one.get("losses", {}).get(term)) for one in record] for term in terms}
        unnamed = Marks(marks.tasks, dict.fromkeys(marks.growths or {}, ""))  # the chart above names the classes
        body += _figure(record, losses, "loss terms, mean over the clients of the round", "losses.csv", unnamed)
    return html.section("Round by round", f'<div class="side">{body}</div>{_absences(record, marks)}')


def _figure(
    record: Sequence[Line], curves: Mapping[str, Values], label: str, file: str, marks: Marks, scale: int = 1
) -> str:
    drawn = lines.chart({name: [values] for name, values in curves.items()}, label, marks, percent=scale == 100)
    digits = 2 if scale == 100 else 4
    rows = [
        [one["round"], one["task"], *("" if v is None else round(scale * v, digits) for v in values)]
        for one, values in zip(record, zip(*curves.values(), strict=True), strict=True)
    ]
    link = html.link([["round", "task", *curves], *rows], file)
    unit = " %" if scale == 100 else ""
    words = " ".join(filter(None, (in_words(name, values, scale, unit) for name, values in curves.items())))
    return html.figure(drawn, f"{label[0].upper()}{label[1:]}. {escape(words)} {link}", "rounds")


def in_words(name: str, values: Values, scale: int = 100, unit: str = " %") -> str:
    """A curve as a sentence, for readers who do not see it."""
    known = [(i, scale * value) for i, value in enumerate(values, 1) if value is not None]
    if not known:
        return ""
    (first, start), (last, end), low = known[0], known[-1], min(known, key=lambda pair: pair[1])
    shown = "{:.1f}" if scale == 100 else "{:.3g}"
    text = f"{name}: {shown.format(start)}{unit} in round {first}, {shown.format(end)}{unit} in round {last}"
    lowest = f", lowest {shown.format(low[1])}{unit} in round {low[0]}" if low[0] not in (first, last) else ""
    return f"{text}{lowest}."


def _absences(record: Sequence[Line], marks: Marks) -> str:
    """Refused updates and absent clients; empty for records that do not have them."""
    if not any("refused" in one or "missing" in one for one in record):
        return ""
    refused = [one.get("refused", []) for one in record]
    missing = [one.get("missing", []) for one in record]
    if not any(refused) and not any(missing):
        return "<p class=note>No update was refused and no selected client was absent.</p>"
    curves = {"refused updates": [float(len(x)) for x in refused], "absent clients": [float(len(x)) for x in missing]}
    body = _figure(record, curves, "refused updates and absent clients per round", "absences.csv", marks)
    rows = [
        [str(one["round"]), *(str(refusal.get(key, "")) for key in ("client", "kind", "reason"))]
        for one in record
        for refusal in one.get("refused", [])
    ]
    if rows:
        more = f", the first {REFUSALS} of {len(rows)}" if len(rows) > REFUSALS else ""
        head = ["round", "client", "kind", "reason"]
        body += html.table(f"Refused updates{more}", head, rows[:REFUSALS], "refused.csv")
    return f'<div class="side">{body}</div>'


def learned_and_forgotten(record: Sequence[Line]) -> str:
    """One small chart per task: its accuracy from the round in which it came."""
    tasks = _tasks(record)
    if len(tasks) < 2:
        return ""
    starts = task_starts(record)
    panels = []
    for t, values in enumerate(tasks):
        best, end = max(v for v in values if v is not None), values[-1] or 0.0
        title = f"task {t + 1}: best {percent(best)} %, end {percent(end)} %"
        panels.append(lines.panel({t: values}, title, f"accuracy over rounds of {title}", starts))
    rows = [
        [one["round"], *("" if v is None else round(100 * v, 2) for v in found)]
        for one, found in zip(record, zip(*tasks, strict=True), strict=True)
    ]
    link = html.link([["round", *(f"task {t + 1} in %" for t in range(len(tasks)))], *rows], "tasks.csv")
    note = f"Accuracy on each task's test images over all rounds, from 0 to 100 %; dashed: a new task begins. {link}"
    return html.section("Learned and forgotten", html.figure(f'<div class="panels">{"".join(panels)}</div>', note))


def _tasks(record: Sequence[Line]) -> list[Values]:
    """Per task its accuracy in every round; None before it came."""
    count = max((len(one.get("task_accuracy", [])) for one in record), default=0)
    found: list[Values] = []
    for t in range(count):
        rows = [one.get("task_accuracy", []) for one in record]
        found.append([_number(row[t]) if t < len(row) else None for row in rows])
    return [values for values in found if any(v is not None for v in values)]


def of_experiments(records: Mapping[str, Sequence[Sequence[Line]]], data: str) -> str:
    """All experiments on one data set in one chart; `records` holds the records of each experiment's seeds."""
    first = next(iter(records.values()))[0]
    same = all(task_starts(one) == task_starts(first) for some in records.values() for one in some)
    marks = Marks(task_starts(first)) if same else Marks()
    curves = {name: [series(one, "accuracy") for one in some] for name, some in records.items()}
    drawn = lines.chart(curves, f"accuracy in % after every round on {data}", marks)
    length = max(len(one) for some in records.values() for one in some)
    means = {name: _means(runs, length) for name, runs in curves.items()}
    rows = [
        [r + 1, *("" if v[r] is None else round(100 * (v[r] or 0.0), 2) for v in means.values())] for r in range(length)
    ]
    link = html.link([["round", *means], *rows], "accuracy-by-round.csv")
    order = sorted(means, key=lambda name: -(_last(means[name]) or 0.0))
    best = f"In the last round {order[0]} is highest with {percent(_last(means[order[0]]))} %"
    worst = f" and {order[-1]} lowest with {percent(_last(means[order[-1]]))} %" if len(order) > 1 else ""
    note = "Accuracy in % on all classes seen by then, after every round"
    note += "; mean over seeds." if any(len(some) > 1 for some in records.values()) else "."
    return html.figure(drawn, f"{note} {escape(best + worst)}. {link}", "rounds")


def _means(runs: Sequence[Values], length: int) -> Values:
    columns = [[v for run in runs if i < len(run) and (v := run[i]) is not None] for i in range(length)]
    return [sum(column) / len(column) if column else None for column in columns]


def _last(values: Values) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def tasks_side_by_side(records: Mapping[str, Sequence[Sequence[Line]]]) -> str:
    """One small chart per experiment with one line per task, of its first seed: who forgets what, and how fast."""
    panels: list[str] = []
    rows: list[list[object]] = [["method", "task", "round", "accuracy in %"]]
    for name, some in records.items():
        tasks = _tasks(some[0])
        if tasks:
            for t, values in enumerate(tasks, 1):
                rows += [[name, t, r, round(100 * v, 1)] for r, v in enumerate(values, 1) if v is not None]
            ends = ", ".join(f"task {t} {percent(_last(values))} %" for t, values in enumerate(tasks, 1))
            label = f"{name}, accuracy at the end: {ends}"
            panels.append(lines.panel(dict(enumerate(tasks)), name, label, task_starts(some[0])))
    note = "Accuracy on each task's test images over all rounds (first seed), one line per task, from 0 to 100 %."
    note += f" {html.link(rows, 'tasks-side-by-side.csv')}" if len(rows) <= ROWS else " Numbers: with each run."
    return html.figure(f'<div class="panels">{"".join(panels)}</div>', note) if panels else ""
