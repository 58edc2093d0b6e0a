"""Experiments side by side: their figures, which differences are real, and every form in which they are printed."""

import csv
import io
import json
import re
from math import pi, tan
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import ttest_rel

from holdfast.errors import HoldfastError
from holdfast.results.comparison import (
    Comparison,
    as_csv,
    as_json,
    as_latex,
    as_markdown,
    as_text,
    compared,
    note,
    paired,
    spread,
)
from holdfast.results.record import Result
from holdfast.results.tables import as_csv as rows_as_csv


def result(method: str, seed: int, *curve: float, **changes: Any) -> Result:
    """A run of which only the curve matters, in tasks of two classes."""
    values: dict[str, Any] = {
        "version": "0",
        "experiment": method,
        "method": method,
        "dataset": "glyphs",
        "seed": seed,
        "task_sizes": [2] * len(curve),
        "accuracy_after_task": list(curve),
        "accuracy_matrix": [[value] * (t + 1) for t, value in enumerate(curve)],
        "average_accuracy": mean(curve),
        "last_accuracy": curve[-1],
        "forgetting": 0.0,
        "macro_f1": 0.0,
        "macro_recall": 0.0,
        "worst_client": {"client": 0, "accuracy": 0.0},
        "group_accuracy": {"Zn": None},
        "bytes": {},
        "seconds": {},
        "confusion": [[1]],
        "classes": ["a"],
    }
    return Result(**{**values, **changes})


FEDAVG = [result("fedavg", 1, 0.9, 0.3), result("fedavg", 2, 0.8, 0.5), result("fedavg", 3, 0.7, 0.4)]
LGA = [result("lga", 2, 0.9, 0.8), result("lga", 3, 0.8, 0.6), result("lga", 4, 0.85, 0.1)]


def test_figures_are_means_over_seeds() -> None:
    table = compared([*FEDAVG, *LGA])
    assert (table.dataset, table.seen, table.reference) == ("glyphs", (2, 4), "lga")
    fedavg, lga = table.rows
    assert fedavg.seeds == (1, 2, 3)
    assert fedavg.curve == pytest.approx({2: 0.8, 4: 0.4})
    assert fedavg.averages == pytest.approx((0.6, 0.65, 0.55))
    assert lga.curve == pytest.approx({2: 0.85, 4: 0.5})
    facts = as_json(table)["rows"][0]
    assert facts["average"] == pytest.approx(0.6)
    assert facts["standard_deviation"] == pytest.approx(np.std([0.6, 0.65, 0.55], ddof=1))
    assert spread(fedavg.averages) == "60.0 ± 5.0"


def test_the_improvement_is_over_the_seeds_of_both() -> None:
    fedavg, lga = compared([*FEDAVG, *LGA]).rows
    assert fedavg.improvement == pytest.approx(mean([0.85 - 0.65, 0.7 - 0.55]))  # seeds 2 and 3
    assert fedavg.chance == pytest.approx(ttest_rel([0.85, 0.7], [0.65, 0.55]).pvalue)
    assert (lga.improvement, lga.chance, lga.real) == (None, None, False)


def test_without_a_seed_of_both_there_is_nothing_to_say() -> None:
    fedavg, _ = compared([FEDAVG[0], *LGA]).rows
    assert (fedavg.improvement, fedavg.chance, fedavg.real) == (None, None, False)


def test_a_single_seed_proves_nothing() -> None:
    table = compared([FEDAVG[1], LGA[0]])
    fedavg = table.rows[0]
    assert fedavg.improvement == pytest.approx(0.2)
    assert (fedavg.chance, fedavg.real) == (None, False)
    assert spread(fedavg.averages) == "65.0"
    assert as_json(table)["rows"][0]["standard_deviation"] is None
    assert "*" not in as_latex(table).split("%")[0]


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_the_test_is_students_paired_one(seeds: int) -> None:
    a, b = np.random.default_rng(seeds).random((2, seeds))
    assert paired((a - b).tolist()) == pytest.approx(ttest_rel(a, b).pvalue)
    assert paired((b - a).tolist()) == paired((a - b).tolist())


