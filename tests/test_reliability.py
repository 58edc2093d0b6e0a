"""`make torture` in short: its runs are lines of a file, are not run twice, and become tables."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import reliability

ROOT = Path(__file__).parents[1]
SHORT: dict[str, Any] = {**reliability.TINY, "plan": {**reliability.TINY["plan"], "tasks": 2, "rounds": 1}}


def test_bad_clients_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    chosen = (["fedavg", "bic"], ["nan", "scale", "crash"])
    assert reliability.bad_clients(file, *chosen, tiny=SHORT) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 2 * (3 + 2)  # and the runs without the client
    assert all(sum(line["refused"].values()) > 0 for line in lines if line["kind"] in chosen[1])
    # A run that is there is not run again; one that stopped in between goes on.
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    assert reliability.bad_clients(file, *chosen, tiny=SHORT) == 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines
    # A difference of one bit is noticed.
    spoilt = [{**line, "model": "0" * 64} if line["kind"] == "scale" else line for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in spoilt))
    assert reliability.bad_clients(file, *chosen, tiny=SHORT) == 2
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\nold\n<!-- end of tables -->\nafter\n")
    reliability.write_tables(file, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of tables -->\nafter\n")
    assert "old" not in text
    assert "| nan | 2 of 2 |" in text
    assert "| scale | 0 of 2 |" in text


def test_costs_are_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    lines = [
        {"rate": rate, "seed": seed, "average_accuracy": value, "protocol": "p", "method": "replay"}
        for rate, seed, value in [(0.0, 1, 0.6), (0.0, 2, 0.7), (0.3, 1, 0.59), (0.3, 2, 0.68), (0.3, 3, 0.1)]
    ]
    table = reliability._drop_table(lines)
    assert "| p | replay | 30% | 3 | 45.7 | +1.5 |" in table


@pytest.mark.parametrize("table", ["drops", "hostile"])
def test_every_run_of_a_table_has_its_own_settings(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []
    monkeypatch.setattr(reliability, "run_missing", lambda file, name, some: wanted.extend(some))
    if table == "drops":
        reliability.drops(tmp_path, "tiny-mini", [2021, 2022], ["replay", "lga"])
        assert len(wanted) == 4 * 2 * 2
    else:
        reliability.hostile(tmp_path, "glyphs-mini", [2021], ["replay", "lga"], [], [])
        assert len(wanted) == 7 * (4 + 5)
    assert len({name for name, _, _ in wanted}) == len(wanted)
    assert len({repr(config) for _, config, _ in wanted}) == len(wanted)


def test_the_commands_explain_themselves() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "torture.py"), "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(word in told for word in ("bad-clients", "drops", "hostile", "soak", "table"))


def test_the_page_has_a_place_for_the_tables() -> None:
    text = reliability.PAGE.read_text()
    assert text.index("<!-- tables -->") < text.index("<!-- end of tables -->")
