"""The report's charts of rounds, its comparisons and its first sentence."""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from chromium import Browser

from holdfast.config import load_config
from holdfast.experiment import run_to_folder
from holdfast.results import lines, rounds
from holdfast.results.details import View, read_view
from holdfast.results.lines import TALL, Marks, chart, nice_ticks, path
from holdfast.results.overview import in_a_sentence
from holdfast.results.record import Result
from holdfast.results.report import MOST, TEMPLATE, page, write_report
from holdfast.results.runs import runs_in
from holdfast.results.stored import Clients

ARCHIVES = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small: dict[str, Any], cache: Path) -> list[Path]:
    """A run of LGA and one of FedAvg."""
    folder = tmp_path_factory.mktemp("rounds")
    methods: list[dict[str, Any]] = [{"name": "lga", "iterations": 2, "perturb_steps": 1}, {"name": "fedavg"}]
    configs = [load_config({**small, "seed": 1, "method": method}) for method in methods]
    return [run_to_folder(config, folder / config.method.name).folder for config in configs]


@pytest.fixture(scope="module")
def view(runs: list[Path]) -> View:
    return read_view(runs[0])


def numbers(text: str, file: str) -> list[list[str]]:
    """The rows of the first CSV file of this name in a page."""
    [found] = re.findall(rf'download="{re.escape(file)}" href="data:text/csv;charset=utf-8,([^"]*)"', text)[:1]
    return list(csv.reader(io.StringIO(unquote(found))))


# charts


def test_a_path_has_whole_relative_steps_and_gaps() -> None:
    assert path([0.5, 0.25, None, 1.0], 1.0) == f"M0 500h0l10 250M30 {TALL - 1000}h0"
    assert path([0.0, 0.1, 0.1, 0.3, 0.2], 1.0) == "M0 1000h0l10-100 10 0 10-200 10 100"
    assert path([None, None], 1.0) == ""


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.57, [0, 0.2, 0.4, 0.6]),
        (3.2, [0, 1, 2, 3, 4]),
        (0, [0, 1]),
        (7, [0, 2, 4, 6, 8]),
        (1234.0, [0, 250, 500, 750, 1000, 1250]),
    ],
)
def test_ticks_are_round_numbers_from_zero_to_above_the_largest(most: float, ticks: list[float]) -> None:
    assert nice_ticks(most) == pytest.approx(ticks)


def test_percentages_reach_to_a_hundred_and_losses_to_their_largest() -> None:
    low = chart({"a": [[0.1, 0.2]]}, "accuracy")
    assert ">100</text>" in low
    assert 'd="M0 900h0l10-100"' in low
    loss = chart({"a": [[0.1, 0.2]]}, "loss", percent=False)
    assert ">0.2</text>" in loss
    assert 'd="M0 500h0l10-500"' in loss


def test_bands_reach_from_the_smallest_to_the_largest_seed() -> None:
    drawn = chart({"a": [[0.2, 0.4], [0.4, 0.8]]}, "accuracy")
    assert 'points="0,600 10,200 10,600 0,800"' in drawn
    assert 'd="M0 700h0l10-300"' in drawn  # the means: 0.3 and 0.6
    assert "band" not in chart({f"{i}": [[0.2, 0.4], [0.4, 0.8]] for i in range(7)}, "accuracy")  # they hide each other


def test_tasks_and_growths_are_marked_where_they_begin() -> None:
    drawn = chart({"a": [[0.1] * 6]}, "accuracy", Marks([0, 3], {3: "<cat>"}))
    assert re.findall(r'<path d="(M\S+ 0V1000)" class="task"/>', drawn) == ["M25 0V1000"]
    assert '<path d="M30 1000v-50" class="growth"><title>round 4: new classes &lt;cat&gt;</title>' in drawn
    assert re.findall(r">(task \d)</text>", drawn) == ["task 1", "task 2"]


def test_a_curve_is_described_in_words() -> None:
    assert rounds.in_words("accuracy", [0.5, 0.2, None, 0.4]) == (
        "accuracy: 50.0 % in round 1, 40.0 % in round 4, lowest 20.0 % in round 2."
    )
    assert rounds.in_words("loss", [1.234, 0.5], 1, "") == "loss: 1.23 in round 1, 0.5 in round 2."
    assert rounds.in_words("loss", [None]) == ""


