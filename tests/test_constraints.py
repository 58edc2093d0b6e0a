"""constraints.txt pins every package of every extra, the transitive ones too, and the pins fit together."""

import re
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {canonicalize_name(pin.name): pin for pin in map(Requirement, (x for x in LINES if not x.startswith("#")))}


def asked() -> list[Requirement]:
    """What the package and its extras ask for."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    return [Requirement(x) for group in [PROJECT["project"]["dependencies"], *extras] for x in group]


def applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})


def satisfied(requirement: Requirement) -> bool:
    pin = PINS.get(canonicalize_name(requirement.name))
    return pin is not None and requirement.specifier.contains(pinned_version(pin), prereleases=True)


def pinned_version(pin: Requirement) -> str:
    (only,) = pin.specifier
    return only.version


def closure() -> tuple[dict[str, Distribution], list[str]]:
    """The installed packages that the extras lead to, and the requirements on the way that the pins do not meet.

    A package that is installed at another version than its pin is not asked: its requirements are another version's."""
    installed = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    missing, seen, followed = [], set(), {}
    todo = [("holdfast", requirement, frozenset[str]()) for requirement in asked()]
    while todo:
        whose, requirement, extras = todo.pop()
        if not applies(requirement, set(extras)):
            continue
        name = canonicalize_name(requirement.name)
        if not satisfied(requirement):
            missing.append(f"{whose} wants {requirement}, and the pin is {PINS.get(name)}")
            continue
        key = (name, frozenset(requirement.extras))
        distribution = installed.get(name)
        if key in seen or distribution is None:
            continue
        seen.add(key)
        if Version(distribution.version).public == pinned_version(PINS[name]):
            followed[str(name)] = distribution
            todo += [(str(name), Requirement(x), key[1]) for x in distribution.requires or []]
    return followed, missing


def test_every_line_pins_one_exact_version() -> None:
    assert len(PINS) > 100
    for pin in PINS.values():
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), pin


def test_every_requirement_down_to_the_last_is_pinned_and_met() -> None:
    followed, missing = closure()
    assert missing == []
    assert {"torch", "numpy", "pytest", "jinja2", "execnet"} <= set(followed)  # the walk went through the metadata


def test_no_package_of_cuda_is_pinned_and_torch_is_the_release_that_the_input_names() -> None:
    assert [name for name in PINS if re.match(r"nvidia|cuda|triton", name)] == []
    assert PROJECT["tool"]["uv"]["constraint-dependencies"] == [str(PINS["torch"])]


def test_the_file_says_how_it_is_made_and_the_makefile_does_it() -> None:
    command = LINES[1].removeprefix("#").strip()
    assert command.startswith("uv pip compile pyproject.toml --all-extras")
    assert f"$(BIN)/{command}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
