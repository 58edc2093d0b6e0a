"""What the tests share: small data sets and federations that train in seconds."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chromium import CHROMIUM, Browser

from holdfast.cli import main


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests draw and decode into a cache of their own, never the user's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small() -> dict[str, object]:
    """Settings of a federation with three tasks, newcomers and stayers that trains in a second or two; not to be
    changed."""
    return {
        "data": {"name": "glyphs", "classes": 6, "train_per_class": 12, "test_per_class": 6, "size": 16},
        "plan": {
            "tasks": 3,
            "clients": 5,
            "join_per_task": 2,
            "selected": 3,
            "rounds": 2,
            "move_on": 0.7,
            "memory": 12,
        },
        "train": {"epochs": 1, "batch": 16},
    }


@pytest.fixture
def holdfast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: its words in; exit code, standard output and standard error out."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return int(stop.value.code or 0), said.out, said.err

    return run


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()
