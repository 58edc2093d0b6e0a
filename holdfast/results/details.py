"""The part of the report about one run: everything from its result, record, config and plan."""

import io
import json
import shlex
from dataclasses import dataclass
from enum import Enum
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from holdfast.files import read_limited
from holdfast.results import html, rounds, svg
from holdfast.results.record import Result, read_clients, read_config, read_run
from holdfast.results.stored import Clients, Tree, stored
from holdfast.results.tables import GROUPS, detected, percent
from holdfast.server import metrics

CONFUSED = 15  # pairs of classes in the table of confusions
NAMED = 30  # up to this many classes are named beside the confusion matrix
REFUSED = 200  # rows of what was refused
MANY = 200  # with more classes than this, all pairs would make the page too large
UNFINISHED = "unfinished.txt"  # in the folder of the finished part of a run: where the run is, and how to go on
# Settings that a federated folder decides instead.
OF_FOLDERS = {"clients", "join", "join_per_task", "class_share", "move_on", "select_from", "partition"}
LARGEST = 2**25  # bytes of a picture
PICTURES = {
    "prototypes.png": ("Prototypes", "as taken, as perturbed by the client, as the proxy reconstructs them"),
    "exemplars.png": ("Exemplars", "what one client keeps, class by class"),
}


@dataclass(frozen=True)
class View:
    """A run, as read from its folder or an archive."""

    run: Path
    result: Result
    lines: list[dict[str, Any]]
    config: Tree
    clients: Clients | None  # None if the run has no plan.json
    batchwise: bool = False  # show the batchwise F1 and recall as well?


def read_view(run: Path, metrics: str | None = None) -> View:
    stored(run).check()
    result, lines = read_run(run)
    settings = read_config(run) or {}
    batchwise = (metrics or settings.get("metrics")) == "batchwise128"
    return View(run, result, lines, settings, read_clients(run, result), batchwise)


class Detail(Enum):
    """How much a page shows of each run, so that pages of many runs stay small."""

    FULL = "full"
    CURVES = "curves"
    ROUNDS = "rounds"  # as before, without the small charts of each task
    TABLES = "tables"


def details(view: View, name: str, place: str, is_open: bool, detail: Detail = Detail.FULL) -> str:
    """One run, under its name in the table of all runs; its path distinguishes it from others. `place` is its id in
    the page."""
    parts = [] if detail is Detail.TABLES else [rounds.of_run(view.lines)]
    parts += [rounds.learned_and_forgotten(view.lines)] if detail in (Detail.FULL, Detail.CURVES) else []
    parts += [_matrix(view), *([] if detail is Detail.TABLES else [_forgetting(view)])]
    if detail is Detail.FULL:
        parts += [_scores(view), _fairness(view), _detector(view), _refused(view), _bytes(view), _seconds(view)]
        parts += [_confusion(view), _pictures(view), _config(view)]
    else:
        only = f"holdfast report {shlex.quote(str(view.run))}"
        parts.append(f"<p class=note>More about this run: <code>{escape(only)}</code></p>")
    state = " open" if is_open else ""
    title = f"<h2>{escape(name)}, seed {view.result.seed}</h2> <span class=note>{escape(_place(view.run))}</span>"
    inner = f'<div class="grid2">{"".join(parts)}</div>'
    return f'<details class=run id="{place}"{state}><summary>{title}</summary>{inner}</details>'


def _place(run: Path) -> str:
    note = run / UNFINISHED
    return note.read_text(encoding="utf-8") if note.exists() else str(run)


