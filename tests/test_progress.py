"""What `holdfast run` shows while it runs: a table of rounds above the bar, in a terminal with room for it."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group

from holdfast.config import load_config, to_toml
from holdfast.progress import LATEST, RoundsProgress


def line(number: int, accuracy: float, **more: Any) -> dict[str, Any]:
    given = {"round": number, "task": 2, "classes_seen": 7, "accuracy": accuracy, "losses": {"a": 1.0, "b": 0.25}}
    return {**given, "selected": [1, 2, 3], "trained": [1, 2], "seconds": {"train": 1.5, "grow": 0.25}, **more}


def shown(width: int, height: int, *lines: dict[str, Any], terminal: bool = True) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, height=height, color_system=None)
    bar = RoundsProgress(console=console)
    for one in lines:
        bar.note(one)
    console.print(Group(*bar.get_renderables()))
    return file.getvalue()


def test_the_table_has_the_figures_of_the_latest_rounds() -> None:
    text = shown(100, 30, line(1, 0.5), line(2, 0.45, refused=[{"client": 3}]))
    rows = [row.split() for row in text.splitlines() if row.strip()]
    assert rows[0] == ["round", "task", "classes", "accuracy", "change", "loss", "trained", "refused", "seconds"]
    assert rows[2] == ["1", "2", "7", "50.0%", "1.25", "2/3", "0", "1.8"]
    assert rows[3] == ["2", "2", "7", "45.0%", "-5.0", "1.25", "2/3", "1", "1.8"]
    many = shown(100, 30, *(line(n, 0.5) for n in range(1, 40)))
    assert len(many.splitlines()) < 18
    assert len(re.findall(r"50\.0%", many)) == LATEST


@pytest.mark.parametrize(("width", "height"), [(60, 40), (100, 10)])
def test_a_small_terminal_has_the_bar_alone(width: int, height: int) -> None:
    assert "accuracy" not in shown(width, height, line(1, 0.5))


def test_a_run_in_a_terminal_shows_the_table_and_clears_it(small: dict[str, Any], tmp_path: Path, cache: Path) -> None:
    """A real run in a real terminal; its result is printed, and the screen in between is gone."""
    settings = {**small, "run": {"engine": "serial"}, "method": {"name": "fedavg"}}
    (tmp_path / "x.toml").write_text(to_toml(load_config(settings)))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "holdfast", "run", "x.toml", "--out", "run", "--json"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, cwd=tmp_path, env=env)
    os.close(theirs)
    found = b""
    while True:
        try:
            more = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        found += more
    os.close(ours)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert out.startswith(b"{")  # standard output is the result alone
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", found)
    assert b"classes" in plain
    assert b"refused" in plain
    assert b"\x1b[2K" in found  # lines are erased again