def test_every_round_of_the_record_is_in_the_page(view: View) -> None:
    text = page([view])
    head, *rows = numbers(text, "rounds.csv")
    assert head == ["round", "task", "accuracy", "macro F1"]
    wanted = [[one["round"], one["task"], 100 * one["accuracy"], 100 * one["macro_f1"]] for one in view.lines]
    assert [[float(cell) for cell in row] for row in rows] == [pytest.approx(row, abs=0.005) for row in wanted]
    head, *rows = numbers(text, "losses.csv")
    terms = list(dict.fromkeys(term for one in view.lines for term in one["losses"]))
    assert head == ["round", "task", *terms]
    assert len(terms) > 1
    for one, row in zip(view.lines, rows, strict=True):
        found = {term: float(cell) for term, cell in zip(terms, row[2:], strict=True) if cell}
        assert found == pytest.approx(one["losses"], abs=1e-4)
    head, *rows = numbers(text, "tasks.csv")
    assert head == ["round", "task 1 in %", "task 2 in %", "task 3 in %"]
    for one, row in zip(view.lines, rows, strict=True):
        assert [float(cell) for cell in row[1:] if cell] == pytest.approx(
            [100 * value for value in one["task_accuracy"]], abs=0.005
        )
    assert text.count('class="panel"') == 3
    assert text.count('class="growth"') == 2 * sum(bool(one["grown"]) for one in view.lines)  # in both charts


def test_refused_and_absent_clients_are_shown_where_the_record_has_them(view: View) -> None:
    older = [{key: value for key, value in one.items() if key not in ("refused", "missing")} for one in view.lines]
    assert "refused" not in rounds.of_run(older)
    none = [{**one, "refused": [], "missing": []} for one in view.lines]
    assert "No update was refused and no selected client was absent." in rounds.of_run(none)
    refusal = {"client": "<east>", "kind": "norm", "reason": "40 times the median"}
    some = [
        {**one, "refused": [refusal] if i == 2 else [], "missing": [4, 5] if i == 3 else []}
        for i, one in enumerate(none)
    ]
    text = rounds.of_run(some)
    assert [row[2:] for row in numbers(text, "absences.csv")[1:]] == [
        [str(float(i == 2)), str(2.0 * (i == 3))] for i in range(len(some))
    ]
    assert numbers(text, "refused.csv")[1:] == [["3", "<east>", "norm", "40 times the median"]]
    assert "<east>" not in text


# comparisons


def test_experiments_are_compared_side_by_side(runs: list[Path]) -> None:
    views = [read_view(run) for run in runs]
    text = page(views)
    name, other = (view.result.method for view in views)
    by_round = numbers(text, "accuracy-by-round.csv")
    assert by_round[0] == ["round", name, other]
    assert [float(row[1]) for row in by_round[1:]] == pytest.approx(
        [100 * one["accuracy"] for one in views[0].lines], abs=0.005
    )
    per_class = {row[0]: row[1:] for row in numbers(text, "per-class.csv")[1:]}
    per_client = {row[0]: row[1:] for row in numbers(text, "per-client.csv")[1:]}
    for i, view in enumerate(views):
        counts = view.result.confusion
        for k, label in enumerate(view.result.classes):
            assert per_class[label][i] == f"{100 * counts[k][k] / sum(counts[k]):.1f}"
        worst = view.result.worst_client
        assert per_client[f"client {worst['client']:.0f}"][i] == f"{100 * worst['accuracy']:.1f}"
    shared = {row[0]: row[1:] for row in numbers(text, "differences.csv")[1:]}
    assert shared["method.name"] == ['"lga"', '"fedavg"']
    assert "plan.tasks" not in shared
    own = {row[0]: row[1:] for row in numbers(text, "own-settings.csv")[1:]}
    assert own["method.iterations"] == ["2", ""]
    counted = {(a, b, c): int(n) for a, b, c, n in numbers(text, "confusion-side-by-side.csv")[1:]}
    for view in views:
        for true, row in zip(view.result.classes, view.result.confusion, strict=True):
            answers = [*view.result.classes, "(nothing)"]
            assert [counted.get((view.result.method, true, answer), 0) for answer in answers] == row
    by_task = [row for row in numbers(text, "tasks-side-by-side.csv")[1:] if row[0] == name and row[1] == "1"]
    assert [float(row[3]) for row in by_task] == pytest.approx(
        [100 * one["task_accuracy"][0] for one in views[0].lines], abs=0.05
    )
    assert text.count("confusion matrix of ") == 4  # one per experiment side by side, one per run


