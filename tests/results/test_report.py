"""The report: one page with everything in it that a run has found, which a browser shows without a network."""

import base64
import csv
import io
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from chromium import Browser
from PIL import Image

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.errors import HoldfastError
from holdfast.experiment import run_to_folder
from holdfast.results import checksums, svg
from holdfast.results.comparison import compared
from holdfast.results.record import Result, configs_of, read_result, write_result
from holdfast.results.report import TEMPLATE, write_report

SMALL: dict[str, Any] = {
    "data": {"name": "glyphs", "classes": 6, "train_per_class": 12, "test_per_class": 6, "size": 16},
    "plan": {"tasks": 3, "clients": 5, "join_per_task": 2, "selected": 3, "rounds": 2, "move_on": 0.7, "memory": 12},
    "train": {"epochs": 1, "batch": 16},
}
LGA = {"name": "lga", "iterations": 2, "perturb_steps": 1}
# Names of a class, a client and a folder that a browser would take for its own; the last is also long.
EVIL = ("<img src=x onerror=alert(1)>", "<svg onload=alert(2)>", f"&amp;\"'<b>{'all_the_birds_of_the_valley_' * 3}")


def run_rounds(folder: Path, seed: int, method: dict[str, Any], tasks: int = 3) -> Path:
    settings = {**SMALL, "plan": {**SMALL["plan"], "tasks": tasks}, "seed": seed, "method": method}
    return run_to_folder(load_config(settings), folder).folder


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A folder with two seeds of two methods."""
    where = tmp_path_factory.mktemp("several")
    for seed in (1, 2):
        run_rounds(where / f"a-fedavg-{seed}", seed, {"name": "fedavg"})
        run_rounds(where / f"b-lga-{seed}", seed, LGA)
    return where


@pytest.fixture(scope="session")
def run(several: Path) -> Path:
    return several / "b-lga-1"


def written(file: Path, *folders: Path) -> Path:
    write_report(folders, file)
    return file


@pytest.fixture(scope="session")
def one_page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("one") / "report.html", run)


@pytest.fixture(scope="session")
def all_page(several: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("all") / "report.html", several)


class Page(HTMLParser):
    """What stands in a page: headings, tables by their names, CSV files by theirs, and all tags."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.text = file.read_text(encoding="utf-8")
        self.headings: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.csv: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._rows: list[list[str]] = []
        self._into: list[str] | None = None
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "table":
            self._rows = self.tables[given.get("aria-label") or f"table {len(self.tables)}"] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._into = self._rows[-1]
        elif tag in ("h1", "h2", "h3"):
            self.headings.append("")
            self._into = self.headings
        elif tag == "a" and given.get("class") == "csv":
            kind, _, numbers = str(given["href"]).partition(",")
            assert kind == "data:text/csv;charset=utf-8"
            self.csv[str(given["download"])] = list(csv.reader(io.StringIO(unquote(numbers))))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "h1", "h2", "h3"):
            self._into = None

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._into is not None:
            self._into[-1] += data

    def table(self, start: str) -> list[list[str]]:
        """The rows, without the head, of the one table whose name begins so."""
        [rows] = [rows for name, rows in self.tables.items() if name.startswith(start)]
        return rows[1:]


@pytest.fixture(scope="session")
def page(one_page: Path) -> Page:
    return Page(one_page)


@pytest.fixture(scope="session")
def result(run: Path) -> Result:
    return read_result(run)


def percents(values: list[float]) -> list[str]:
    return [f"{100 * value:.1f}" for value in values]


# what stands in it


@pytest.mark.parametrize("name", ["one_page", "all_page"])
def test_nothing_is_loaded_from_anywhere(name: str, request: pytest.FixtureRequest) -> None:
    page = Page(request.getfixturevalue(name))
    for tag, given in page.tags:
        for key in ("src", "href", "srcset", "action", "poster"):
            assert (given.get(key) or "data:").startswith(("data:", "#")), (tag, key)
    assert not {tag for tag, _ in page.tags} & {"iframe", "object", "embed", "base", "audio", "video"}
    assert [given for tag, given in page.tags if tag == "script"] == [{}]
    for word in ("://", "@import", "url("):
        assert word not in page.text