def _matrix(view: View) -> str:
    result = view.result
    seen = list(accumulate(result.task_sizes))
    head = ["after task", *(f"task {t + 1}" for t in range(len(seen))), "all"]
    rows = []
    for t, row in enumerate(result.accuracy_matrix):
        cells = [f'<td style="--v:{value:.3f}" class="heat">{percent(value)}</td>' for value in row]
        cells += ["<td></td>"] * (len(seen) - len(row))
        cells.append(f'<td class="n"><b>{percent(result.accuracy_after_task[t])}</b></td>')
        rows.append(f'<tr><th scope="row" class="n">{t + 1}</th>{"".join(cells)}</tr>')
    numbers: list[list[object]] = [["after task", *(f"task {t + 1} in %" for t in range(len(seen)))]]
    numbers += [[t + 1, *(round(100 * value, 2) for value in row)] for t, row in enumerate(result.accuracy_matrix)]
    top = "".join(f'<th scope="col" class="n">{word}</th>' for word in head)
    note = f"<p class=note>Accuracy in % on each task's test images. {html.link(numbers, 'matrix.csv')}</p>"
    inner = f"<thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return html.section("Accuracy matrix", f'{note}<div class="scroll"><table>{inner}</table></div>')


def _scores(view: View) -> str:
    """F1 and recall after each task, with the batchwise ones if requested."""
    result, words = view.result, {"macro_f1": "macro F1", "macro_recall": "macro recall"}
    recorded = result.curves or {}
    if view.batchwise:
        words |= {f"{key}_batchwise128": f"{word[6:]} by batches" for key, word in list(words.items())}
    curves = {word: recorded[key] for key, word in words.items() if key in recorded}
    seen = accumulate(result.task_sizes)
    rows = [
        [str(t + 1), str(classes), percent(result.accuracy_after_task[t]), *(percent(c[t]) for c in curves.values())]
        for t, classes in enumerate(seen)
    ]
    caption = "In % on all classes seen by then, after each task."
    head = ["task", "classes seen", "accuracy", *curves]
    return html.section("F1 and recall", html.table(caption, head, rows, "scores.csv")) if curves else ""


def _forgetting(view: View) -> str:
    lost = {f"task {k + 1}": 100 * one for k, one in enumerate(metrics.forgotten(view.result.accuracy_matrix))}
    if not lost:
        return ""
    shades = [svg.LOSS if value > 0 else svg.GAIN for value in lost.values()]
    chart = svg.bars(lost, "points of accuracy that each task has lost", " points", shades)
    link = html.link([["task", "points"], *lost.items()], "forgetting.csv")
    note = f"Best accuracy of a task before the end, minus its accuracy at the end; green: it has improved. {link}"
    return html.section("Forgetting", html.figure(chart, note))


def _fairness(view: View) -> str:
    """Who is left behind: the accuracy of each client on the classes it has held."""
    result, clients = view.result, view.clients
    means = [[f"{GROUPS[g]} ({g})", percent(value)] for g, value in result.group_accuracy.items() if value is not None]
    body = html.table(
        "Mean accuracy in % of each group of the last task, on the classes they have held",
        ["group", "accuracy"],
        means,
        "groups.csv",
    )
    if clients:
        counts = np.array(result.confusion)
        place = {name: i for i, name in enumerate(result.classes)}
        scores = []
        for client, classes in enumerate(clients.held):
            held = sorted({place[name] for name in classes})
            if held:
                score = metrics.client_accuracy(counts, held)
                scores.append((clients.name(client), clients.groups[client], len(held), score))
        scores.sort(key=lambda score: score[3])
        shown = scores if len(scores) <= 40 else [*scores[:20], *scores[-20:]]
        order = list(GROUPS)
        chart = svg.bars(
            {f"{label} ({group})": 100 * value for label, group, _, value in shown},
            "accuracy of each client on the classes it has held",
            " %",
            [order.index(group) if group in order else 3 for _, group, _, _ in shown],
            most=100,
        )
        rows = [[label, group, str(held), percent(value)] for label, group, held, value in scores]
        some = "" if len(shown) == len(scores) else " The twenty worst and the twenty best."
        body = html.figure(chart, f"Worst first.{some}") + body
        body += html.table("All clients", ["client", "group", "classes held", "accuracy in %"], rows, "clients.csv")
    return html.section("Who is left behind?", body)


