"""Names from anywhere on a terminal: what would move the cursor or change colours is written out."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.markup import escape

from holdfast.cli import console
from holdfast.progress import progress_bar
from holdfast.results.tables import rows_table
from holdfast.terminal import CONTROL, Terminal, on_one_line, printable

EVIL = "\x1b]0;owned\x07\x1b[2Jdog\r\x9b31m\u202egod[/x]"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2Jdog\\r\\x9b31m\\u202egod[/x]"
OLD = Path(__file__).parent / "results" / "old_run"
Command = Callable[..., tuple[int, str, str]]


def test_control_characters_are_written_out() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("größe 猫 \u200d\n\ta") == "größe 猫 \u200d\n\ta"
    assert printable("\udcff") == "\\udcff"
    assert on_one_line("a\nb\tc") == "a\\nb c"


def test_a_terminal_shows_them_and_keeps_its_own_colours() -> None:
    file = io.StringIO()
    terminal = Terminal(file=file, force_terminal=True, width=200)
    terminal.print(rows_table(EVIL, ["class"], [[EVIL]]))
    terminal.print(f"[red]{escape(EVIL)}[/red]", highlight=False)
    terminal.print(EVIL, markup=False, highlight=False)
    assert file.getvalue().count(SHOWN) == 2  # the title and the cell
    assert file.getvalue().count("\\x1b]0;owned") == 4
    assert "\x1b[31m" in file.getvalue()
    assert not CONTROL.search(re.sub("\x1b\\[[0-9;]*m", "", file.getvalue()))


def test_progress_bars_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    with progress_bar() as bar:
        bar.live.console = Terminal(file=file, width=200, markup=bar.console._markup)
        bar.add_task(EVIL, total=2)
        bar.live.console.print(bar.get_renderable())
        bar.console.print(EVIL)
    assert file.getvalue().count("\\x1b]0;owned") == 2
    assert not CONTROL.search(file.getvalue())


def run_of(folder: Path, **names: Any) -> Path:
    """An old run with other names."""
    shutil.copytree(OLD, folder)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, **names}))
    return folder


@pytest.mark.parametrize("words", [["show"], ["show", "--markdown"], ["report", "--out", "page.html"]])
def test_commands_write_them_out(
    words: list[str], tmp_path: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path / "run", method=EVIL + "\ud800", dataset=f"folder:{EVIL}")
    code, out, err = holdfast(words[0], run, *words[1:])
    assert (code, err) == (0, "")
    assert not CONTROL.search(out)
    shown = (tmp_path / "page.html").read_text() if words[0] == "report" else out
    assert "\\x1b]0;owned\\x07" in shown
    assert not CONTROL.search(shown)


def test_an_error_is_one_line_whatever_names_are_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for name in ("a", f"{EVIL.replace('/', '')}\nholdfast: all is well"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.png").write_bytes(b"no image")
    line = [sys.executable, "-m", "holdfast", "run", "--dataset", f"folder:{folder}", "--out", str(tmp_path / "run")]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "TERM": "xterm"}, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not CONTROL.search(done.stderr)


def test_class_names_in_predictions_and_plans_are_written_out(tmp_path: Path, holdfast: Command) -> None:
    name = EVIL.replace("/", "")
    for kind in (name, "cat"):
        for i in range(6):
            (tmp_path / "mine" / kind).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (40 * i, 0, 0)).save(tmp_path / "mine" / kind / f"{i}.png")
    settings = ["--dataset", f"folder:{tmp_path / 'mine'}", "--tasks", "1", "--set", "data.size=16"]
    settings += ["--set", "plan.clients=2", "--set", "plan.selected=2", "--set", "plan.rounds=1"]
    settings += ["--set", "train.epochs=1"]
    assert holdfast("run", *settings, "--out", tmp_path / "run")[0] == 0
    for words in (
        ["plan", *settings],
        ["data", "info", f"folder:{tmp_path / 'mine'}"],
        ["predict", tmp_path / "run", tmp_path / "mine" / name / "1.png"],
        ["show", tmp_path / "run"],
    ):
        code, out, _ = holdfast(*words)
        assert code == 0
        assert not CONTROL.search(out), words
        assert words[0] == "show" or "x1b" in out


def test_the_console_of_the_commands_is_such_a_terminal() -> None:
    assert isinstance(console.out, Terminal)
