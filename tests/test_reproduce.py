"""The paper's tables and figures by their numbers: the runs they need, and the pages made from them."""

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from PIL import Image

from holdfast.compare import Spec, known_runs
from holdfast.config import Config, PlanSettings, to_toml
from holdfast.data.glyphs import CHARACTERS
from holdfast.experiment import run_name
from holdfast.paper import pages as paper_pages
from holdfast.paper import published as paper
from holdfast.paper.items import ITEMS, PROXY, REPLAY, SHORT, Experiment, Scale
from holdfast.paper.tables import Found
from holdfast.reproduce import CLASSES, config_of, passes, setup_of, spec_of
from holdfast.results import plots
from holdfast.results.comparison import MEASURES
from holdfast.results.record import read_result, write_result
from holdfast.simulation.plan import Plan, make_plan

RESULTS = Path(__file__).parents[1] / "benchmarks"
PAGES = Path(__file__).parents[1] / "docs" / "reproduced"
SCALES: tuple[Scale, ...] = ("mini", "paper")
LGA = Experiment("cifar100", 5, "lga")


def plan_of(config: Config) -> Plan:
    """The plan of a run without its images."""
    return _plan(config.plan, config.data.classes or CLASSES[config.data.name])


@cache
def _plan(settings: PlanSettings, classes: int) -> Plan:
    return make_plan(settings, [f"class {c}" for c in range(classes)], {}, 0)


# what is run


def test_every_table_and_figure_is_there() -> None:
    assert list(ITEMS) == [*(f"table{n}" for n in range(1, 13)), *(f"fig{n}" for n in range(3, 9))]
    assert [name for name, item in ITEMS.items() if not item.experiments] == ["table10"]  # arithmetic


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ITEMS)
def test_every_experiment_can_be_run(name: str, scale: Scale) -> None:
    for one in ITEMS[name].experiments:
        config = config_of(one, scale, 2021)
        plan = plan_of(config)
        assert len(plan.tasks) == config.plan.tasks == one.tasks  # stand-ins keep the number of tasks
        words = [word for word in config.method.label.split() if "=" not in word]  # settings found for the mini scale
        assert " ".join(words) == {REPLAY: "fedavg replay"}.get(one.method, one.method)
        assert config.seed == 2021
        assert passes(config) > 0
        if scale == "paper":
            assert config.data.name == one.dataset
            assert config.model.name == "resnet18"
            assert sum(map(len, plan.tasks)) == CLASSES[one.dataset]


@pytest.mark.parametrize("name", ITEMS)
def test_stand_ins_share_nothing_with_the_data_that_settings_were_tuned_on(name: str) -> None:
    """Those are glyphs of data.seed 1 and the classes of TinyImageNet from 50 on."""
    for one in ITEMS[name].experiments:
        data = config_of(one, "mini", 2021).data
        assert data.first_class == 0
        if one.dataset == "cifar100":
            assert (data.name, data.seed) == ("glyphs", 0)
            assert (data.classes or 0) <= len(CHARACTERS)
        else:
            assert data.name == "tiny-imagenet"
            assert (data.classes or 200) <= 50


def test_names_of_the_tables_are_methods_with_settings() -> None:
    assert spec_of("glfc") == Spec("glfc")
    assert spec_of(REPLAY) == Spec("fedavg", (("method.replay", True),))
    assert spec_of("lga w/o cbl") == Spec("lga", (("method.cbl", False),))


def test_at_mini_scale_an_hours_methods_are_run_unless_others_are_named() -> None:
    table = ITEMS["table3"]
    assert [one.method for one in table.wanted("mini")] == list(SHORT)
    assert [one.method for one in table.wanted("paper")] == [REPLAY, *paper.ACCURACY["cifar100", 10]]
    assert [one.method for one in table.wanted("mini", ["bic", "lga"])] == ["bic", "lga"]
    assert {one.method for one in ITEMS["table1"].wanted("mini")} == {REPLAY, *paper.ACCURACY["cifar100", 5]}
    assert {one.tasks for one in ITEMS["fig7"].wanted("mini")} == {5, 20}
    assert {one.tasks for one in ITEMS["fig7"].wanted("paper")} == {5, 10, 20}
    assert {one.method for one in ITEMS["fig6"].wanted("mini")} == {"lga", *PROXY}


