"""What README and docs show is true: the method works, the files are there, the commands are known."""

import importlib.util
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.cli import app
from holdfast.config import describe, load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.simulation.rounds import run_rounds

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "BENCHMARKS.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_of(page: str, within: str) -> str:
    """The block of Python on a page of the documentation that has these words in it."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if within in block]
    return str(code)


def test_the_example_method_trains(small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of("adding-a-method.md", "class Calm")
    assert len(code.splitlines()) < 40
    (tmp_path / "documented.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config({**small, "method": {"name": "documented:Calm", "weight": 0.5}})
    data = load_data(config.data)
    lines = [done.line for done in run_rounds(build_federation(config, data, plan_of(config, data)), Serial())]
    assert set(lines[-1]["losses"]) == {"classification", "penalty"}
    assert lines[-1]["losses"]["penalty"] > 0


def test_the_example_data_set_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "documented_data.py").write_text(code_of("extending.md", "def cells"))
    monkeypatch.syspath_prepend(tmp_path)
    pixels, labels = np.full((6, 3, 16, 16), 7, np.uint8), np.arange(6) % 2
    parts = {"train_images": pixels, "train_labels": labels, "test_images": pixels[:4], "test_labels": labels[:4]}
    np.savez(tmp_path / "cells.npz", **parts)
    found = load_data(load_config({"data": {"name": "documented_data:cells", "path": f"{tmp_path}/cells.npz"}}).data)
    assert (found.classes, len(found.train), len(found.test)) == (("round", "long"), 6, 4)


def test_the_layout_names_every_module_and_no_other() -> None:
    named = set()
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for cell in re.findall(r"^\| (`.*?/.*?`.*?) \|", text.partition("## Files")[2], re.M):
        files = re.findall(r"`([^`]+)`", cell)
        folder = files[0].rsplit("/", 1)[0]
        named |= {file if "/" in file else f"{folder}/{file}" for file in files}
    assert all((ROOT / file).exists() for file in named), [file for file in named if not (ROOT / file).exists()]
    modules = {file.relative_to(ROOT).as_posix() for file in (ROOT / "holdfast").rglob("*.py")}
    covered = {module for module in modules if any(module.startswith(f) for f in named if f.endswith("/"))} | named
    unnamed = {module for module in modules - covered if not module.endswith(("__init__.py", "__main__.py"))}
    assert unnamed == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    commands |= {group.name for group in app.registered_groups if group.name}
    assert set(re.findall(r"(?:^    |; )holdfast (\w+)", text, re.M)) <= commands
    for config in re.findall(r"(?<![\w/])configs/[\w-]+\.toml", text):
        assert (ROOT / config).exists()


@pytest.fixture
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_results_lists_every_reproduced_page_by_its_number(hooks: Any) -> None:
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="results.md"))
    text = hooks.on_page_markdown((ROOT / "docs" / "results.md").read_text(encoding="utf-8"), page)
    _, listed = text.rsplit("\n\n", 1)  # a list begins after an empty line
    files = re.findall(r"^- \[.*\]\(reproduced/(.*)\.md\)$", listed, re.M)
    assert len(files) == len(listed.splitlines())
    assert set(files) == {path.stem for path in (ROOT / "docs" / "reproduced").glob("*.md")}
    assert files.index("table2") < files.index("table10-paper") < files.index("table12")


def test_the_page_of_settings_has_them_all(hooks: Any) -> None:
    table = hooks.settings_table()
    for setting in ("`plan.memory`", "`data.corrupt`", "`method.cbl`", "`train.lr`"):
        assert setting in table
    assert len(table.splitlines()) == 2 + len(describe())
    page = ROOT / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == hooks.settings_page(), "run `python scripts/docs_hooks.py`"