def test_differences_without_variance_say_nothing_about_chance() -> None:
    """Exact fractions: nothing is left to rounding."""
    lines = [("same", 0.5), ("quarter", 0.25), ("lga", 0.5)]
    same, quarter, _ = compared([result(name, s, value) for name, value in lines for s in (1, 2)]).rows
    assert (same.improvement, same.chance, same.real) == (0.0, None, False)
    assert (quarter.improvement, quarter.chance, quarter.real) == (0.25, None, False)


def test_rounding_is_no_variance() -> None:
    """A gain of two images of sixty in every seed."""
    runs = [result("a", s, hits / 60) for s, hits in enumerate((31, 37, 44))]
    runs += [result("lga", s, (hits + 2) / 60) for s, hits in enumerate((31, 37, 44))]
    a, _ = compared(runs).rows
    assert stdev(b - c for b, c in zip(compared(runs).rows[1].averages, a.averages, strict=True)) > 0
    assert (a.improvement, a.chance, a.real) == (pytest.approx(2 / 60), None, False)


def with_chance(method: str, chance: float) -> list[Result]:
    """Two seeds whose differences d + e and d - e from 0.8 have this probability: 1 - 2/pi atan(d / e)."""
    e = 0.001
    d = e * tan(pi / 2 * (1 - chance))
    return [result(method, 1, 0.8 - d - e), result(method, 2, 0.8 - d + e)]


def test_holms_correction_by_hand() -> None:
    raw = {"a": 0.04, "b": 0.01, "c": 0.03}
    rivals = [one for method, chance in raw.items() for one in with_chance(method, chance)]
    a, b, c, _ = compared([*rivals, result("lga", 1, 0.8), result("lga", 2, 0.8)]).rows
    assert b.chance == pytest.approx(3 * 0.01)
    assert c.chance == pytest.approx(2 * 0.03)
    assert a.chance == pytest.approx(2 * 0.03)  # never less than that of a smaller one
    assert [row.real for row in (a, b, c)] == [False, True, False]


def test_a_corrected_probability_is_at_most_one() -> None:
    rivals = [*with_chance("a", 0.7), *with_chance("b", 0.9)]
    a, b, _ = compared([*rivals, result("lga", 1, 0.8), result("lga", 2, 0.8)]).rows
    assert (a.chance, b.chance) == (1.0, 1.0)


def test_the_reference_is_the_one_named_or_the_last() -> None:
    table = compared([*FEDAVG, *LGA], reference="fedavg")
    assert table.reference == "fedavg"
    assert table.rows[0].improvement is None
    assert table.rows[1].improvement == pytest.approx(mean([0.65 - 0.85, 0.55 - 0.7]))
    assert "of fedavg over the method" in note(table)
    assert compared([*LGA, *FEDAVG]).reference == "fedavg"


def test_experiments_of_one_name_are_told_apart_and_a_seed_counts_once() -> None:
    other = [result("fedavg", seed, 0.1, 0.1, experiment="x7") for seed in (1, 2)]
    table = compared([*FEDAVG, *other, *LGA, LGA[0]])
    assert [(row.method, len(row.seeds)) for row in table.rows] == [
        ("fedavg #fedavg", 3),
        ("fedavg #x7", 2),
        ("lga", 3),
    ]


def test_other_measures() -> None:
    curves = {"macro_f1": [0.5, 0.25], "macro_recall_batchwise128": [0.1, 0.2]}
    runs = [result("lga", seed, 0.9, 0.8, curves=curves) for seed in (1, 2)]
    assert compared(runs, measure="f1").rows[0].curve == {2: 0.5, 4: 0.25}
    assert compared(runs, measure="recall-batchwise128").rows[0].curve == {2: 0.1, 4: 0.2}
    with pytest.raises(HoldfastError, match="the run of lga, seed 1, has no recall;"):
        compared(runs, measure="recall")
    with pytest.raises(HoldfastError, match="the run of lga, seed 2, has no f1;"):
        compared(LGA, measure="f1")


# the forms

NAMES = ("lga perturb_steps=1", "fedavg #1|2", "lga")


@pytest.fixture
def table() -> Comparison:
    """Three methods with awkward names; the best of the first column is shared as far as one sees."""
    first = [result(NAMES[0], s, 0.9004, 0.5 + s / 100) for s in (1, 2, 3)]
    second = [result(NAMES[1], s, 0.9001, 0.3) for s in (1, 2, 3)]
    return compared([*first, *second, *[result(NAMES[2], s, 0.8988, 0.6) for s in (1, 2, 3)]])


