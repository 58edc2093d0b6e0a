"""The demo: averaging learns and forgets, LGA keeps, and announcing new classes ends where a schedule ends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def start(method: str, growth: str, folder: Path) -> subprocess.Popen[str]:
    words = ["run", str(DEMO), "--method", method, "--set", f"plan.growth={growth}", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "holdfast", *words, "--out", f"{method}-{growth}"]
    return subprocess.Popen(line, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    answer = process.communicate(timeout=600)[0]
    assert process.returncode == 0
    result: dict[str, Any] = json.loads(answer)
    return result


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def test_the_demo_learns_forgets_keeps_and_announces(tmp_path: Path) -> None:
    kept = start("lga", "schedule", tmp_path)
    told = finish(start("fedavg", "schedule", tmp_path))
    announced = finish(start("fedavg", "announce", tmp_path))
    lga = finish(kept)
    assert told["accuracy_after_task"][0] >= 0.9
    assert told["forgetting"] > 0.5
    assert abs(told["last_accuracy"] - announced["last_accuracy"]) <= 0.02
    assert lga["last_accuracy"] > told["last_accuracy"] + 0.4
    assert lga["detection"]["hits"] == lga["detection"]["transitions"]
    assert (tmp_path / "lga-schedule" / "prototypes.png").stat().st_size > 10_000
    lines = lines_of(tmp_path / "fedavg-announce")
    assert lines[0]["trained"] == []  # nobody's class is known yet
    assert [len(line["grown"]) for line in lines if line["grown"]] == [5, 5, 5]
    assert [line["round"] for line in lines if line["grown"]] == [2, 9, 16]