def _detector(view: View) -> str:
    """When clients noticed new classes, and when they were wrong; empty for the oracle."""
    found = detected(view.result)
    if found is None:
        return ""
    kinds = {"noticed at once": "hits", "missed": "misses", "noticed late": "late", "false alarm": "false_alarms"}
    happened = [
        (kind, event if isinstance(event, int) else event[0], round_index)  # late events also have a delay
        for round_index, line in enumerate(view.lines)
        for kind, key in kinds.items()
        for event in line.get("detector", {}).get(key, [])
    ]
    clients = sorted({client for _, client, _ in happened})
    shown = {client: i for i, client in enumerate(clients[:60])}
    marks: dict[str, list[tuple[int, int]]] = {kind: [] for kind in kinds}
    for kind, client, round_index in happened:
        if client in shown:
            marks[kind].append((shown[client], round_index))
    labels = {client: view.clients.name(client) if view.clients else f"client {client}" for client in clients}
    bounds = [
        round_index
        for round_index, line in enumerate(view.lines)
        if round_index == 0 or line["task"] != view.lines[round_index - 1]["task"]
    ]
    chart = svg.events(
        [labels[client] for client in shown], len(view.lines), marks, bounds, "when clients noticed new classes"
    )
    rows = [[kind, labels[client], round_index + 1] for kind, client, round_index in happened]
    words = (
        f"{found['hits']:.0f} of {found['transitions']:.0f} transitions noticed at once, {found['late']:.0f} late; "
        f"false alarms in {found['false_alarms']:.0f} of {found['client_rounds']:.0f} client-rounds."
    )
    more = "" if len(clients) == len(shown) else f" The first {len(shown)} of {len(clients)} clients."
    link = html.link([["event", "client", "round"], *rows], "detector.csv")
    return html.section("Detector", html.figure(chart, f"{words}{more} {link}"))


def _refused(view: View) -> str:
    """What the server and the proxy did not use, of whom and why, and whose answers were missing; empty if nothing."""
    rows = []
    for line in view.lines:
        where = str(line["round"])
        told = line.get("refused", [])  # older records have none
        rows += [[where, _client(view, one["client"]), one["kind"], one["reason"]] for one in told]
        heard = {one["client"] for one in told}
        missing = [client for client in line.get("missing", []) if client not in heard]
        rows += [[where, _client(view, client), "missing", "no answer came in time"] for client in missing]
    if not rows:
        return ""
    note = "Only this was left out; everything else of the round counts."
    if len(rows) > REFUSED:
        note += f" The first {REFUSED} of {len(rows)}; all are in record.jsonl."
    return html.section("Refused", html.table(note, ["round", "client", "what", "why"], rows[:REFUSED], "refused.csv"))


def _client(view: View, number: int) -> str:
    return view.clients.name(number) if view.clients else f"client {number}"


def _bytes(view: View) -> str:
    words = {
        "down": "models to clients",
        "up": "models back",
        "extras": "extras back",
        "observed": "broadcasts to clients that only observe",
        "task_end": "models at a task's end",
        "encoder": "encoders to newcomers",
        "teachers": "teachers to clients",
        "shares": "prototypes to the proxy",
        "models": "models from the server to the proxy",
    }
    names = {"server": "the global server", "proxy": "the proxy"}
    sent = [
        (channel, words.get(way, way), count / 1e6)
        for channel, ways in view.result.bytes.items()
        for way, count in ways.items()
    ]
    shades = [list(view.result.bytes).index(channel) for channel, _, count in sent if count]
    chart = svg.bars({what: round(count, 2) for _, what, count in sent if count}, "megabytes sent", " MB", shades)
    rows = [[names.get(channel, channel), what, f"{count:.2f}"] for channel, what, count in sent]
    table = html.table("Megabytes on each channel, in all", ["channel", "what", "MB"], rows, "bytes.csv")
    return html.section("Traffic", chart + table)