HEAD = ["method", "seeds", "2", "4", "average", "improvement"]
CELLS = [  # a star in front: bold
    [NAMES[0], "3", "*90.0", "52.0", "71.0 ± 0.5", "+3.9 *"],
    [NAMES[1], "3", "*90.0", "30.0", "60.0 ± 0.0", "+14.9"],
    [NAMES[2], "3", "89.9", "*60.0", "*74.9 ± 0.0", "-"],
]


def test_text(table: Comparison) -> None:
    console = Console(width=160, record=True, force_terminal=True, color_system="standard", file=io.StringIO())
    console.print(as_text(table))
    styled = console.export_text(styles=True)
    assert "glyphs: accuracy in %" in styled
    assert "improvement: of lga over the method, in points; *: real" in " ".join(styled.split())
    lines = [re.sub(r"\x1b\[1m *([^\x1b]+?) *\x1b\[0m", r" *\1 ", line) for line in styled.splitlines()]
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    found = [re.split(r"\s{2,}", line.strip()) for line in lines if line.strip().startswith(NAMES)]
    assert found == CELLS


def test_a_title_is_as_wide_as_the_screen_and_not_as_the_table() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(as_text(compared(LGA)))
    lines = [line.strip() for line in capture.get().splitlines()]
    assert lines[0] == "glyphs: accuracy in %, mean over seeds (± standard deviation)"
    assert lines[-1] == "improvement: of lga over the method, in points"


def test_a_test_that_cannot_be_made_is_not_explained(table: Comparison) -> None:
    assert "paired t-test" in note(table)
    one = compared([FEDAVG[1], LGA[0]])
    assert note(one) == "improvement: of lga over the method, in points"
    console = Console(width=120)
    with console.capture() as capture:
        console.print(as_text(one))
    assert capture.get().splitlines()[0].strip() == "glyphs: accuracy in %"


def test_markdown(table: Comparison) -> None:
    body, remark = as_markdown(table).split("\n\n")
    rows = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body.splitlines()]
    assert rows[0] == HEAD
    assert rows[1] == ["---", *["---:"] * 5]
    bold = [[re.sub(r"\*\*(.*)\*\*", r"*\1", cell.replace("\\|", "|")) for cell in row] for row in rows[2:]]
    assert bold == CELLS
    assert remark == note(table) + "\n"


HARM = 'a\\b{c}$d$&e#f_g%h^i~j<k>l|m"n\n\\end{tabular}\x1bé'


def test_every_special_sign_of_latex_is_escaped() -> None:
    runs = [result(HARM, 1, 0.5), result("lga", 1, 0.6)]
    text = as_latex(compared(runs, HARM))
    assert [line for line in text.splitlines() if line.startswith("\\end{tabular}")] == ["\\end{tabular}"]
    [line] = [line for line in text.splitlines() if line.startswith("a")]
    signs = {sign: f"\\{sign}" for sign in "{}$&#_%"} | {"\\": r"\textbackslash{}"}
    signs |= {"^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}"}
    signs |= {"|": r"\textbar{}", '"': r"\textquotedbl{}"}
    plain = HARM.replace("\n", "\\n").replace("\x1b", "\\x1b")
    assert line.startswith("".join(signs.get(sign, sign) for sign in plain) + " & ")
    assert text.splitlines()[-1].startswith("% ")


def test_names_stay_in_their_cell_of_markdown_and_csv() -> None:
    table = compared([result(name, 1, 0.5) for name in ("=cmd()", "+1+A1", "-x", "@y", "<b>a|b\nc", "lga")])
    lines = as_markdown(table).splitlines()
    assert "| &lt;b>a\\|b\\nc | 1 |" in "\n".join(lines)
    rows = {row[0]: row for row in csv.reader(io.StringIO(as_csv(table)))}
    assert {"'=cmd()", "'+1+A1", "'-x", "'@y", "<b>a|b\nc"} < set(rows)
    assert float(rows["'-x"][-2]) == 0


