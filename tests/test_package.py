"""The package itself: its version is written once, and importing it is quick."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[1]


def test_the_version_is_written_once_and_cited() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "holdfast.__version__"}
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert cited == [holdfast.__version__]


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, holdfast; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_public_name_is_there_and_has_a_type() -> None:
    stub = ast.parse((ROOT / "holdfast" / "__init__.pyi").read_text(encoding="utf-8"))
    imported = {
        alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(imported) == holdfast.__all__
    for name, module in imported.items():
        assert getattr(holdfast, name) is getattr(sys.modules[str(module)], name)
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'nothing'"):
        getattr(holdfast, "nothing")  # noqa: B009