@pytest.mark.parametrize("scale", SCALES)
def test_heterogeneity_really_differs(scale: Scale) -> None:
    held: dict[int | None, set[int]] = {}
    for one in ITEMS["table9"].experiments:
        plan = plan_of(config_of(one, scale, 2021))
        first = [len(arrivals[0].classes) for arrivals in plan.arrivals]
        held.setdefault(one.share, set()).update(first)
    assert held == {40: {4}, 50: {5}, 60: {6}}


@pytest.mark.parametrize("name", [name for name in ITEMS if ITEMS[name].experiments])
def test_every_client_has_classes_to_tell_apart(name: str) -> None:
    for one in ITEMS[name].wanted("mini"):
        plan = plan_of(config_of(one, "mini", 2021))
        assert min(len(arrivals[0].classes) for arrivals in plan.arrivals) >= 2


@pytest.mark.parametrize(("scale", "sizes"), [("paper", [500, 1000, 1500, 2000]), ("mini", [25, 50, 75, 100])])
@pytest.mark.parametrize("tasks", [5, 10])
def test_memories(scale: Scale, sizes: list[int], tasks: int) -> None:
    some = [one for one in ITEMS["table11"].experiments if one.tasks == tasks]
    configs = [config_of(one, scale, 2021) for one in some]
    assert [config.plan.memory for config in configs] == sizes
    assert len({replace(config.plan, memory=0) for config in configs}) == 1
    assert configs[-1] == config_of(replace(LGA, tasks=tasks), scale, 2021)  # a run that other tables share


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("tasks", [5, 10, 20])
def test_orders_differ(scale: Scale, tasks: int) -> None:
    configs = [config_of(replace(LGA, tasks=tasks, order=order), scale, 2021) for order in (1, 2, 3)]
    assert len({tuple(map(frozenset, plan_of(config).tasks)) for config in configs}) == 3
    assert configs[0] == config_of(replace(LGA, tasks=tasks), scale, 2021)


def test_the_cost_of_a_run_by_hand() -> None:
    tasks, rounds, selected, epochs, classes, images, memory = 5, 6, 5, 2, 3, 100, 100  # 3: 60 % of 5
    assert passes(config_of(LGA, "mini", 2021)) == tasks * rounds * selected * epochs * (classes * images + memory)
    one = Experiment("imagenet", 5, "lga")  # 140: 70 % of 200
    assert passes(config_of(one, "paper", 2021)) == 5 * 10 * 10 * 20 * (140 * 1281 + 2000)


# The ablations of `lga` are being run again with its weights of now; BENCHMARKS.md says which are there.
COMMITTED = [
    *((dataset, method) for dataset in ("cifar100", "mini-imagenet", "tiny-imagenet") for method in (REPLAY, "lga")),
    ("cifar100", "lga w/o cbl"),
]


@pytest.mark.parametrize(("dataset", "method"), COMMITTED)
def test_runs_that_are_committed_are_those_that_are_wanted(dataset: str, method: str) -> None:
    for seed in paper.SEEDS:
        folder = committed()[run_name(config_of(Experiment(dataset, 5, method), "mini", seed))]
        assert read_result(folder).seed == seed


@cache
def committed() -> dict[str, Path]:
    return known_runs(RESULTS)


# the pages

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holdfast: Command) -> Command:
    """`holdfast reproduce`, which writes to `pages`."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: holdfast("reproduce", "--to", "pages", *words)


def rows_of(page: str) -> list[list[str]]:
    """The lines of all tables of a page, without their heads."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return [row for i, row in enumerate(rows) if "---" not in row[0] and "---" not in [*rows, [""]][i + 1][0]]


