"""What the report shows of several experiments side by side: settings, classes, clients and confusion matrices."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from statistics import mean

import numpy as np

from holdfast.results import html
from holdfast.results.details import View, heat_image
from holdfast.results.stored import Tree
from holdfast.results.tables import percent
from holdfast.server import metrics

CELLS = 6000  # of a table side by side; larger ones are left out
PICTURES = 30  # confusion matrices
Experiments = Mapping[str, Sequence[View]]  # name -> its seeds


def side_by_side(experiments: Experiments) -> str:
    """The sections that compare; empty for one experiment."""
    if len(experiments) < 2:
        return ""
    return "".join([_settings(experiments), _confusions(experiments), _classes(experiments), _clients(experiments)])


def _settings(experiments: Experiments) -> str:
    """Only the settings that differ: first those that all experiments have, then, folded, those of single methods."""
    configs = {name: _flat(some[0].config) for name, some in experiments.items()}
    keys = dict.fromkeys(key for config in configs.values() for key in config if key != "seed")
    cells = {
        key: [json.dumps(c[key], ensure_ascii=False) if key in c else "" for c in configs.values()] for key in keys
    }
    differ = {key: row for key, row in cells.items() if len(set(row)) > 1}
    common = [[key, *row] for key, row in differ.items() if all(row)]
    single = [[key, *row] for key, row in differ.items() if not all(row)]
    head, parts = ["setting", *configs], []
    if common:
        parts.append(html.table("In which all experiments can differ", head, common, "differences.csv"))
    if single:
        table = html.table("Empty: the method has no such setting.", head, single, "own-settings.csv")
        parts.append(_folded("Settings that only some methods have", table))
    return html.section("Settings that differ", "".join(parts)) if parts else ""


def _flat(config: Tree) -> dict[str, object]:
    flat: dict[str, object] = {}
    for section, values in config.items():
        flat |= {f"{section}.{key}": v for key, v in values.items()} if isinstance(values, dict) else {section: values}
    return flat


def _confusions(experiments: Experiments) -> str:
    """Small confusion matrices, with the counts of all seeds added up if these have the same classes."""
    parts: list[str] = []
    rows: list[list[object]] = [["method", "true class", "answer", "images"]]
    for name, some in list(experiments.items())[:PICTURES]:
        classes = some[0].result.classes
        alike = [view.result.confusion for view in some if view.result.classes == classes]
        counts: metrics.Counts = np.sum(alike, axis=0)
        answers = counts if counts[:, -1].any() else counts[:, :-1]
        names = [*classes, "(nothing)"]
        rows += [[name, names[a], names[b], int(counts[a, b])] for a, b in np.argwhere(counts)]
        label = f"confusion matrix of {name}: {percent(metrics.accuracy(counts))} % are right"
        shares = answers / np.maximum(answers.sum(axis=1, keepdims=True), 1)
        image = f'<img class="confusion" alt="{escape(label, quote=True)}" src="{heat_image(shares)}">'
        parts.append(f'<div class="panel"><span>{escape(name)}</span>{image}</div>')
    note = "True class down, answer across, in the order in which classes came; a dark diagonal is good."
    if len(experiments) > PICTURES:
        note += f" The first {PICTURES} of {len(experiments)}."
    small = len(rows) <= CELLS
    note += f" {html.link(rows, 'confusion-side-by-side.csv')}" if small else " The numbers are in each result.json."
    return html.section("Confusion side by side", html.figure(f'<div class="panels">{"".join(parts)}</div>', note))


def _classes(experiments: Experiments) -> str:
    """The accuracy of each class, mean over the seeds."""
    found = {
        name: [dict(zip(v.result.classes, metrics.class_recall(np.array(v.result.confusion)), strict=True)) for v in s]
        for name, s in experiments.items()
    }
    classes = list(dict.fromkeys(name for seeds in found.values() for recall in seeds for name in recall))
    if len(classes) * len(experiments) > CELLS:
        return ""
    rows = [[c, *(_mean([seed[c] for seed in seeds if c in seed]) for seeds in found.values())] for c in classes]
    table = html.table("Accuracy in % of each class at the end", ["class", *found], rows, "per-class.csv")
    return html.section("Classes side by side", _folded("Every class", table))


def _clients(experiments: Experiments) -> str:
    """The accuracy of each client on the classes it has held, where all runs have the same clients."""
    views = [view for some in experiments.values() for view in some]
    first = views[0].clients
    if not first or any(v.clients is None or list(v.clients.names) != list(first.names) for v in views):
        return ""
    if len({len(v.clients.held) for v in views if v.clients}) > 1 or len(first.held) * len(experiments) > CELLS:
        return ""
    found = {name: [client_scores(view) for view in some] for name, some in experiments.items()}
    rows = [
        [first.name(client), *(_mean([s[client] for s in seeds if client in s]) for seeds in found.values())]
        for client in range(len(first.held))
    ]
    caption = "Accuracy in % of each client on the classes it has held"
    table = html.table(caption, ["client", *found], rows, "per-client.csv")
    return html.section("Clients side by side", _folded("Every client", table))


def client_scores(view: View) -> dict[int, float]:
    """By client that holds anything."""
    place = {name: i for i, name in enumerate(view.result.classes)}
    counts, held = np.array(view.result.confusion), view.clients.held if view.clients else []
    return {
        client: metrics.client_accuracy(counts, sorted({place[name] for name in classes}))
        for client, classes in enumerate(held)
        if classes
    }


def _mean(values: Sequence[float]) -> str:
    return percent(mean(map(float, values))) if values else ""


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"
