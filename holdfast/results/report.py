"""One self-contained HTML page for one run or several; it loads nothing from elsewhere."""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from statistics import mean

from holdfast.files import write_atomic
from holdfast.progress import track
from holdfast.results import comparison, html, svg
from holdfast.results.details import View, details, read_view
from holdfast.results.record import Result, configs_of
from holdfast.results.runs import runs_in
from holdfast.results.tables import by_protocol, names_of, percent, reference_of, shape
from holdfast.terminal import printable


def write_report(
    paths: Sequence[Path], file: Path, metrics: str | None = None, reference: str | None = None
) -> list[Path]:
    """Writes the page of these runs and returns them. A folder or an archive stands for all runs in it, and a run that
    is in several places counts once. `metrics` overrides the runs' configs. `reference` is the method whose advantage
    over the others is shown."""
    views: dict[tuple[str, int], View] = {}
    runs = runs_in(paths)
    for view in track((read_view(run, metrics) for run in runs), "reading runs", len(runs)):
        views.setdefault((view.result.experiment, view.result.seed), view)
    once = list(views.values())
    text = page(once, reference)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text.encode())
    return [view.run for view in once]


def page(views: Sequence[View], reference: str | None = None) -> str:
    results = [view.result for view in views]
    groups = by_protocol(results)
    parts = [_heading(views)]
    configs = configs_of(results, (view.run for view in views))
    names: dict[str, str] = {}
    for data, some in groups.items():
        names |= names_of(some, configs)
        parts += [_headlines(some, names, data if len(groups) > 1 else ""), _together(data, some, names, reference)]
    parts += [details(view, names[view.result.experiment], is_open=len(views) == 1) for view in views]
    title = f"Holdfast: {', '.join(dict.fromkeys(result.method for result in results))}"
    policy = "; ".join(map(" ".join, POLICY.items()))
    filling = {"policy": policy, "title": escape(title), "body": "\n".join(parts)}
    return printable(re.sub(r"\{\{(\w+)\}\}", lambda match: filling[match[1]], TEMPLATE))


def _heading(views: Sequence[View]) -> str:
    results = [view.result for view in views]
    methods, data = (dict.fromkeys(getattr(r, key) for r in results) for key in ("method", "dataset"))
    seeds = sorted({result.seed for result in results})
    shapes = dict.fromkeys(shape(result.task_sizes) for result in results)
    facts = [
        f"{len(results)} run{'s' * (len(results) > 1)}",
        f"method{'s' * (len(methods) > 1)} {', '.join(methods)}",
        f"on {', '.join(data)}",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
        " and ".join(shapes),
    ]
    return f'<header><h1>Holdfast report</h1><p class="lead">{escape("; ".join(facts))}.</p></header>'


def _headlines(results: Sequence[Result], names: Mapping[str, str], data: str) -> str:
    """The headline numbers of the best experiment."""
    experiments: dict[str, list[Result]] = {}
    for result in results:
        experiments.setdefault(result.experiment, []).append(result)
    fair = [some for some in experiments.values() if some[0].method != "joint"]  # joint training is the upper bound
    best = max(fair or experiments.values(), key=lambda some: mean(r.average_accuracy for r in some))
    sent = mean(sum(sum(ways.values()) for ways in r.bytes.values()) for r in best) / 1e6
    lost = [r.forgetting for r in best if r.forgetting is not None]
    cards = {
        "average accuracy": f"{comparison.spread([r.average_accuracy for r in best])} %",
        "after the last task": f"{comparison.spread([r.last_accuracy for r in best])} %",
        "forgotten": f"{comparison.spread(lost)} points" if lost else "-",
        "worst client": f"{comparison.spread([r.worst_client['accuracy'] for r in best])} %",
        "sent": f"{sent:,.1f} MB",
        "time": f"{mean(sum(r.seconds.values()) for r in best):,.0f} s",
    }
    items = "".join(f"<div><b>{escape(value)}</b><span>{escape(word)}</span></div>" for word, value in cards.items())
    whose = "" if len(experiments) == 1 else f" of the best on average, {escape(names[best[0].experiment])}"
    whose += f" on {escape(data)}" if data else ""
    return f'<section><h2>Headline numbers{whose}</h2><div class="cards">{items}</div></section>'


def _together(data: str, results: Sequence[Result], names: Mapping[str, str], method: str | None) -> str:
    """The curves with bands and the table of all experiments on one data set."""
    reference = reference_of(results, method)
    table = comparison.compared(results, names[reference] if reference else None, names=names)
    runs: dict[str, dict[int, list[float]]] = {row.method: {} for row in table.rows}
    lost: dict[str, list[float]] = {row.method: [] for row in table.rows}
    for result in results:
        name = names[result.experiment]
        runs[name][result.seed] = [100 * value for value in result.accuracy_after_task]
        if result.forgetting is not None:
            lost[name].append(result.forgetting)
    series = {row.method: (list(row.curve), list(runs[row.method].values())) for row in table.rows}
    chart = svg.curves(series, "classes seen", f"accuracy on all seen classes on {data}")
    rows = [[name, seed, *[f"{v:.2f}" for v in curve]] for name, of in runs.items() for seed, curve in of.items()]
    after = [f"after task {t + 1}" for t in range(len(results[0].task_sizes))]
    numbers: list[list[object]] = [["method", "seed", *after], *rows]
    note = "Accuracy in % on all classes seen by then."
    if any(len(of) > 1 for of in runs.values()):
        note += " Bands: from the worst to the best seed."
    body = html.figure(chart, f"{note} {html.link(numbers, 'accuracy.csv')}")
    if len(table.rows) > 1:
        head = ["method", "seeds", *map(str, table.seen), "average", "forgotten", f"{table.reference} over it"]
        cells = [
            [
                row.method,
                str(len(row.seeds)),
                *[percent(row.curve.get(seen)) for seen in table.seen],
                comparison.spread(row.averages),
                comparison.spread(lost[row.method]) if lost[row.method] else "-",
                "-" if row.improvement is None else f"{100 * row.improvement:+.1f}",
                *(["-" if row.chance is None else f"{row.chance:.3g}"] if table.tested else []),
            ]
            for row in table.rows
        ]
        title = "All experiments"
        if table.tested:
            head.append("p")
            title += "; p: paired t-test over seeds, with Holm's correction"
        body += html.table(title, head, cells, "comparison.csv")
    return f"<section><h2>Accuracy on {escape(data)}</h2>{body}</section>"


TEMPLATE = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
_SCRIPT = TEMPLATE.partition("<script>")[2].partition("</script>")[0]
# The page runs its own script and nothing else, and loads nothing, even if a name were not escaped.
POLICY = {
    "default-src": "'none'",
    "script-src": f"'sha256-{b64encode(sha256(_SCRIPT.encode()).digest()).decode()}'",
    "style-src": "'unsafe-inline'",  # widths and colours of charts
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
}
