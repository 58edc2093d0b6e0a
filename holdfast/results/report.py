"""One self-contained HTML page for one run or several; it loads nothing from elsewhere."""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from html import escape
from pathlib import Path
from statistics import mean

from holdfast import __version__
from holdfast.files import write_atomic
from holdfast.progress import track
from holdfast.results import comparison, html, rounds, svg
from holdfast.results.details import Detail, View, details, read_view
from holdfast.results.overview import in_a_sentence
from holdfast.results.record import Result, configs_of
from holdfast.results.runs import runs_in, unfinished_below
from holdfast.results.sides import side_by_side
from holdfast.results.tables import by_protocol, names_of, percent, reference_of, shape
from holdfast.terminal import printable

MOST = 1_900_000  # bytes of a page
HELP = (  # shown by the script, without which it would not be true
    '<p class="note help" hidden>Charts of rounds show their values where you point, or with the arrow keys. Drag to '
    "zoom, or press +; double-click, or press 0, to see all.</p>"
)


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
    text = page(once, reference, _status(paths))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text.encode())
    return [view.run for view in once]


def _status(paths: Sequence[Path]) -> str:
    waiting = list(dict.fromkeys(run for path in paths for run in unfinished_below(path)))
    more = f" {len(waiting)} unfinished run{'s are' if len(waiting) > 1 else ' is'} not shown." if waiting else ""
    return f"Written on {datetime.now():%Y-%m-%d} by Holdfast {__version__}.{more}"


def page(views: Sequence[View], reference: str | None = None, status: str = "") -> str:
    """The whole page. If it would be too large with everything about every run, it shows less of each."""
    for detail in Detail:
        text = _page(views, reference, status, detail)
        if len(text.encode()) <= MOST:
            break
    return text


def _page(views: Sequence[View], reference: str | None, status: str, detail: Detail) -> str:
    groups = by_protocol([view.result for view in views])
    configs = configs_of([view.result for view in views], (view.run for view in views))
    names: dict[str, str] = {}
    parts, sentences, links = [], [], []
    for number, (data, some) in enumerate(groups.items()):
        names |= names_of(some, configs)
        kept = {(result.experiment, result.seed) for result in some}
        experiments: dict[str, list[View]] = {}
        for view in views:
            if (view.result.experiment, view.result.seed) in kept:
                experiments.setdefault(names[view.result.experiment], []).append(view)
        sentences.append(in_a_sentence(experiments, some[0].dataset))
        parts.append(_headlines(some, names, data if len(groups) > 1 else ""))
        parts.append(_together(data, some, names, reference, experiments, f"data-{number}"))
        links.append((f"data-{number}", f"Accuracy on {data}"))
    for number, view in enumerate(views):
        name = names[view.result.experiment]
        parts.append(details(view, name, f"run-{number}", is_open=len(views) == 1, detail=detail))
        links.append((f"run-{number}", f"{name}, seed {view.result.seed}"))
    title = f"Holdfast: {', '.join(dict.fromkeys(view.result.method for view in views))}"
    body = "\n".join([_heading(views, sentences, status), *parts])
    contents = "".join(f'<li><a href="#{place}">{escape(text)}</a></li>' for place, text in links)
    policy = "; ".join(map(" ".join, POLICY.items()))
    filled = {"policy": policy, "title": escape(title), "contents": contents, "body": body}
    return printable(
        re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], TEMPLATE)
    )  # at once: a name may look like a field


def _heading(views: Sequence[View], sentences: Sequence[str], status: str) -> str:
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
    said = "".join(f'<p class="summary">{escape(sentence)}</p>' for sentence in sentences)
    about = f"{'; '.join(facts)}."
    return f'<header><h1>Holdfast report</h1>{said}<p class="lead">{escape(about)} {escape(status)}</p>{HELP}</header>'


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


def _together(
    data: str,
    results: Sequence[Result],
    names: Mapping[str, str],
    method: str | None,
    experiments: Mapping[str, Sequence[View]],
    place: str,
) -> str:
    """The curves with bands, the table and the comparisons of all experiments on one data set."""
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
    records = {name: [view.lines for view in some] for name, some in experiments.items()}
    if len(results) > 1:
        body = f'<div class="side">{rounds.of_experiments(records, data)}{body}</div>'
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
        body += html.section("Learned and forgotten, side by side", rounds.tasks_side_by_side(records))
        body += side_by_side(experiments)
    return f'<section id="{place}"><h2>Accuracy on {escape(data)}</h2>{body}</section>'


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