def test_every_section_is_there(page: Page, result: Result) -> None:
    assert page.headings == [
        "Holdfast report",
        "Headline numbers",
        "Accuracy on glyphs",
        f"{result.method}, seed 1",
        "Round by round",
        "Learned and forgotten",
        "Accuracy matrix",
        "Forgetting",
        "F1 and recall",
        "Who is left behind?",
        "Detector",
        "Traffic",
        "Time by phase",
        "Confusion matrix at the end",
        "Prototypes",
        "Exemplars",
        "Config",
    ]
    said = " ".join(page.words)
    assert f"1 run; method {result.method}; on glyphs; seed 1; 3 tasks, 6 classes." in said
    assert ("details", {"class": "run", "id": "run-0", "open": None}) in page.tags
    assert ("html", {"lang": "en"}) in page.tags


def test_headline_numbers(page: Page, result: Result) -> None:
    said = " ".join(page.words)
    assert result.forgetting is not None
    for value in (result.average_accuracy, result.last_accuracy, result.worst_client["accuracy"]):
        assert f"{100 * value:.1f} %" in said
    assert f"{100 * result.forgetting:.1f} points" in said
    sent = sum(sum(ways.values()) for ways in result.bytes.values())
    assert f"{sent / 1e6:,.1f} MB" in said


def test_the_matrix(page: Page, result: Result) -> None:
    [rows] = [rows for rows in page.tables.values() if rows[0][0] == "after task"]
    assert rows[0] == ["after task", "task 1", "task 2", "task 3", "all"]
    for t, row in enumerate(rows[1:]):
        own = percents(result.accuracy_matrix[t])
        assert row == [str(t + 1), *own, *[""] * (2 - t), *percents([result.accuracy_after_task[t]])]
    numbers = [[float(value) for value in row[1:]] for row in page.csv["matrix.csv"][1:]]
    assert numbers == [[pytest.approx(100 * value, abs=0.005) for value in row] for row in result.accuracy_matrix]
    assert page.csv["accuracy.csv"][0] == ["method", "seed", "after task 1", "after task 2", "after task 3"]
    assert [float(v) for v in page.csv["accuracy.csv"][1][2:]] == pytest.approx(
        [100 * value for value in result.accuracy_after_task], abs=0.005
    )


def test_f1_and_recall_and_beside_them_the_batchwise_ones_where_the_config_wants_them(
    page: Page, result: Result, run: Path, tmp_path: Path
) -> None:
    curves = result.curves or {}
    right = [result.accuracy_after_task, curves["macro_f1"], curves["macro_recall"]]
    rows = list(zip("123", "246", *map(percents, right), strict=True))
    assert [tuple(row) for row in page.table("In % on all classes seen by then")] == rows
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text('metrics = "batchwise128"\n[method]\nname = "lga"\n')
    batchwise = [[0.3, 0.2, 0.11], [0.31, 0.22, 0.13]]  # so few test images are one batch, of which both are the same
    names = ("macro_f1_batchwise128", "macro_recall_batchwise128")
    write_result(tmp_path / "run", replace(result, curves={**curves, **dict(zip(names, batchwise, strict=True))}))
    both = Page(written(tmp_path / "report.html", tmp_path / "run"))
    assert both.csv["scores.csv"][0][3:] == ["macro F1", "macro recall", "F1 by batches", "recall by batches"]
    expected = list(zip("123", "246", *map(percents, [*right, *batchwise]), strict=True))
    assert [tuple(row) for row in both.table("In % on all classes seen by then")] == expected


def test_forgetting(page: Page, result: Result) -> None:
    lost = {task: float(points) for task, points in page.csv["forgetting.csv"][1:]}
    assert list(lost) == ["task 1", "task 2"]
    assert mean(lost.values()) == pytest.approx(100 * (result.forgetting or 0.0))


