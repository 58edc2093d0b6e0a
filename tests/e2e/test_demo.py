"""The demo: averaging learns and forgets, LGA and KELP keep, and announcing new classes ends where a schedule ends."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def finished(method: str, growth: str, folder: Path) -> dict[str, Any]:
    words = ["run", str(DEMO), "--method", method, "--set", f"plan.growth={growth}", "--json"]
    line = [sys.executable, "-m", "holdfast", *words, "--out", f"{method}-{growth}"]
    answer = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert answer.returncode == 0, answer.stderr
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def test_the_demo_learns_forgets_keeps_and_announces(tmp_path: Path) -> None:
    told = finished("fedavg", "schedule", tmp_path)
    announced = finished("fedavg", "announce", tmp_path)
    lga = finished("lga", "schedule", tmp_path)
    assert told["accuracy_after_task"][0] >= 0.9
    assert told["forgetting"] > 0.5
    assert abs(told["last_accuracy"] - announced["last_accuracy"]) <= 0.02
    assert lga["last_accuracy"] > told["last_accuracy"] + 0.4
    assert lga["detection"]["hits"] == lga["detection"]["transitions"]
    kelp = finished("kelp", "schedule", tmp_path)
    assert kelp["last_accuracy"] > told["last_accuracy"] + 0.4
    assert kelp["bytes"]["proxy"]["shares"] == 0
    assert (tmp_path / "lga-schedule" / "prototypes.png").stat().st_size > 10_000
    lines = lines_of(tmp_path / "fedavg-announce")
    assert lines[0]["trained"] == []  # nobody's class is known yet
    assert [len(line["grown"]) for line in lines if line["grown"]] == [5, 5, 5]
    assert [line["round"] for line in lines if line["grown"]] == [2, 9, 16]
