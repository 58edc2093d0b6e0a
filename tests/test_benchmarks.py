"""BENCHMARKS.md says what the committed records say."""

from pathlib import Path

import pytest

from holdfast.results.record import read_record, read_result
from holdfast.results.runs import runs_of
from holdfast.results.tables import comparison, markdown

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("protocol", ["glyphs-mini", "tiny-mini", "tiny-mini-10"])
def test_tables_are_those_of_the_records(protocol: str) -> None:
    runs = runs_of(ROOT / "benchmarks" / f"{protocol}.jsonl.gz")
    results = [read_result(run) for run in runs]
    assert {result.seed for result in results} == {2021, 2022, 2023}
    assert markdown(*comparison(results, reference="lga")) in TEXT
    for run, result in zip(runs, results, strict=True):
        ends = [line for line in read_record(run) if len(line["task_accuracy"]) == line["task"]]
        assert ends[-1]["accuracy"] == result.last_accuracy
