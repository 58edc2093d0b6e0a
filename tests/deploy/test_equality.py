"""The deployed parties, with state on disk and bytes between them, equal the simulation to the bit: for methods with
and without the proxy, and with extras."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from holdfast.methods import METHODS as REGISTERED
from tests.deploy.local import LocalFederation
from tests.deploy.processes import glyphs, lines, write_images

METHODS = {
    "fedavg": 'name = "fedavg"\nreplay = true',
    "lga": 'name = "lga"\ncapacity = 10',
    "podnet": 'name = "podnet"',
    "bic": 'name = "bic"',
    "icarl": 'name = "icarl"',
}


if "kelp" in REGISTERED:
    METHODS["kelp"] = 'name = "kelp"'


@pytest.fixture(scope="module")
def images() -> dict:
    return glyphs(4, 24)


def start(folder: Path, method: str, images: dict, total: int = 6, pause: bool = True) -> LocalFederation:
    """North has two classes, south one of them; the others come later."""
    federation = LocalFederation(folder, METHODS[method], ["north", "south"], total, pause=pause)
    write_images(federation.images("north"), {name: images[name][:12] for name in ("class-0", "class-1")})
    write_images(federation.images("south"), {"class-1": images["class-1"][12:]})
    return federation


def grow_later(federation: LocalFederation, images: dict, after: int = 2) -> None:
    """After some rounds new classes come to north, and two old images leave south."""
    done = []

    def arrive(site: str, blob: bytes) -> None:
        if not done and len(lines(federation.record)) >= after:
            done.append(True)
            write_images(federation.images("north"), {name: images[name][:12] for name in ("class-2", "class-3")})
            shutil.copytree(federation.folder / "images", federation.folder / "all")  # the replay needs them
            for old in sorted((federation.images("south") / "class-1").glob("*.png"))[:2]:
                old.unlink()

    federation.courier.before = arrive


@pytest.mark.parametrize("method", METHODS)
def test_a_deployed_federation_equals_the_simulation_to_the_bit(method: str, images: dict, tmp_path: Path) -> None:
    federation = start(tmp_path, method, images)
    grow_later(federation, images)
    federation.server().serve(lambda: False)
    record = lines(federation.record)
    assert [line["grown"] for line in record if line["grown"]] == [["class-0", "class-1"], ["class-2", "class-3"]]
    assert len({line["digest"] for line in record[1:]}) == len(record) - 1  # every round learned something
    assert federation.replayed() == [True] * 6