BATCHWISE = 0.25  # of the accuracy


def pretend(folder: Path, one: Experiment, seed: int, curve: list[float]) -> None:
    """A finished run of an experiment with this accuracy after each task; F1 is half of it, recall a quarter."""
    config = config_of(one, "mini", seed)
    where = folder / run_name(config)
    where.mkdir(parents=True)
    (where / "config.toml").write_text(to_toml(config))
    other = {"macro_f1": [value / 2 for value in curve], "macro_recall": [value / 4 for value in curve]}
    other |= {f"{name}_batchwise128": [BATCHWISE * value for value in curve] for name in list(other)}
    real = read_result(committed()[run_name(config_of(LGA, "mini", 2021))])
    changed = {"accuracy_after_task": curve, "average_accuracy": mean(curve), "curves": other}
    changed |= {"task_sizes": [5] * len(curve), "accuracy_matrix": [curve[: t + 1] for t in range(len(curve))]}
    write_result(where, replace(real, seed=seed, **changed))


def test_a_table_has_our_figures_beside_the_published_ones(command: Command, tmp_path: Path) -> None:
    code, out, err = command("table1", "--show", "--runs", RESULTS)
    assert (code, err) == (0, "")
    assert "table1: accuracy, T = 5, CIFAR-100 and MiniImageNet" in out
    page = (tmp_path / "pages" / "table1.md").read_text()
    assert "scale mini; seeds 2021, 2022, 2023. Made by `holdfast reproduce table1 --scale mini --runs " in page
    assert f" --runs {RESULTS} --show`." in page
    assert "**CIFAR-100: glyphs, 5 tasks of 5 classes; T = 5; accuracy in %**" in page
    assert "**MiniImageNet: TinyImageNet at 32 px, 5 tasks of 5 classes; T = 5; accuracy in %**" in page
    rows = rows_of(page)
    assert [row[0] for row in rows] == [REPLAY, *paper.ACCURACY["cifar100", 5]] * 2
    for dataset, line in (("cifar100", rows[13]), ("mini-imagenet", rows[27])):
        ours = [committed()[run_name(config_of(Experiment(dataset, 5, "lga"), "mini", seed))] for seed in paper.SEEDS]
        curves = [read_result(folder).accuracy_after_task for folder in ours]
        theirs = paper.ACCURACY[dataset, 5]["lga"]
        after = zip(map(mean, zip(*curves, strict=True)), theirs.values, strict=True)
        assert line[:7] == ["lga", "3", *(f"{100 * a:.1f} ({b})" for a, b in after)]
        assert re.fullmatch(rf"{100 * mean(map(mean, curves)):.1f} ± [\d.]+ \({theirs.average}\)", line[7])
    assert rows[10][8].endswith(" (5.2)")  # lga w/o cbl, as printed
    numbers = list(csv.reader((tmp_path / "pages" / "table1.csv").read_text().splitlines()))
    wanted = ["mini-imagenet", "TinyImageNet at 32 px, 5 tasks of 5 classes", "5", "lga", "60", "200", "the data set's"]
    assert {len(row) for row in numbers} == {15}
    assert numbers[0][10:] == [f"after task {t} in %" for t in range(1, 6)]
    [again] = [row for row in numbers if row[:10] == [*wanted, "cosine", "2023", "accuracy"]]
    assert [float(value) for value in again[10:]] == pytest.approx([100 * value for value in curves[-1]], abs=0.005)


