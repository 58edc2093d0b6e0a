"""A new user who follows the docs: their own pictures in folders, a look at them, a run, a report."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

DOCS = Path(__file__).parents[2] / "docs"
SMALL = [("data.size", 16), ("plan.rounds", 2), ("train.epochs", 1), ("plan.join_per_task", 2), ("plan.memory", 8)]


def pictures(folder: Path) -> None:
    """Discs, squares, crosses and bars of many colours, as files of several kinds and sizes."""
    rng = np.random.Generator(np.random.PCG64(5))
    for name in ("disc", "square", "cross", "bar"):
        (folder / name).mkdir(parents=True)
        for i in range(12):
            side = int(rng.integers(20, 40))
            image = Image.new("RGB", (side + i % 3, side), tuple(rng.integers(0, 90, 3).tolist()))
            draw = ImageDraw.Draw(image)
            ink = tuple(rng.integers(150, 256, 3).tolist())
            a, b = side // 4, side - side // 4
            if name == "disc":
                draw.ellipse((a, a, b, b), fill=ink)
            elif name == "square":
                draw.rectangle((a, a, b, b), fill=ink)
            elif name == "cross":
                draw.line((a, a, b, b), fill=ink, width=3)
                draw.line((a, b, b, a), fill=ink, width=3)
            else:
                draw.rectangle((side // 2 - 2, a, side // 2 + 2, b), fill=ink)
            image.save(folder / name / f"{name} {i}.{('png', 'jpg', 'bmp')[i % 3]}")


def command_in(page: str, words: str) -> list[str]:
    """The line of a page of the docs that begins so, without its comment."""
    text = (DOCS / page).read_text(encoding="utf-8")
    [line] = [line for line in re.findall(r"^    (holdfast .*)$", text, re.M) if line.startswith(words)]
    return str(line).split("#")[0].split()[1:]


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, "-m", "holdfast", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_own_pictures_to_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "none"))
    pictures(tmp_path / "pictures")
    said = run(command_in("data.md", "holdfast data info folder:pictures"), tmp_path)
    assert "4 classes, 40 training and 8 test images" in said
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    flags = [part for key, value in SMALL for part in ("--set", f"{key}={value}")]
    said = run([*command_in("data.md", "holdfast run --dataset folder:pictures"), *flags], tmp_path)
    assert "lga on folder:pictures" in said
    [folder] = (tmp_path / "runs").iterdir()
    report = command_in("index.md", "holdfast report runs/mine")
    run([word if word != "runs/mine" else f"runs/{folder.name}" for word in report], tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for word in ("Who is left behind?", "Confusion matrix", "disc", "cross", "Exemplars"):
        assert word in page
