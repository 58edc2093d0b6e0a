"""What the README shows is true: its method works, its files are there, its commands are known."""

import re
import types
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import app
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.methods import METHODS
from holdfast.rounds import play

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_method_trains(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "class Calm" in block]
    assert len(code.splitlines()) < 40
    module = types.ModuleType("calm")
    exec(compile(code, "calm.py", "exec"), module.__dict__)
    monkeypatch.setitem(METHODS, "calm", module.Calm)
    config = load_config({**small, "method": {"name": "calm", "weight": 0.5}})
    data = load_data(config.data)
    lines = [played.line for played in play(build_federation(config, data, plan_of(config, data)), Serial())]
    assert set(lines[-1]["losses"]) == {"classification", "penalty"}
    assert lines[-1]["losses"]["penalty"] > 0


def test_the_map_names_every_room_and_no_other() -> None:
    named = set()
    for cell in re.findall(r"^\| (`.*?) \|", TEXT, re.M):
        files = re.findall(r"`([^`]+)`", cell)
        folder = files[0].rsplit("/", 1)[0]
        named |= {file if "/" in file else f"{folder}/{file}" for file in files}
    assert all((ROOT / file).exists() for file in named), [file for file in named if not (ROOT / file).exists()]
    rooms = {file.relative_to(ROOT).as_posix() for file in (ROOT / "holdfast").rglob("*.py")}
    covered = {room for room in rooms if any(room.startswith(f) for f in named if f.endswith("/"))} | named
    unnamed = {room for room in rooms - covered if not room.endswith(("__init__.py", "__main__.py"))}
    assert unnamed == set()


def test_links_and_commands_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    commands |= {group.name for group in app.registered_groups if group.name}
    assert set(re.findall(r"(?:^    |; )holdfast (\w+)", TEXT, re.M)) <= commands
    for config in re.findall(r"configs/[\w-]+\.toml", TEXT):
        assert (ROOT / config).exists()