def test_who_is_left_behind(page: Page, result: Result, run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    recall = {name: result.confusion[i][i] / 6 for i, name in enumerate(result.classes)}
    clients = page.table("All clients")
    assert len(clients) == len(plan["arrivals"])
    for label, group, held, accuracy in clients:
        number = int(label.removeprefix("client "))
        classes = {plan["class_names"][c] for arrival in plan["arrivals"][number] for c in arrival["classes"]}
        assert (group, held) == (plan["groups"][-1][number], str(len(classes)))
        assert accuracy == f"{100 * mean(recall[name] for name in classes):.1f}"
    worst = result.worst_client
    assert (clients[0][0], clients[0][3]) == (f"client {worst['client']:.0f}", f"{100 * worst['accuracy']:.1f}")
    groups = {row[0][-3:-1]: row[1] for row in page.table("Mean accuracy in % of each group")}
    assert groups == {name: f"{100 * value:.1f}" for name, value in result.group_accuracy.items() if value is not None}


def test_the_detector(page: Page, result: Result) -> None:
    assert result.detection is not None
    events = [row[0] for row in page.csv["detector.csv"][1:]]
    assert events.count("noticed at once") == result.detection["hits"]
    assert events.count("false alarm") == result.detection["false_alarms"]
    assert f"{result.detection['hits']:.0f} of {result.detection['transitions']:.0f} transitions" in " ".join(
        page.words
    )


def test_channels_have_colours_of_their_own(one_page: Path) -> None:
    chart = one_page.read_text().split("megabytes sent")[1]
    found = dict(re.findall(r">([^<]+)</div><i style=[^>]*background:(var\(--c\d\))", chart))
    assert found["models to clients"] == found["models back"] != found["teachers to clients"]


def test_traffic_and_time(page: Page, result: Result) -> None:
    ways = [count for ways in result.bytes.values() for count in ways.values()]
    assert [row[2] for row in page.table("Megabytes")] == [f"{count / 1e6:.2f}" for count in ways]
    assert {phase: float(value) for phase, value in page.csv["seconds.csv"][1:]} == result.seconds


def test_confusion(page: Page, result: Result) -> None:
    head, *rows = page.csv["confusion.csv"]
    assert head == ["true class", *result.classes]
    assert [row[0] for row in rows] == result.classes
    counts = np.array(result.confusion)
    assert not counts[:, -1].any()  # nobody is without an answer, so that needs no column
    assert [[int(count) for count in row[1:]] for row in rows] == counts[:, :-1].tolist()
    mistakes = page.table("Most frequent mistakes")
    wrong = [(int(count), true, said) for true, said, count, _ in mistakes]
    assert wrong
    assert [count for count, _, _ in wrong] == sorted((count for count, _, _ in wrong), reverse=True)
    names = [*result.classes, "(nothing)"]
    assert all(result.confusion[names.index(true)][names.index(said)] == count for count, true, said in wrong)
    assert page.table("classes.csv") == [
        [name, f"{100 * result.confusion[i][i] / 6:.1f}"] for i, name in enumerate(result.classes)
    ]
    [chart] = re.findall(r"<svg[^>]*confusion matrix of 6 classes.*?</svg>", page.text)
    assert re.findall(r'<div class="name" title="(.*?)">', chart) == [
        escape(name, quote=True) for name in result.classes
    ]
    [picture] = [given["href"] for tag, given in page.tags if tag == "image" and given.get("class") == "confusion"]
    with Image.open(io.BytesIO(base64.b64decode(str(picture).partition(",")[2]))) as image:
        assert image.size == (6, 6)
        darkness = -np.asarray(image.convert("L")).astype(float)
    assert darkness[counts[:, :-1] == counts.max()].min() > darkness[counts[:, :-1] == 0].max()


def test_no_answer_has_a_column_where_there_is_one(result: Result, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    counts = np.array(result.confusion)
    counts[0] = [0] * 6 + [6]
    write_result(tmp_path / "run", replace(result, confusion=counts.tolist()))
    page = Page(written(tmp_path / "report.html", tmp_path / "run"))
    assert page.csv["confusion.csv"][0][-1] == "(nothing)"
    assert page.table("Most frequent mistakes")[0] == [result.classes[0], "(nothing)", "6", "100.0"]
    assert "the last column is for no answer" in " ".join(page.words)


def test_very_many_classes_have_a_confusion_matrix_without_names(result: Result, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    many = [f"class {i}" for i in range(40)]
    counts = np.concatenate([np.eye(40, dtype=int), np.zeros((40, 1), dtype=int)], axis=1)
    write_result(tmp_path / "run", replace(result, confusion=counts.tolist(), classes=many))
    (tmp_path / "run" / "plan.json").unlink()
    page = Page(written(tmp_path / "report.html", tmp_path / "run"))
    assert [tag for tag, given in page.tags if given.get("class") == "confusion"] == ["img"]


def test_pictures_are_inside(page: Page, run: Path) -> None:
    inside = [str(given["src"]) for tag, given in page.tags if tag == "img"]
    for name in ("prototypes.png", "exemplars.png"):
        assert f"data:image/png;base64,{base64.b64encode((run / name).read_bytes()).decode()}" in inside


def test_every_setting(page: Page) -> None:
    config = {name: json.loads(value) for name, value in page.table("Every setting")}
    assert (config["seed"], config["method.name"], config["method.iterations"]) == (1, "lga", 2)
    assert (config["plan.tasks"], config["data.size"], config["train.batch"]) == (3, 16, 16)


def test_tables_have_their_numbers_as_csv(page: Page) -> None:
    for start, file in (("All clients", "clients.csv"), ("Every setting", "config.csv"), ("Megabytes", "bytes.csv")):
        assert page.csv[file][1:] == page.table(start)


def test_who_was_refused_and_why(page: Page, tmp_path: Path) -> None:
    """Left out where nothing was."""
    faults = {"nan": {"clients": [1]}, "drop": {"clients": [2]}}
    settings = {**SMALL, "plan": {**SMALL["plan"], "tasks": 1}, "method": {"name": "fedavg"}, "faults": faults}
    run = run_to_folder(load_config(settings), tmp_path / "faulty")
    lines = [json.loads(line) for line in (run.folder / "record.jsonl").read_text().splitlines()]
    write_report([run.folder], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<h3>Refused</h3>" in text
    told = [(line["round"], one) for line in lines for one in line["refused"]]
    assert {one["client"] for _, one in told} == {1}
    for number, one in told:
        assert f'<td class="n">{number}</td><td>client 1</td><td>not finite</td><td>{escape(one["reason"])}' in text
    lost = [line["round"] for line in lines if 2 in line["missing"]]
    assert lost
    assert all(f'<td class="n">{number}</td><td>client 2</td><td>missing</td>' in text for number in lost)
    assert "<h3>Refused</h3>" not in page.text


def test_several_runs_side_by_side(all_page: Path, several: Path) -> None:
    page = Page(all_page)
    results = [read_result(folder) for folder in sorted(several.iterdir())]
    table = compared(results)
    assert page.headings[2:3] == ["Accuracy on glyphs"]
    assert [word for word in page.headings if ", seed " in word] == [f"{r.method}, seed {r.seed}" for r in results]
    assert page.headings.count("Confusion matrix at the end") == 4
    assert "Headline numbers of the best on average, " in page.headings[1]
    rows = page.table("All experiments")
    for row, expected in zip(rows, table.rows, strict=True):
        assert row[:5] == [expected.method, "2", *percents(list(expected.curve.values()))]
        assert row[5].startswith(f"{100 * mean(expected.averages):.1f} ± ")
    assert rows[0][7] == f"{100 * (table.rows[0].improvement or 0.0):+.1f}"
    assert rows[1][7:] == (["-", "-"] if table.tested else ["-"])  # two seeds may differ alike: then nothing is tested
    shapes = [(tag, given.get("class")) for tag, given in page.tags]
    assert (shapes.count(("polyline", "curve")), shapes.count(("polygon", "band"))) == (2, 4)  # per task; per round
    assert page.csv["comparison.csv"][1:] == rows
    assert not [given for tag, given in page.tags if given.get("class") == "run" and "open" in given]


def test_the_legend_tells_more_curves_apart_than_there_are_colours() -> None:
    chart = svg.curves({f"method {i}": ([2, 4], [[50.0, 40.0]]) for i in range(22)}, "classes seen", "accuracy")
    lines = re.findall(r'<polyline points="[^"]*" (style="[^"]*")', chart)
    marks = re.findall(r"<span>(.*?)method \d+</span>", chart)
    assert (len(set(lines)), len(set(marks))) == (22, 22)


def test_the_same_run_twice_counts_once(several: Path, run: Path, tmp_path: Path) -> None:
    page = Page(written(tmp_path / "report.html", several, run))
    assert len([word for word in page.headings if ", seed " in word]) == 4


def test_a_copy_of_a_run_counts_once(several: Path, tmp_path: Path) -> None:
    shutil.copytree(several, tmp_path / "copy")
    folders = write_report([several, several / ".." / several.name, tmp_path / "copy"], tmp_path / "report.html")
    assert folders == sorted(several.iterdir())
    both, once = Page(tmp_path / "report.html"), Page(written(tmp_path / "once.html", several))
    assert both.text == once.text


def test_experiments_of_one_method_have_names_that_tell_them_apart(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    write_result(tmp_path / "other", replace(read_result(run), experiment="x"))
    page = Page(written(tmp_path / "report.html", run, tmp_path / "other"))
    names = [row[0] for row in page.table("All experiments")]
    assert len(set(names)) == 2
    assert [word for word in page.headings if ", seed 1" in word] == [f"{name}, seed 1" for name in names]
    assert {str(run), str(tmp_path / "other")} <= set(page.words)


def test_names_say_wherein_experiments_differ_beyond_their_methods(run: Path, tmp_path: Path) -> None:
    """Other images, other orders: nobody is to take one column for the same question."""
    other = {**SMALL, "data": {**SMALL["data"], "seed": 1}, "method": {"name": "fedavg"}, "seed": 1}
    run_to_folder(load_config(other), tmp_path / "other")
    page = Page(written(tmp_path / "report.html", run, tmp_path / "other"))
    method = read_result(run).method
    assert {row[0] for row in page.table("All experiments")} == {f"{method} (data.seed=0)", "fedavg (data.seed=1)"}
    assert f"{method} (data.seed=0), seed 1" in page.headings


def test_long_runs_have_seconds_that_one_can_read() -> None:
    text = svg.bars({"train": 123456.7, "proxy": 9.87654}, "seconds of each phase", " s")
    assert "<span>123,457 s</span>" in text
    assert "<span>9.877 s</span>" in text


def test_a_test_that_cannot_be_made_is_not_explained(several: Path, tmp_path: Path) -> None:
    page = Page(written(tmp_path / "report.html", several / "a-fedavg-1", several / "b-lga-1"))
    assert "t-test" not in page.text
    assert page.csv["comparison.csv"][0][-1].endswith(" over it")


def test_protocols_that_differ_in_the_sizes_of_tasks_alone_stay_apart(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    write_result(tmp_path / "other", replace(read_result(run), task_sizes=[1, 2, 3], experiment="x"))
    page = Page(written(tmp_path / "report.html", run, tmp_path / "other"))
    assert [word for word in page.headings if word.startswith("Accuracy on")] == [
        "Accuracy on glyphs, tasks of 2, 2, 2 classes",
        "Accuracy on glyphs, tasks of 1, 2, 3 classes",
    ]


def test_who_is_told_of_new_classes_has_no_detector(several: Path, tmp_path: Path) -> None:
    page = Page(written(tmp_path / "report.html", several / "a-fedavg-1"))
    assert "Detector" not in page.headings


def test_runs_of_different_numbers_of_tasks(run: Path, tmp_path: Path) -> None:
    """As in a folder in which somebody keeps everything."""
    run_rounds(tmp_path / "two", 1, {"name": "fedavg"}, tasks=2)
    page = Page(written(tmp_path / "report.html", run, tmp_path / "two"))
    assert len([word for word in page.headings if ", seed 1" in word]) == 2


def test_runs_on_different_data_sets(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    write_result(tmp_path / "other", replace(read_result(run), dataset="digits", experiment="x"))
    page = Page(written(tmp_path / "report.html", run, tmp_path / "other"))
    assert [word for word in page.headings if word.startswith("Accuracy on")] == [
        "Accuracy on glyphs",
        "Accuracy on digits",
    ]


def test_a_single_task_has_nothing_to_forget(tmp_path: Path) -> None:
    page = Page(written(tmp_path / "report.html", run_rounds(tmp_path / "run", 1, {"name": "fedavg"}, tasks=1)))
    assert "Forgetting" not in page.headings
    assert "; 1 task, 6 classes." in " ".join(page.words)
    assert "Confusion matrix at the end" in page.headings


@pytest.mark.parametrize(
    ("gone", "sections"),
    [
        (["plan.json"], {"Who is left behind?", "Config"}),
        (["plan.json", "config.toml", "prototypes.png", "exemplars.png"], {"Who is left behind?"}),
    ],
)
def test_records_that_travel_alone_give_a_page(run: Path, tmp_path: Path, gone: list[str], sections: set[str]) -> None:
    shutil.copytree(run, tmp_path / "run")
    for name in gone:
        (tmp_path / "run" / name).unlink()
    page = Page(written(tmp_path / "report.html", tmp_path / "run"))
    assert {*page.headings} & {"Who is left behind?", "Config"} == sections
    assert "All clients" not in page.tables
    assert "Detector" in page.headings


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.toml", "name = 3"),
        ("config.toml", "method = 2"),
        ("record.jsonl", None),
        ("result.json", {"accuracy_after_task": [], "task_sizes": [], "accuracy_matrix": []}),
        ("result.json", {"accuracy_after_task": [0.5]}),
        ("result.json", {"accuracy_matrix": [[0.5], [0.5], [0.5]]}),
        ("result.json", {"curves": {"macro_f1": [0.5]}}),
        ("result.json", {"confusion": []}),
        ("result.json", {"confusion": [[1] * 6] * 6}),
        ("result.json", {"last_accuracy": 0.123}),
    ],
)
def test_files_that_do_not_fit_each_other_are_named(
    run: Path, tmp_path: Path, file: str, text: str | dict[str, Any] | None
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / checksums.NAME).unlink()  # as in runs of older versions
    place = tmp_path / "run" / file
    if text is None:
        place.write_text("".join(place.read_text().splitlines(keepends=True)[:-2]))
    elif isinstance(text, str):
        place.write_text(text)
    else:
        place.write_text(json.dumps({**json.loads(place.read_text()), **text}))
    blamed = place.with_name("record.jsonl") if text == {"last_accuracy": 0.123} else place  # which of them is wrong?
    with pytest.raises(HoldfastError, match=re.escape(f"{blamed} is damaged (")):
        write_report([tmp_path / "run"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_record_without_its_figures_is_named_and_curves_of_old_results_are_made_from_it(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / checksums.NAME).unlink()  # as in runs of older versions
    facts = json.loads((run / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps({**facts, "curves": None}))
    assert read_result(tmp_path / "run").curves == facts["curves"]
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    for key in ("macro_f1", "accuracy"):
        cut = [{name: value for name, value in line.items() if name != key} for line in lines]
        (tmp_path / "run" / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in cut))
        with pytest.raises(HoldfastError, match=r"record\.jsonl is damaged"):
            write_report([tmp_path / "run"], tmp_path / "report.html")


def test_a_config_that_one_seed_lacks_does_not_take_the_names_away(several: Path, tmp_path: Path) -> None:
    shutil.copytree(several, tmp_path / "all")
    folders = sorted((tmp_path / "all").iterdir())
    results = [read_result(folder) for folder in folders]
    whole = configs_of(results, folders)
    (folders[1] / "config.toml").unlink()
    assert configs_of(results, folders).keys() == whole.keys()


def test_a_page_in_a_new_folder_and_by_batches_if_one_asks(
    run: Path, tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "new" / "deep" / "x.html"
    assert holdfast("report", run, "--out", file, "--metrics", "batchwise128")[0] == 0
    assert "F1 by batches" in Page(file).csv["scores.csv"][0]
    code, _, err = holdfast("report", tmp_path / "nowhere", "--out", tmp_path / "other" / "x.html")
    assert (code, (tmp_path / "other").exists()) == (2, False)
    for place, says in ((tmp_path / "new", "which is a folder; name a file"), (file / "x.html", "is a file; choose")):
        code, _, err = holdfast("report", run, "--out", place)
        assert (code, err.strip().count("\n")) == (2, 0)
        assert says in err


def test_a_result_names_its_machine(page: Page, result: Result) -> None:
    assert result.machine
    assert f"torch {torch.__version__}" in result.machine
    assert ["computed on", json.dumps(result.machine)] in page.table("Every setting")


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="holds no finished run; give the folder of a run, or of several"):
        write_report([tmp_path], tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="session")
def evil_page(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The page of a federation of folders with such names."""
    where = tmp_path_factory.mktemp("evil")
    glyphs = load_data(load_config(SMALL).data)
    top = where / EVIL[2]
    for i, client in enumerate((EVIL[1], "north")):
        for c, name in enumerate((EVIL[0], "b", "c", "d")):
            folder = top / "clients" / client / name
            folder.mkdir(parents=True)
            for k, row in enumerate(glyphs.train.by_class[c][6 * i : 6 * i + 6].tolist()):
                Image.fromarray(glyphs.train.images[row].permute(1, 2, 0).numpy()).save(folder / f"{k}.png")
    settings = {
        "data": {"name": f"folder:{top}", "size": 16},
        "plan": {"tasks": 2, "selected": 2, "rounds": 2, "memory": 8},
        "train": SMALL["train"],
        "method": LGA,
    }
    return written(where / "report.html", run_to_folder(load_config(settings), where / "run").folder)


def test_names_are_shown_and_never_run(evil_page: Path) -> None:
    page = Page(evil_page)
    for tag, given in page.tags:
        assert not [key for key in given if key.startswith("on")], tag
        assert tag != "b" or not given
    assert [given for tag, given in page.tags if tag == "script"] == [{}]
    assert page.table("classes.csv")[0][0] == EVIL[0]
    assert EVIL[1] in {row[0] for row in page.table("All clients")}
    assert any(word.startswith("Accuracy on folder:") and word.endswith(EVIL[2]) for word in page.headings)
    assert page.csv["confusion.csv"][0][1] == EVIL[0]


# in a browser


@pytest.mark.parametrize("name", ["one_page", "all_page", "evil_page"])
def test_a_page_loads_without_a_complaint(browser: Browser, name: str, request: pytest.FixtureRequest) -> None:
    browser.open(request.getfixturevalue(name))
    assert browser.ask("document.querySelectorAll('table.sortable button').length") > 10
    assert browser.ask("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert browser.ask("document.querySelectorAll('[onerror], [onload]').length") == 0
    assert browser.complaints() == []


def test_complaints_are_noticed(browser: Browser, tmp_path: Path) -> None:
    """So that a page without any is known to have none."""
    (tmp_path / "bad.html").write_text("<img src=x onerror='throw 1'><script>console.error('no')</script>")
    browser.open(tmp_path / "bad.html")
    assert {event["method"] for event in browser.complaints()} >= {
        "Runtime.consoleAPICalled",
        "Runtime.exceptionThrown",
    }


HARM = """<script>document.title = 'owned'</script><img src=x onerror="document.title = 'owned'">
<a id=harm href="javascript:document.title='owned'">a</a><img src="http://127.0.0.1:9/x.png">
<link rel=stylesheet href="http://127.0.0.1:9/x.css"><iframe src="data:text/html,<script>1</script>"></iframe>"""


def test_the_page_runs_nothing_but_its_own_script(browser: Browser, one_page: Path, tmp_path: Path) -> None:
    """Even if a name got into the page unescaped."""
    harmed = tmp_path / "page.html"
    harmed.write_text(one_page.read_text().replace('<main id="content">', f'<main id="content">{HARM}'))
    for file, blocked in ((one_page, 0), (harmed, 5)):
        browser.open(file)
        browser.ask("document.getElementById('harm')?.click()")
        assert browser.ask("document.title").startswith("Holdfast: ")
        assert browser.ask(f"!!({BUTTON % 3}).click || true")
        refusals = [event for event in browser.complaints() if "Content Security Policy" in str(event["params"])]
        assert len(refusals) >= blocked if blocked else not browser.complaints()
        given = [event["params"] for event in browser.events if event["method"].startswith("Network.")]
        asked = {one["requestId"] for one in given if one.get("request", {}).get("url", "").startswith("http")}
        assert asked <= {one["requestId"] for one in given if one.get("blockedReason") == "csp"}
        browser.click(BUTTON % 3)
        assert sorted_as(browser, CLIENTS) == ["none", "none", "none", "ascending"]  # its own script runs


def test_tables_are_downloaded_under_the_policy(browser: Browser, one_page: Path, tmp_path: Path) -> None:
    browser.open(one_page)
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.click("document.querySelector('a.csv[download=\"clients.csv\"]')")
    deadline = time.monotonic() + 20
    while not (tmp_path / "clients.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "clients.csv").read_text().startswith("client,group,classes held,accuracy in %\n")
    assert browser.complaints() == []


CLIENTS = "document.querySelector('table[aria-label=\"All clients\"]')"
BUTTON = f"{CLIENTS}.tHead.rows[0].cells[%d].firstElementChild"


def column(browser: Browser, table: str, index: int) -> list[str]:
    found: list[str] = browser.ask(f"[...{table}.tBodies[0].rows].map(row => row.cells[{index}].textContent)")
    return found


def sorted_as(browser: Browser, table: str) -> list[str]:
    """What each column says about its order."""
    found: list[str] = browser.ask(f"[...{table}.tHead.rows[0].cells].map(cell => cell.getAttribute('aria-sort'))")
    return found


def test_tables_sort_by_a_click(browser: Browser, one_page: Path) -> None:
    browser.open(one_page)
    before = column(browser, CLIENTS, 3)
    numbers = sorted(map(float, before))
    browser.click(BUTTON % 3)
    assert [float(cell) for cell in column(browser, CLIENTS, 3)] == numbers
    assert sorted_as(browser, CLIENTS) == ["none", "none", "none", "ascending"]
    browser.click(BUTTON % 3)
    assert [float(cell) for cell in column(browser, CLIENTS, 3)] == numbers[::-1]
    assert sorted_as(browser, CLIENTS) == ["none", "none", "none", "descending"]
    browser.click(BUTTON % 0)
    assert column(browser, CLIENTS, 0) == [f"client {number}" for number in range(9)]
    assert sorted_as(browser, CLIENTS) == ["ascending", "none", "none", "none"]
    assert browser.complaints() == []


def test_tables_sort_by_the_keyboard(browser: Browser, one_page: Path) -> None:
    browser.open(one_page)
    numbers = sorted(map(float, column(browser, CLIENTS, 3)))
    browser.ask(f"({BUTTON % 2}).focus()")
    browser.press("Tab", 9)
    assert browser.ask(f"document.activeElement === {BUTTON % 3}")
    browser.press("Enter", 13, "\r")
    assert [float(cell) for cell in column(browser, CLIENTS, 3)] == numbers
    browser.press(" ", 32, " ")
    assert [float(cell) for cell in column(browser, CLIENTS, 3)] == numbers[::-1]
    assert browser.ask(f"document.activeElement === {BUTTON % 3}")  # the place is kept
    assert browser.ask(f"getComputedStyle({BUTTON % 3}).outlineStyle") == "solid"  # and seen


def test_figures_with_deviations_sort_as_numbers(browser: Browser, all_page: Path) -> None:
    browser.open(all_page)
    table = "document.querySelector('table[aria-label^=\"All experiments\"]')"
    averages = sorted(float(cell.split()[0]) for cell in column(browser, table, 5))
    browser.click(f"{table}.tHead.rows[0].cells[5].firstElementChild")
    assert [float(cell.split()[0]) for cell in column(browser, table, 5)] == averages
    browser.click(f"{table}.tHead.rows[0].cells[7].firstElementChild")
    assert column(browser, table, 7)[-1] == "-"  # the reference has none


def test_a_name_that_begins_with_a_digit_is_no_number(browser: Browser, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    names = ["pear", "3 kings", "apple", "10 green bottles", "fig", "zebra"]
    plan = json.loads((run / "plan.json").read_text())
    called = dict(zip(plan["class_names"], names, strict=True))
    (tmp_path / "run" / "plan.json").write_text(json.dumps({**plan, "class_names": names}))
    result = read_result(run)
    write_result(tmp_path / "run", replace(result, classes=[called[name] for name in result.classes]))
    browser.open(written(tmp_path / "report.html", tmp_path / "run"))
    table = "document.querySelector('table[aria-label=\"classes.csv\"]')"
    browser.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.click(f"{table}.tHead.rows[0].cells[0].firstElementChild")
    assert column(browser, table, 0) == ["3 kings", "10 green bottles", "apple", "fig", "pear", "zebra"]


def test_runs_open_by_the_keyboard(browser: Browser, all_page: Path) -> None:
    browser.open(all_page)
    first = "document.querySelector('details.run')"
    assert browser.ask(f"{first}.open") is False
    browser.ask(f"{first}.firstElementChild.focus()")
    browser.press("Enter", 13, "\r")
    assert browser.ask(f"{first}.open") is True


@pytest.mark.parametrize("name", ["one_page", "all_page", "evil_page"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_fits_its_screen(
    browser: Browser, name: str, width: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    browser.open(request.getfixturevalue(name), width, 844)
    browser.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width
    picture = tmp_path / f"{width}.png"
    picture.write_bytes(base64.b64decode(browser.call("Page.captureScreenshot")["data"]))
    with Image.open(picture) as image:
        assert image.size == (width, 844)
        pixels = np.asarray(image.convert("L"))
    assert len(np.unique(pixels)) > 50
    assert 0.005 < np.mean(pixels < 128) < 0.5  # ink on paper


CUT = """[...document.querySelectorAll('svg text, svg .name, .bars > *')].filter(one => {
  const [inner, outer] = [one.getBoundingClientRect(), one.closest('svg, .bars').getBoundingClientRect()];
  return inner.left < outer.left - 1 || inner.right > outer.right + 1;
}).map(one => one.textContent)"""


@pytest.mark.parametrize("name", ["one_page", "evil_page"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_word_of_a_chart_is_cut(browser: Browser, name: str, width: int, request: pytest.FixtureRequest) -> None:
    browser.open(request.getfixturevalue(name), width, 844)
    assert browser.ask("document.querySelectorAll('.bars > span').length") > 5
    assert browser.ask(CUT) == []
    starts = "[...document.querySelectorAll('.name')].map(one => getComputedStyle(one).textOverflow)"
    assert set(browser.ask(starts)) == {"ellipsis"}


def test_a_time_line_of_many_tasks_has_room_for_its_words(browser: Browser, tmp_path: Path) -> None:
    chart = svg.events(["W" * 40], 100, {"noticed": [(0, 3)]}, range(0, 100, 5), "when")
    (tmp_path / "chart.html").write_text(TEMPLATE.replace("{{body}}", chart))
    browser.open(tmp_path / "chart.html", 390, 844)
    assert browser.ask(CUT) == []
    edges = browser.ask(
        "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect()).map(b => [b.x, b.right])"
    )
    assert len(edges) > 2
    assert all(right < left for (_, right), (left, _) in pairwise(edges))


def test_dark_for_those_who_want_it(browser: Browser, one_page: Path) -> None:
    browser.open(one_page)
    shades = {}
    for scheme in ("light", "dark"):
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=wanted)
        colours = browser.ask("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        shades[scheme] = [sum(map(int, colour.strip("rgb()").split(","))) for colour in colours]
    browser.call("Emulation.setEmulatedMedia", features=[])
    assert shades["light"][0] > 600 > 300 > shades["light"][1]
    assert shades["dark"][0] < 300 < 600 < shades["dark"][1]