def test_losses_and_gains_have_different_colours(view: View) -> None:
    matrix = [[0.5], [0.6, 0.5], [0.7, 0.2, 0.4]]
    text = page([replace(view, result=replace(view.result, accuracy_matrix=matrix))])
    part = text.split("points of accuracy that each task has lost")[1].split("</div></div>")[0]
    assert re.findall(r"background:var\(--(\w+)\)", part)[:2] == ["gain", "loss"]


def test_bars_of_percentages_end_at_a_hundred(view: View) -> None:
    part = page([view]).split("accuracy of each client on the classes it has held")[1].split("</figure>")[0]
    found = re.findall(r"width:([\d.]+)%.*?<span>([\d.]+) %</span>", part)
    assert len(found) > 3
    assert all(float(width) == pytest.approx(float(value), abs=0.1) for width, value in found)


def test_a_page_of_a_hundred_runs_stays_small() -> None:
    files = [ARCHIVES / "glyphs-mini.jsonl.gz", ARCHIVES / "tiny-mini.jsonl.gz"]  # of 30 and 40 rounds
    views = [read_view(run) for file in files for run in runs_in([file])][:100]
    assert len(views) == 100
    text = page(views, "lga")
    assert len(text.encode()) <= MOST < 2_000_000
    assert text.count('<details class=run id="run-') == 100
    assert text.count('download="rounds.csv"') == text.count('download="losses.csv"') == 100
    assert "holdfast report " in text  # where the rest of a run is


def test_unfinished_runs_are_mentioned(runs: list[Path], tmp_path: Path) -> None:
    shutil.copytree(runs[0], tmp_path / "runs" / "whole")
    shutil.copytree(runs[1], tmp_path / "runs" / "half")
    (tmp_path / "runs" / "half" / "result.json").unlink()
    write_report([tmp_path / "runs"], tmp_path / "x.html")
    assert "1 unfinished run is not shown." in (tmp_path / "x.html").read_text()


# the sentence


def result_of(view: View, method: str, after: list[float], worst: float, seed: int = 1) -> View:
    result: Result = replace(
        view.result,
        method=method,
        seed=seed,
        accuracy_after_task=after,
        last_accuracy=after[-1],
        worst_client={"client": 1, "accuracy": worst},
    )
    return replace(view, result=result, clients=Clients(["west", "east"], ["Zo", "Zo"], [[], []]))


def test_the_summary_says_who_kept_who_fell_and_who_is_left_behind(view: View) -> None:
    lga = result_of(view, "lga", [0.95, 0.94, 0.93], 0.40)
    fedavg = result_of(view, "fedavg", [0.96, 0.5, 0.33], 0.1)
    joint = result_of(view, "joint", [0.99, 0.99, 0.99], 0.9)
    said = in_a_sentence({"lga": [lga], "fedavg": [fedavg], "joint": [joint]}, "glyphs").replace("\u00a0", " ")
    assert said == (
        "After 3 tasks on glyphs, lga kept 93 % (of 95 % after the first task); "
        "plain averaging fell from 96 % to 33 %; "
        "with lga, client east is left behind with 40 % on the classes it has held."
    )
    glfc = result_of(view, "glfc", [0.9, 0.8, 0.7], 0.65)
    said = in_a_sentence({"glfc": [glfc], "joint": [joint]}, "glyphs").replace("\u00a0", " ")
    assert said == "After 3 tasks on glyphs, glfc fell from 90 % to 70 %."


def test_the_summary_of_several_seeds_is_of_their_mean(view: View) -> None:
    seeds = [result_of(view, "lga", [0.8, 0.5], 0.1, 1), result_of(view, "lga", [0.6, 0.3], 0.1, 2)]
    said = in_a_sentence({"lga": seeds}, "glyphs").replace("\u00a0", " ")
    assert "lga fell from 70 % to 40 %" in said