@pytest.mark.parametrize("cell", ["-0.5", "+1.2", "-1e-05", "-1e+20", "-", "", "12", "+0.5 ± 0.1", "-3.1%"])
def test_numbers_are_no_formulas(cell: str) -> None:
    assert list(csv.reader(io.StringIO(rows_as_csv([[cell, 1]])))) == [[cell, "1"]]


@pytest.mark.parametrize("cell", ["=1+1", "@SUM(A1)", "+A1", "-A1", "\t=1", "\r=1", "\uff1d1", "-1+cmd|' /C calc'!A0"])
def test_formulas_are_text(cell: str) -> None:
    [[found]] = csv.reader(io.StringIO(rows_as_csv([[cell]])))
    assert found == f"'{cell}".replace("\r", "\\r")


def test_latex(table: Comparison) -> None:
    text = as_latex(table)
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    assert lines[0] == r"\begin{tabular}{lrrrrr}"
    assert lines[-1] == r"\end{tabular}"
    assert text.count(r"\begin{") == text.count(r"\end{") == 1
    assert text.count("{") == text.count("}")
    assert [line for line in lines if line.endswith("rule")] == [r"\toprule", r"\midrule", r"\bottomrule"]
    rows = [line.removesuffix(r" \\").split(" & ") for line in lines if line.endswith(r"\\")]
    assert rows[0] == HEAD
    assert {len(row) for row in rows} == {6}
    body = [cell.replace(r"\textbar{}", "|") for row in rows for cell in row]
    bare = [re.sub(r"\\textbf\{([^}]*)\}", r"\1", cell.replace(r"$\pm$", "")) for cell in body]
    assert not [cell for cell in bare if re.search(r"(?<!\\)[#%&_$^~{}]|±", cell)], "not escaped"
    plain = [re.sub(r"\\textbf\{([^}]*)\}", r"*\1", cell).replace(r"$\pm$", "±") for cell in body]
    plain = [re.sub(r"\\([#%&_])", r"\1", cell) for cell in plain]
    assert [plain[i : i + 6] for i in range(6, 24, 6)] == CELLS


def test_csv_has_all_figures_in_full(table: Comparison) -> None:
    rows = list(csv.DictReader(as_csv(table).splitlines()))
    assert list(rows[0]) == ["method", "seeds", "2", "4", "average", "standard deviation", "improvement", "p"]
    assert [row["method"] for row in rows] == list(NAMES)
    for line, row in zip(rows, table.rows, strict=True):
        assert [float(line["2"]), float(line["4"])] == [100 * value for value in row.curve.values()]
        assert float(line["average"]) == pytest.approx(100 * mean(row.averages))
        assert float(line["standard deviation"]) == pytest.approx(100 * stdev(row.averages))
    assert float(rows[0]["improvement"]) == pytest.approx(3.92)
    assert float(rows[0]["p"]) == table.rows[0].chance
    assert (rows[2]["improvement"], rows[2]["p"]) == ("", "")


def test_csv_of_a_single_seed_has_no_deviation() -> None:
    [row] = csv.DictReader(as_csv(compared([LGA[0]])).splitlines())
    assert (row["standard deviation"], row["p"], row["seeds"]) == ("", "", "1")


def test_json(table: Comparison) -> None:
    facts = json.loads(json.dumps(as_json(table)))
    assert (facts["dataset"], facts["measure"], facts["classes_seen"]) == ("glyphs", "accuracy", [2, 4])
    assert facts["reference"] == "lga"
    for found, row in zip(facts["rows"], table.rows, strict=True):
        assert (found["method"], found["seeds"]) == (row.method, list(row.seeds))
        assert (found["curve"], found["averages"]) == (list(row.curve.values()), list(row.averages))
        assert (found["improvement"], found["p"], found["real"]) == (row.improvement, row.chance, row.real)
    assert [row["real"] for row in facts["rows"]] == [True, False, False]


@pytest.mark.parametrize("name", ["folder:photos[old]", "folder:[/x]"])
def test_a_data_set_may_have_brackets_in_its_name(name: str) -> None:
    """Rich takes them for markup."""
    console = Console(width=160)
    with console.capture() as capture:
        console.print(as_text(compared([result("lga", 1, 0.5, dataset=name)])))
    assert f"{name}: accuracy in %" in " ".join(capture.get().split())