def test_without_runs_a_table_has_the_published_figures_and_says_how_to_get_ours(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    assert command("table3", "--show")[0] == 0
    page = (tmp_path / "pages" / "table3.md").read_text()
    rows = rows_of(page)
    assert [row[0] for row in rows] == list(paper.ACCURACY["cifar100", 10])
    for row, line in zip(rows, paper.ACCURACY["cifar100", 10].values(), strict=True):
        assert row[1:13] == ["0", *(f"- ({value})" for value in line.values), f"- ({line.average})"]
    assert "Not run here: afc, bic, " in page
    assert "`holdfast reproduce table3 --scale mini --methods all`" in page


def test_heterogeneity_has_a_part_for_each_share_and_measure(command: Command, tmp_path: Path) -> None:
    curves = {one: [0.01 * t + (one.share or 0) / 200 for t in range(10)] for one in ITEMS["table9"].experiments}
    for one, curve in curves.items():
        pretend(tmp_path / "runs", one, 1, [value + (one.method == "lga") / 10 for value in curve])
    assert command("table9", "--show", "--seeds", "1")[0] == 0
    page = (tmp_path / "pages" / "table9.md").read_text()
    measures = ("accuracy", "F1 averaged over batches of 128", "macro F1")
    titles = re.findall(r"\*\*.*?; T = 10; (\d+) % of classes; (.*?) in %\*\*", page)
    assert titles == [(share, measure) for share in ("40", "50", "60") for measure in measures]
    rows = rows_of(page)
    assert [row[0] for row in rows] == ["glfc", "lga"] * 9
    assert [row[2] for row in rows[0::6]] == ["20.0 (74.9)", "25.0 (86.2)", "30.0 (90.0)"]
    batchwise = [f"{BATCHWISE * ours:.1f} ({b})" for ours, b in ((30, 75.1), (35, 86.2), (40, 89.2))]
    assert [row[2] for row in rows[3::6]] == batchwise
    assert [row[2] for row in rows[5::6]] == ["15.0", "17.5", "20.0"]  # the published ones are batchwise
    assert [row[13] for row in rows[0::6]] == [
        f"10.0 ({paper.HETEROGENEITY['accuracy', share]['glfc'].improvement})" for share in (40, 50, 60)
    ]
    assert "fit averages over batches of 128" in page


def test_memory_has_a_line_for_each_size(command: Command, tmp_path: Path) -> None:
    for one in ITEMS["table11"].experiments:
        pretend(tmp_path / "runs", one, 1, [(one.memory or 0) / 2500] * one.tasks)
    assert command("table11", "--show", "--seeds", "1")[0] == 0
    rows = rows_of((tmp_path / "pages" / "table11.md").read_text())
    sizes = ["500 (here 25)", "1000 (here 50)", "1500 (here 75)", "2000 (here 100)"]
    assert [row[0] for row in rows] == sizes * 10  # 2 numbers of tasks, 3 measures, two of them in two ways
    assert [row[7] for row in rows[:4]] == ["20.0 (63.6)", "40.0 (67.6)", "60.0 (68.3)", "80.0 (73.0)"]
    assert [row[8] for row in rows[:4]] == ["60.0 (9.4)", "40.0 (5.4)", "20.0 (4.7)", ""]
    theirs = [59.2, 62.3, 63.9, 66.3]
    batchwise = [f"{BATCHWISE * ours:.1f} ({value})" for ours, value in zip((20, 40, 60, 80), theirs, strict=True)]
    assert [row[12] for row in rows[28:32]] == batchwise
    assert [row[12] for row in rows[36:]] == ["5.0", "10.0", "15.0", "20.0"]


def test_orders(command: Command, tmp_path: Path) -> None:
    for k, one in enumerate(ITEMS["table12"].experiments):
        pretend(tmp_path / "runs", one, 1, [k / 100] * one.tasks)
    assert command("table12", "--show", "--seeds", "1")[0] == 0
    pretend(tmp_path / "runs", Experiment("cifar100", 5, "lga"), 2, [1.0] * 5)
    assert command("table12", "--show", "--seeds", "1,2")[0] == 0  # a seed that only one order has
    page = (tmp_path / "pages" / "table12.md").read_text()
    assert "| T = 5 (seed 1) | T = 10 (seed 1) | T = 20 (seed 1) |" in page
    assert "scale mini; seeds 1, 2 (T = 5); 1 (T = 10); 1 (T = 20)." in page
    rows = rows_of(page)
    names = {1: "order 1 (the data set's)", 2: "order 2 (random:2)", 3: "order 3 (random:3)"}
    assert [(row[0], row[1]) for row in rows] == [(names[order], method) for order, method in paper.ORDERS]
    theirs = [value for line in paper.ORDERS.values() for value in line.values()]
    assert [cell for row in rows for cell in row[2:]] == [f"{k}.0 ({value})" for k, value in enumerate(theirs)]


def test_traffic_needs_neither_runs_nor_images(command: Command, tmp_path: Path) -> None:
    code, out, err = command("table10", "--scale", "paper", "--data-root", tmp_path / "none")
    assert (code, err) == (0, "")
    assert "ResNet-18, CIFAR-100, T = 10" in out
    rows = {row[0].split(" (")[0]: row[1:] for row in rows_of((tmp_path / "pages" / "table10-paper.md").read_text())}
    models, theirs = re.fullmatch(r"([\d.]+) \(([\d.]+)\)", rows["models sent back"][0]).groups()  # type: ignore[union-attr]
    shares, _ = rows["prototypes' gradients to the proxy"][0].split(" ")
    assert float(theirs) == paper.COST["models"]
    assert float(models) == pytest.approx(paper.COST["models"], rel=0.02)
    ratio = float(rows["prototypes' gradients to the proxy"][1].split(" ")[0])
    assert ratio == pytest.approx(100 * float(shares) / float(models), abs=0.01)


@pytest.mark.parametrize("name", ["fig3", "fig6", "fig8"])
def test_figures_are_drawn_from_the_runs_that_are_there(command: Command, tmp_path: Path, name: str) -> None:
    code, out, _ = command(name, "--show", "--runs", RESULTS, "--json")
    assert (code, json.loads(out)) == (0, {"pages": [f"pages/{name}.md"]})
    page = (tmp_path / "pages" / f"{name}.md").read_text()
    assert "these are ours alone" in page
    assert f"({name}.png)" in page
    with Image.open(tmp_path / "pages" / f"{name}.png") as picture:
        assert sum(count > 0 for count in picture.convert("L").histogram()) > 20
    rows = list(csv.reader((tmp_path / "pages" / f"{name}.csv").read_text().splitlines()))
    assert {"2021", "2022", "2023"} == {row[8] for row in rows[1:]}
    assert {"accuracy", "f1", "recall"} <= {row[9] for row in rows[1:]} <= set(MEASURES)  # older records have no others


@pytest.mark.parametrize("name", ["fig3", "fig5"])
def test_a_page_names_no_picture_that_is_not_there(command: Command, tmp_path: Path, name: str) -> None:
    """No run has been made."""
    (tmp_path / "runs").mkdir()
    assert command(name, "--show")[0] == 0
    named = re.findall(r"!\[.*\]\((.*)\)", (tmp_path / "pages" / f"{name}.md").read_text())
    assert [file for file in named if not (tmp_path / "pages" / file).exists()] == []


@pytest.mark.parametrize("scale", SCALES)
def test_the_list_says_what_each_costs(command: Command, tmp_path: Path, scale: Scale) -> None:
    code, out, _ = command("list", "--scale", scale, "--json")
    facts = json.loads(out)
    assert (code, [fact["item"] for fact in facts]) == (0, list(ITEMS))
    assert [fact["runs_a_seed"] for fact in facts] == [len(item.wanted(scale)) for item in ITEMS.values()]
    figure = next(fact for fact in facts if fact["item"] == "fig5")
    assert figure["images_a_seed"] == passes(config_of(LGA, scale, 0))
    text = command("list", "--scale", scale)[1]
    assert "hours per seed" in text
    assert all(f" {name} " in text for name in ITEMS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tabel1"], "there is no 'tabel1' to reproduce; did you mean 'table1'?"),
        (["table13"], "there is no 'table13' to reproduce; did you mean 'table"),
        (["table1", "--methods", "lga,lgaa"], "table1 has no method 'lgaa'"),
        (["table9", "--methods", "icarl"], "table9 has no method 'icarl'"),
        (["table1", "--seeds", "x"], "--seeds 'x' is not a list such as"),
        (["table1", "--scale", "tiny"], "Invalid value for '--scale'"),
        (["table1", "--show", "--runs", "nothere"], "there is no folder nothere with runs to show"),
        (["all", "--show"], "there is no folder runs with runs to show"),
        (["table10", "--to", __file__], f"{__file__} is a file; choose another"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_sentence(command: Command, tmp_path: Path, words: list[str], says: str) -> None:
    code, out, err = command(*words)
    assert (code, out, err.strip().count("\n")) == (2, "", 0)
    assert says in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ITEMS)
def test_every_page_of_the_repository_is_filled_and_has_the_figures_of_its_records(
    command: Command, tmp_path: Path, name: str
) -> None:
    missing = {one for one in ITEMS[name].wanted("mini") if run_name(config_of(one, "mini", 2021)) not in committed()}
    assert {one.method.partition(" ")[0] for one in missing} <= {"lga"}  # being run again, see above
    assert command(name, "--show", "--runs", RESULTS)[0] == 0
    assert bool(missing) <= ("Not run here: " in (tmp_path / "pages" / f"{name}.md").read_text())
    for kind in ("md", "csv") if name != "fig5" else ("md",):  # which has no numbers
        made, kept = ((where / f"{name}.{kind}").read_text() for where in (tmp_path / "pages", PAGES))
        assert made.replace(str(RESULTS), "benchmarks") == kept


def test_all_items_with_named_methods(command: Command, tmp_path: Path) -> None:
    code, _, err = command("all", "--methods", "lga", "--show", "--runs", RESULTS)
    assert (code, err) == (0, "")
    assert {file.stem for file in (tmp_path / "pages").glob("*.md")} == set(ITEMS)


def test_pages_of_the_mini_scale_name_the_data_that_stand_in(command: Command, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert command("all", "--show")[0] == 0
    silent = []
    for name, item in ITEMS.items():
        page = (tmp_path / "pages" / f"{name}.md").read_text()
        words = {"glyphs" if one.dataset == "cifar100" else "TinyImageNet at 32 px" for one in item.experiments}
        silent += [name for word in words if word not in page]
    assert silent == []


def test_pages_of_the_two_scales_do_not_overwrite_each_other(command: Command, tmp_path: Path) -> None:
    assert json.loads(command("table10", "--json")[1]) == {"pages": ["pages/table10.md"]}
    mini = (tmp_path / "pages" / "table10.md").read_text()
    assert json.loads(command("table10", "--scale", "paper", "--json")[1]) == {"pages": ["pages/table10-paper.md"]}
    assert (tmp_path / "pages" / "table10.md").read_text() == mini
    assert "# table10 at the published scale: " in (tmp_path / "pages" / "table10-paper.md").read_text()


def test_a_page_states_the_settings_of_its_methods(command: Command, tmp_path: Path) -> None:
    assert command("table1", "--show", "--runs", RESULTS)[0] == 0
    [glyphs, photographs] = re.findall(r"^- (.*)$", (tmp_path / "pages" / "table1.md").read_text(), re.MULTILINE)
    assert glyphs.startswith(
        "CIFAR-100, T = 5: 100 training images per class, 12 clients and 4 more in each task, 5 sel"
    )
    assert "60 % of a task's classes per client, 100 exemplars per client, convnet. replay: lr=0.1; icarl: lr" in glyphs
    assert "; icarl: lr=2; bic: lr=0.1; " in glyphs
    assert glyphs.endswith("lga w/o cbl: lr=1; lga: lr=1.")
    assert photographs.startswith("MiniImageNet, T = 5: ")
    assert "200 exemplars per client, convnet. replay: lr=0.05;" in photographs


def test_options_of_the_published_scale_are_whole_and_those_of_its_table_are_not_repeated() -> None:
    one = Experiment("cifar100", 10, "lga w/o cbl")
    found = Found((), ())
    runs = {one: found, replace(one, method="bic"): found}
    text = paper_pages._options(ITEMS["table3"], runs, {one: setup_of(one, "paper") for one in runs})
    paper_says = "iterations=300, start=white, patience=0"
    assert f"lga w/o cbl: lr=2, {paper_says}, schedule=steps, milestones=" in text
    assert "bic: lr=0.1, schedule=steps, milestones=[0.4, 0.6, 0.8], gamma=0.1" in text
    first = ITEMS["table11"].experiments[0]
    memory = paper_pages._options(ITEMS["table11"], {first: found}, {first: setup_of(first, "mini")})
    assert "convnet" in memory
    assert "exemplars" not in memory  # they are what the table varies


def test_a_figure_says_what_is_missing_and_shows_no_number_of_tasks_that_it_does_not_name(
    command: Command, tmp_path: Path
) -> None:
    for tasks in (5, 10):
        pretend(tmp_path / "runs", Experiment("mini-imagenet", tasks, "lga"), 1, [0.5] * tasks)
    assert command("fig7", "--show", "--seeds", "1")[0] == 0
    page = (tmp_path / "pages" / "fig7.md").read_text()
    waiting = "lga (T = 20, cosine schedule; T = 5, steps schedule), lga w/o npb, lga w/o sbm, lga w/o ssa"
    assert f"Not run here: {waiting}; `holdfast reproduce fig7 " in page
    rows = list(csv.reader((tmp_path / "pages" / "fig7.csv").read_text().splitlines()))
    assert {row[2] for row in rows[1:]} == {"5"}


def test_bars_use_the_seeds_that_all_methods_have(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ITEMS["fig7"].experiments:
        if one.tasks == 5 and one.schedule is None:
            pretend(tmp_path / "runs", one, 1, [0.25 if one.method == "lga" else 0.125] * 5)
    pretend(tmp_path / "runs", Experiment("mini-imagenet", 5, "lga"), 2, [1.0] * 5)
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "panels_of_bars", lambda bars, file: drawn.append(bars))
    assert command("fig7", "--show", "--seeds", "1,2")[0] == 0
    [(title, bars)] = drawn[0].items()
    assert title == "T = 5 (seed 1)"
    assert bars["lga"] == {"accuracy": 25.0, "macro F1": 12.5, "macro recall": 6.25}
    assert bars["lga w/o ssa"]["accuracy"] == 12.5


def test_traffic_is_that_of_the_seeds_asked_for(command: Command, tmp_path: Path) -> None:
    found = []
    for seeds in ("2021", "2022", "2021,2022"):
        assert command("table10", "--scale", "paper", "--seeds", seeds)[0] == 0
        rows = list(csv.reader((tmp_path / "pages" / "table10-paper.csv").read_text().splitlines()))
        found.append(float(rows[2][1]))
        assert (
            f"plans of seed{'s' * (',' in seeds)} {seeds.replace(',', ', ')}"
            in (tmp_path / "pages" / "table10-paper.md").read_text()
        )
    assert found[0] != found[1]
    assert found[2] == pytest.approx(mean(found[:2]))


def test_a_page_says_with_which_options_it_was_made_and_what_is_missing(command: Command, tmp_path: Path) -> None:
    pretend(tmp_path / "my runs", LGA, 1, [0.5] * 5)
    words = ["table1", "--show", "--seeds", "1, 2", "--runs", "my runs", "--methods", "lga, lga w/o cbl"]
    assert command(*words)[0] == 0
    page = (tmp_path / "pages" / "table1.md").read_text()
    same = "holdfast reproduce table1 --scale mini --seeds 1,2 --runs 'my runs' --methods"
    assert f"Made by `{same} 'lga, lga w/o cbl' --show`." in page
    rest = page[page.index("Not run here: ") :]
    assert ", icarl, lga (MiniImageNet), lga w/o cbl, " in rest
    assert rest.endswith(f"; `{same} all`.\n")