# in a browser

CHART = "document.querySelector('svg.lines')"
TIP = "document.querySelector('figure.rounds .tip').textContent"


@pytest.fixture(scope="module")
def file(view: View, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page") / "report.html"
    place.write_text(page([view]), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def both(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("both") / "report.html"
    write_report(runs, place)
    return place


def box_of(browser: Browser, element: str) -> tuple[float, float, float, float]:
    browser.ask(f"({element}).scrollIntoView({{block: 'center'}})")
    x, y, width, height = browser.ask(f"(b => [b.x, b.y, b.width, b.height])(({element}).getBoundingClientRect())")
    return x, y, width, height


def test_values_appear_under_the_pointer(browser: Browser, file: Path, view: View) -> None:
    browser.open(file)
    x, y, width, height = box_of(browser, f"{CHART}.querySelector('.plot')")
    x, y, width, height = box_of(browser, CHART)
    share = lines.LEFT / lines.WIDTH, 1 - lines.RIGHT / lines.WIDTH
    for index, one in enumerate(view.lines):
        part = share[0] + (share[1] - share[0]) * index / (len(view.lines) - 1)
        browser.move(x + width * part, y + height / 2)
        text = browser.ask(TIP)
        assert text.startswith(f"round {one['round']}\ntask: {one['task']}\n")
        assert f"accuracy: {round(100 * one['accuracy'], 2):g}" in text
    browser.move(2, 2)
    assert browser.ask(TIP) == ""
    assert browser.complaints() == []


def test_values_and_zoom_by_the_keyboard(browser: Browser, file: Path, view: View) -> None:
    browser.open(file)
    browser.ask(f"{CHART}.focus()")
    for key, expected in (("ArrowRight", 2), ("ArrowRight", 3), ("End", 6), ("ArrowLeft", 5), ("Home", 1)):
        browser.press(key, 0)
        assert browser.ask(TIP).startswith(f"round {expected}\n")
    whole = browser.ask(f"{CHART}.querySelector('.plot').getAttribute('viewBox')")
    browser.press("+", 0)
    assert browser.ask(f"{CHART}.querySelector('.plot').getAttribute('viewBox')") == "0 0 20 1000"
    assert browser.ask(f"[...{CHART}.querySelectorAll('.ticks text')].map(t => t.textContent)") == ["1", "2", "3"]
    browser.press("0", 0)
    assert browser.ask(f"{CHART}.querySelector('.plot').getAttribute('viewBox')") == whole
    assert browser.complaints() == []


def test_dragging_zooms_and_a_double_click_shows_all(browser: Browser, file: Path) -> None:
    browser.open(file)
    x, y, width, height = box_of(browser, CHART)
    whole = browser.ask(f"{CHART}.querySelector('.plot').getAttribute('viewBox')")
    for kind, part in (("mousePressed", 0.3), ("mouseMoved", 0.5), ("mouseReleased", 0.8)):
        place = {"x": x + width * part, "y": y + height / 2}
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)
    left, _, span, _ = map(int, browser.ask(f"{CHART}.querySelector('.plot').getAttribute('viewBox')").split())
    assert left > 0
    assert left + span < int(whole.split()[2])
    browser.ask(f"{CHART}.dispatchEvent(new MouseEvent('dblclick'))")
    assert browser.ask(f"{CHART}.querySelector('.plot').getAttribute('viewBox')") == whole


def test_the_confusion_matrix_shows_its_counts(browser: Browser, file: Path, view: View) -> None:
    browser.open(file)
    counts, classes = view.result.confusion, view.result.classes
    x, y, width, height = box_of(browser, "document.querySelector('figure.matrix .confusion')")
    for true, answer in ((0, 0), (1, 4), (5, 5)):
        browser.move(x + width * (answer + 0.5) / 6, y + height * (true + 0.5) / 6)
        text = browser.ask("document.querySelector('figure.matrix .tip').textContent")
        share = 100 * counts[true][answer] / sum(counts[true])
        assert text == (
            f"true: {classes[true]}\nanswer: {classes[answer]}\n"
            f"{counts[true][answer]} of {sum(counts[true])} images, {share:.1f} %"
        )


def test_a_name_in_the_legend_brings_out_its_curve(browser: Browser, both: Path) -> None:
    browser.open(both)
    dimmed = f"[...{CHART}.querySelectorAll('.curve')].map(one => getComputedStyle(one).opacity)"
    assert browser.ask(dimmed) == ["1", "1"]
    browser.ask("document.querySelector('svg.lines + .legend').children[1].focus()")
    assert browser.ask(dimmed) == ["0.15", "1"]
    browser.ask("document.activeElement.blur()")
    assert browser.ask(dimmed) == ["1", "1"]


def test_a_link_of_the_contents_opens_its_run(browser: Browser, both: Path) -> None:
    browser.open(both)
    browser.click("document.querySelector('.contents a[href=\"#run-1\"]')")
    assert browser.ask("document.getElementById('run-1').open") is True
    assert browser.ask("document.getElementById('run-0').open") is False
    assert browser.complaints() == []


def test_two_charts_stand_beside_each_other_where_there_is_room(browser: Browser, both: Path) -> None:
    tops = "[...document.querySelectorAll('.side')[0].children].map(one => one.getBoundingClientRect().top)"
    for width, columns in ((1280, 1), (390, 2)):
        browser.open(both, width, 844)
        assert len({round(top) for top in browser.ask(tops)}) == columns


def test_no_column_is_cut_on_a_phone(browser: Browser, both: Path) -> None:
    browser.open(both, 390, 844)
    browser.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.ask("new Promise(done => setTimeout(done, 100))")
    cut = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
    browser.ask("dispatchEvent(new Event('resize'))")
    assert browser.ask(cut) == 0
    stacked = "document.querySelector('table.stacked tbody td:nth-child(2)')"
    assert browser.ask(f"{stacked}.dataset.label") == "seeds"
    assert "seeds" in browser.ask(f"getComputedStyle({stacked}, '::before').content")


CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const over = colours => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.getClientRects().length || ["SCRIPT", "STYLE"].includes(one.tagName)) continue;
    const behind = [];
    for (let at = one; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const style = getComputedStyle(one), ink = one.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [light(over(behind)), light(over([...behind, ink]))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) found.push([one.tagName, one.className, one.textContent.slice(0, 30), ratio]);
  }
  return found.slice(0, 5);
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser: Browser, both: Path, scheme: str) -> None:
    browser.scheme(scheme)
    browser.open(both)
    browser.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.ask(CONTRAST) == []
    browser.scheme("")