def _seconds(view: View) -> str:
    phases = {name: value for name, value in view.result.seconds.items() if value >= 0.005}
    chart = svg.bars(dict(sorted(phases.items(), key=lambda pair: -pair[1])), "seconds of each phase", " s")
    link = html.link([["phase", "seconds"], *view.result.seconds.items()], "seconds.csv")
    return html.section("Time by phase", html.figure(chart, f"Of all rounds. {link}"))


def _confusion(view: View) -> str:
    counts, classes = np.array(view.result.confusion), view.result.classes
    answers = [*classes, "(nothing)"]
    if not counts[:, -1].any():  # every image has a prediction
        counts, answers = counts[:, :-1], answers[:-1]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    picture = heat_image(shares)
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    worst = [divmod(int(i), wrong.shape[1]) for i in np.argsort(-wrong.reshape(-1), kind="stable")[:CONFUSED]]
    rows = [[classes[a], answers[b], str(wrong[a, b]), percent(shares[a, b])] for a, b in worst if wrong[a, b]]
    recall = [[name, percent(float(shares[i, i]))] for i, name in enumerate(classes)]
    table = [
        ["true class", *answers],
        *([c, *row] for c, row in zip(classes, counts.tolist(), strict=True)),
    ]
    link = html.link(table, "confusion.csv") if len(classes) <= MANY else "(its numbers are in result.json)"
    label = f"confusion matrix of {len(classes)} classes"
    plain = f'<img class="confusion" alt="{label}" src="{picture}">'
    chart = svg.matrix(picture, classes, answers, label) if len(classes) <= NAMED else plain
    note = "True class down, answer across, both in the order in which the classes arrived"
    note += "; the last column is for no answer." if len(answers) > len(classes) else "."
    body = html.figure(chart, f"{note} {link}", "matrix" if len(classes) <= MANY else "")
    body += html.table(
        "Most frequent mistakes", ["true class", "answer", "images", "% of the class"], rows, "mistakes.csv"
    )
    of_classes = html.table("", ["class", "accuracy in %"], recall, "classes.csv")
    body += f"<details><summary>Accuracy of each class</summary>{of_classes}</details>"
    return html.section("Confusion matrix at the end", body)


def heat_image(shares: np.ndarray) -> str:
    """A small image from the page's background colour to deep blue; the browser enlarges it without smoothing."""
    low, high = np.array([238, 242, 246]), np.array([16, 72, 120])
    pixels = low + (high - low) * np.sqrt(shares)[..., None]
    file = io.BytesIO()
    Image.fromarray(pixels.round().astype(np.uint8)).save(file, "PNG")
    return html.embedded(file.getvalue())


def _pictures(view: View) -> str:
    parts = []
    for name, (title, about) in PICTURES.items():
        file = stored(view.run).picture(name)
        if file:
            picture = html.embedded(read_limited(file, LARGEST))
            caption = f"<figcaption>{escape(about)}</figcaption>"
            image = f'<img alt="{escape(about, quote=True)}" src="{picture}">'
            parts.append(f"<section><h3>{title}</h3><figure class=picture>{image}{caption}</figure></section>")
    return "".join(parts)


def _config(view: View) -> str:
    rows = [
        [f"{section}.{key}", json.dumps(value, ensure_ascii=False, default=str)]
        for section, values in view.config.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
        if not (view.clients and view.clients.names and section == "plan" and key in OF_FOLDERS)
    ]
    rows = [[name.rstrip("."), value] for name, value in rows]
    rows += [["computed on", json.dumps(view.result.machine)]] if rows and view.result.machine else []
    table = html.table("Every setting, as resolved", ["setting", "value"], rows, "config.csv")
    folded = f"<details><summary>Every setting</summary>{table}</details>"
    return html.section("Config", folded) if rows else ""
