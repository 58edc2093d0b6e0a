"""Tables: what stands in them, and that different experiments are never averaged."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from holdfast.config import load_config, to_tree
from holdfast.results import plots
from holdfast.results.plots import comparison_curves, prototype_sheet
from holdfast.results.record import Result
from holdfast.results.tables import (
    by_protocol,
    comparison,
    markdown,
    names_of,
    result_lines,
    result_table,
    rows_table,
    traffic_table,
)


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "version": "0",
        "experiment": "a",
        "method": "fedavg",
        "dataset": "glyphs",
        "seed": 1,
        "task_sizes": [2, 2],
        "accuracy_after_task": [0.9, 0.5],
        "accuracy_matrix": [[0.9], [0.2, 0.8]],
        "average_accuracy": 0.7,
        "last_accuracy": 0.5,
        "forgetting": 0.7,
        "macro_f1": 0.4,
        "macro_recall": 0.5,
        "worst_client": {"client": 3, "accuracy": 0.1},
        "group_accuracy": {"Zo": None, "Zn": 0.4, "Za": 0.6},
        "bytes": {"server": {"down": 2_000_000, "up": 1_000_000}},
        "seconds": {"train": 1.5, "evaluate": 0.5},
        "confusion": [[1]],
        "classes": ["a"],
    }
    return Result(**{**values, **changes})


def printed(table: object, width: int = 80) -> str:
    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_result_task_by_task() -> None:
    text = printed(result_table(result()))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["1", "2", "90.0", "90.0", "20.0", "70.0"],
        ["2", "4", "50.0", "80.0", "80.0", "-"],
        ["mean", "", "70.0", "", "", "70.0"],
    ]
    lines = " ".join(result_lines(result()))
    assert "moved on (Zn) 40.0, joined (Za) 60.0; worst: client 3 with 10.0" in lines
    assert "2.0 MB sent to clients, 1.0 MB back, 2.0 s" in lines
    assert "; worst: west with 10.0" in " ".join(result_lines(result(), ["north", "south", "east", "west"]))


def test_batchwise_f1_and_recall_stand_beside_the_right_ones_where_they_are_wanted() -> None:
    curves = {"macro_f1_batchwise128": [0.3, 0.0712], "macro_recall_batchwise128": [0.3, 0.0823]}
    plain = result_lines(result(curves=curves))
    first, batchwise, *rest = result_lines(result(curves=curves), metrics="batchwise128")
    assert [first, *rest] == plain
    assert "macro F1 40.0, macro recall 50.0" in first
    assert batchwise.endswith("F1 7.1, recall 8.2")
    assert "not recorded" in result_lines(result(), metrics="batchwise128")[1]


def test_seeds_are_averaged_and_counted_once() -> None:
    runs = [result(), result(), result(seed=2, average_accuracy=0.8, accuracy_after_task=[1.0, 0.6])]
    columns, [row] = comparison(runs)
    assert columns == ["method", "seeds", "2", "4", "average", "last", "forgotten"]
    assert row == ["fedavg", "2", "95.0", "55.0", "75.0 ± 7.1", "50.0 ± 0.0", "70.0 ± 0.0"]


def test_different_experiments_stay_apart_and_each_value_under_its_classes() -> None:
    other = result(experiment="b", task_sizes=[3, 1], average_accuracy=0.6)
    columns, rows = comparison([result(), other])
    assert columns[2:5] == ["2", "3", "4"]
    assert [row[:5] for row in rows] == [
        ["fedavg #b", "1", "", "90.0", "50.0"],
        ["fedavg #a", "1", "90.0", "", "50.0"],
    ]


def test_what_lga_has_over_the_others_is_paired_by_seed() -> None:
    """0.8 - 0.7 and 0.7 - 0.4: 20 points, and a standard error of 10; the third seed has no partner."""
    lga = [result(method="lga", experiment="l", seed=s, average_accuracy=a) for s, a in ((1, 0.8), (2, 0.7), (3, 0.1))]
    others = [result(average_accuracy=0.7), result(seed=2, average_accuracy=0.4)]
    columns, rows = comparison([*lga, *others], reference="lga")
    assert columns[-1] == "lga over it"
    assert {row[0]: row[-1] for row in rows} == {"lga": "", "fedavg": "+20.0 ± 10.0"}


def test_markdown() -> None:
    assert markdown(["method", "x"], [["a", "1"]]) == "| method | x |\n| --- | ---: |\n| a | 1 |"


@pytest.mark.parametrize("word", ["a[b]c", ":x:", "[/bold]"])
def test_words_are_printed_as_they_are(word: str) -> None:
    console = Console(width=80, emoji=False)
    with console.capture() as capture:
        console.print(rows_table("", ["word"], [[word]]))
    assert word in capture.get()


def test_the_proxys_bytes_and_the_detectors_are_said_where_there_are_any() -> None:
    learned: dict[str, Any] = {"last_accuracy": 0.9, "confusion": [[25 * (i == j) for j in range(5)] for i in range(4)]}
    learned |= {"classes": ["a", "b", "c", "d"]}
    assert len(result_lines(result(**learned))) == 3
    assert "no better than chance (25.0 %)" in result_lines(result(**{**learned, "last_accuracy": 0.33}))[3]
    sent = {
        "server": {"down": 2_000_000, "up": 1_000_000},
        "proxy": {"encoder": 100_000, "teachers": 4_000_000, "shares": 5_000},
    }
    found = {"transitions": 10, "hits": 9, "late": 1, "never": 0, "mean_delay": 0.3, "false_alarms": 2}
    lines = result_lines(result(**learned, bytes=sent, detection={**found, "client_rounds": 60}))
    assert "4.0 MB of teachers, 0.01 MB of prototypes (0.50% of the models sent back), 0.1 MB of encoders" in lines[3]
    assert "noticed at once 9 of 10 times, late 1; false alarms in 2 of 60 client-rounds" in lines[4]
    sent["server"]["up"] = 0  # nobody was selected who had anything to learn
    assert "0.01 MB of prototypes, 0.1 MB of encoders" in result_lines(result(bytes=sent))[3]


def test_kinds_of_bytes_that_older_runs_have_not_counted_are_said_where_they_are() -> None:
    sent = {
        "server": {"down": 2_000_000, "up": 1_000_000, "observed": 6_000_000, "task_end": 300_000},
        "proxy": {"teachers": 4_000_000, "models": 700_000},
    }
    text = "\n".join(result_lines(result(bytes=sent)))
    assert "beside them 6.0 MB of broadcasts to clients that only observe, 0.3 MB of models at a task's end" in text
    assert "0.0 MB of encoders, 0.7 MB of models from the server to the proxy" in text
    totals = [{"down": 1_000_000, "up": 0, "observed": 2_000_000, "shares": 0, "models": 3_000_000}]
    table = printed(traffic_table(totals), width=120)
    assert "to observers" in table
    assert next(line.split() for line in table.splitlines() if line.strip().startswith("1 ")) == [
        "1",
        "1.00",
        "0.00",
        "2.00",
        "0.00",
        "-",
        "3.00",
    ]


def test_traffic_by_task() -> None:
    totals = [{"down": 10_000_000, "up": 8_000_000, "teachers": 0, "shares": 16_000, "encoder": 1_000_000}]
    text = printed(traffic_table(totals), width=120)
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("1 "))
    assert row == ["1", "10.00", "8.00", "0.00", "0.02", "0.200%", "1.00"]


def test_pictures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, save = [], plots._save

    def noting(figure: Any, file: Path) -> None:
        named.extend(text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().texts)
        save(figure, file)

    monkeypatch.setattr(plots, "_save", noting)
    comparison_curves(
        [result(), result(seed=2, accuracy_after_task=[0.7, 0.3]), result(experiment="b")], tmp_path / "c.png"
    )
    assert len(set(named)) == 2  # two experiments of one method have their own names in the picture
    image = np.zeros((16, 16, 3), dtype=np.uint8)
    prototype_sheet([("a", [image] * 3), ("a very long name", [image] * 3)], tmp_path / "p.png")
    for name in ("c.png", "p.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_picture_shows_the_measure_that_is_asked_for_and_ends_that_one_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, file: figures.append(figure))
    f1 = [{"macro_f1": [0.8, last]} for last in (0.21, 0.20, 0.22)]
    runs = [result(experiment=str(i), curves=curves) for i, curves in enumerate(f1)]
    comparison_curves(runs, tmp_path / "c.png", "f1")
    axes = figures[0].axes[0]
    assert axes.get_ylabel() == "f1 in %"
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[80.0, pytest.approx(v)] for v in (21, 20, 22)]
    places = [(text.get_text(), text.xy[1]) for text in axes.texts]
    assert [text for text, _ in places] == ["20.0", "21.0", "22.0"]
    assert all(b[1] - a[1] >= 4 for a, b in pairwise(places))
    comparison_curves(
        [result(experiment=str(i), accuracy_after_task=[0.5, 0.95 + i / 100]) for i in range(6)], tmp_path
    )
    places = [(text.get_text(), text.xy[1]) for text in figures[1].axes[0].texts]
    assert [text for text, _ in places] == [f"{95 + i}.0" for i in range(6)]
    assert all(b[1] - a[1] >= 4 for a, b in pairwise(places))
    assert 70 < places[0][1] < places[-1][1] <= 102
    assert not any(text.get_annotation_clip() for text in figures[1].axes[0].texts)


def test_other_tasks_are_another_protocol() -> None:
    groups = by_protocol([result(), result(seed=2), result(task_sizes=[1, 1, 2]), result(dataset="digits")])
    assert {name: len(some) for name, some in groups.items()} == {
        "glyphs, 2 tasks, 4 classes": 2,
        "glyphs, 3 tasks, 4 classes": 1,
        "digits": 1,
    }


def test_protocols_that_differ_in_the_sizes_of_tasks_alone_stay_apart() -> None:
    groups = by_protocol([result(task_sizes=sizes) for sizes in ([2, 4], [4, 2], [6])])
    assert list(groups) == [
        "glyphs, tasks of 2, 4 classes",
        "glyphs, tasks of 4, 2 classes",
        "glyphs, 1 task, 6 classes",
    ]


def named(*settings: dict[str, Any] | None, methods: str) -> list[str]:
    """What experiments with these settings are called beside each other."""
    runs = [result(experiment=str(i), method=method) for i, method in enumerate(methods)]
    configs = {str(i): to_tree(load_config(tree)) for i, tree in enumerate(settings) if tree is not None}
    return list(names_of(runs, configs).values())


def test_experiments_are_called_by_what_they_differ_in() -> None:
    lr = [{"train": {"lr": value}} for value in (0.1, 0.2, 0.4)]
    assert named(*lr, methods="aab") == ["a (train.lr=0.1)", "a (train.lr=0.2)", "b"]
    other = {"data": {"seed": 1}, "plan": {"memory": 5}}
    assert named({}, other, methods="ab") == [
        "a (data.seed=0, plan.memory=2000)",
        "b (data.seed=1, plan.memory=5)",
    ]
    assert named({}, other, None, methods="abc")[2] == "c"
    assert named({}, {"run": {"device": "cpu"}}, methods="aa") == ["a #0", "a #1"]  # there is no difference to name
    order = {"plan": {"order": list(range(25))}}
    assert named({}, order, methods="ab") == ["a (plan.order=natural)", "b (plan.order=[0, 1, 2, 3, 4, 5, 6, 7…)"]
    assert named({"data": {"flip": True}}, {}, methods="ab")[1] == "b (data.flip=unset)"


def test_the_reference_is_found_by_whatever_settings_it_is_called() -> None:
    def over(*methods: str) -> str | None:
        runs = [result(experiment=str(i), method=method) for i, method in enumerate(methods)]
        head, _ = comparison(runs, reference="lga")
        return head[-1] if head[-1].endswith("over it") else None

    assert over("icarl", "lga") == "lga over it"
    assert over("lga inference=nme", "lga w/o cbl", "lga") == "lga over it"
    assert over("lga w/o cbl patience=0", "lga patience=0", "ssil") == "lga patience=0 over it"
    assert over("lga w/o cbl", "lgaa", "ssil") is None
    runs = [result(experiment=key, method="lga", average_accuracy=a) for key, a in (("x", 0.5), ("y", 0.7))]
    head, rows = comparison(runs, {"x": "lga (x)", "y": "lga (y)"}, "lga")
    assert head[-1] == "lga (x) over it"
    assert [row[-1] for row in rows] == ["", "-20.0"]


def test_what_a_table_says_already_needs_no_word() -> None:
    trees = [{"data": {"classes": classes}, "plan": {"tasks": [2, 2]}} for classes in (4, 5)]
    assert named(*trees, methods="ab") == ["a", "b"]