def test_on_paper_everything_is_unfolded(browser: Browser, both: Path) -> None:
    browser.open(both)
    browser.call("Emulation.setEmulatedMedia", media="print")
    hidden = "[...document.querySelectorAll('details h3, details td')].filter(one => !one.checkVisibility()).length"
    on_paper = browser.ask(hidden)
    browser.call("Emulation.setEmulatedMedia", media="")
    assert on_paper == 0 < browser.ask(hidden)


def with_policy(file: Path, to: Path, script: bool) -> Path:
    """The page under a strict Content-Security-Policy: its one script by its hash, or no scripts at all."""
    text = file.read_text(encoding="utf-8")
    [body] = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    to.write_text(text.replace("<head>", f"<head>{meta}", 1), encoding="utf-8")
    return to


def test_the_page_works_under_a_strict_policy_and_without_scripts(browser: Browser, file: Path, tmp_path: Path) -> None:
    browser.open(with_policy(file, tmp_path / "hash.html", script=True))
    browser.ask(f"{CHART}.focus()")
    browser.press("End", 0)
    assert browser.ask(TIP).startswith("round 6\n")
    assert browser.complaints() == []
    browser.open(with_policy(file, tmp_path / "none.html", script=False))
    assert browser.ask("document.querySelectorAll('.tip').length") == 0
    assert browser.ask("document.querySelector('.help').hidden") is True  # nothing is promised that does not work
    assert browser.ask("document.querySelector('svg.lines .curve').getBoundingClientRect().width") > 100
    assert json.loads(browser.ask("JSON.stringify(document.querySelectorAll('a.csv').length)")) > 10


def test_the_page_has_one_script_and_one_style_block() -> None:
    assert TEMPLATE.count("<script") == TEMPLATE.count("<style") == 1
