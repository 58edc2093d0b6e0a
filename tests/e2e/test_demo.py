"""The demo: it learns, it forgets, and announcing new classes ends where a schedule ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def start(growth: str, folder: Path) -> subprocess.Popen[str]:
    words = ["run", str(DEMO), "--set", f"plan.growth={growth}", "--out", growth, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "holdfast", *words]
    return subprocess.Popen(line, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def test_the_demo_learns_forgets_and_announces(tmp_path: Path) -> None:
    runs = {growth: start(growth, tmp_path) for growth in ("schedule", "announce")}
    results = {growth: json.loads(process.communicate(timeout=600)[0]) for growth, process in runs.items()}
    assert all(process.returncode == 0 for process in runs.values())
    told, announced = results["schedule"], results["announce"]
    assert told["accuracy_after_task"][0] >= 0.9
    assert told["forgetting"] > 0.5
    assert abs(told["last_accuracy"] - announced["last_accuracy"]) <= 0.02
    lines = [json.loads(line) for line in (tmp_path / "announce" / "record.jsonl").read_text().splitlines()]
    assert lines[0]["trained"] == []  # nobody's class is known yet
    assert [len(line["grown"]) for line in lines if line["grown"]] == [5, 5, 5, 5]
    assert [line["round"] for line in lines if line["grown"]] == [2, 9, 16, 23]
