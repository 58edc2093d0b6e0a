"""Real processes over TLS with Flower: server, proxy and sites, one of which is killed, another of which comes late."""

import json
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.deploy.processes import Processes, federation_toml, free_ports, glyphs, lines, status, write_images


def begin(folder: Path, method: str, sites: list[str], total: int, minimum: int) -> None:
    text = federation_toml(method, sites, free_ports(2), total).replace(
        f"minimum = {len(sites)}", f"minimum = {minimum}"
    )
    (folder / "federation.toml").write_text(text.replace(f"start_with = {len(sites)}", "start_with = 2"))


def test_processes_equal_the_simulation_through_kills_and_growth(tmp_path: Path) -> None:
    """LGA with its proxy: a class folder appears in mid-run, a site is killed and comes back, one joins late, the
    server is killed. The replay finds every global model to the bit."""
    begin(tmp_path, 'name = "lga"\ncapacity = 10', ["east", "north", "south"], 6, 2)
    images, kits = glyphs(4, 30), tmp_path / "kits"
    for site, part in (("north", slice(0, 12)), ("south", slice(12, 24)), ("east", slice(24, 30))):
        write_images(tmp_path / "images" / site, {name: images[name][part] for name in ("class-0", "class-1")})
    record = kits / "server" / "state" / "record"
    with Processes(tmp_path) as processes:
        done = processes.holdfast("provision", str(tmp_path / "federation.toml"), "--out", str(kits))
        assert done.returncode == 0, done.stderr

        def join(site: str) -> None:
            place = str(tmp_path / "images" / site)
            processes.start(site, "join", str(kits / f"site-{site}"), "--images", place, "--settled", "0")

        def serve() -> None:
            processes.start("server", "serve", str(kits / "server"))

        def rounds(count: int) -> None:
            processes.wait(lambda: status(kits / "server").get("round", 0) >= count, 90, f"{count} rounds")

        processes.start("proxy", "proxy", str(kits / "proxy"))
        serve()
        join("north")
        join("south")
        rounds(2)
        processes.end("server", signal.SIGKILL)
        join("east")
        serve()
        rounds(3)
        write_images(tmp_path / "images" / "north", {name: images[name][:12] for name in ("class-2", "class-3")})
        processes.end("south", signal.SIGKILL)
        join("south")
        processes.wait(lambda: status(kits / "server").get("state") == "finished", 120, "the last round")
        told = processes.holdfast("status", str(kits / "server"))
        seen = json.loads(processes.holdfast("status", str(kits / "proxy"), "--json").stdout)
        replayed = processes.holdfast(
            "replay", str(record), *(str(kits / f"site-{site}") for site in ("east", "north", "south"))
        )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "all 6 global models equal the simulation to the bit" in replayed.stdout
    found = lines(record)
    assert [name for line in found for name in line["grown"]] == [f"class-{c}" for c in range(4)]
    assert sorted({number for line in found for number in line["counted"]}) == [0, 1, 2]
    assert "site south: connected since" in told.stdout
    assert seen["prototypes"] > 0
    secrets = [(kits / f"site-{site}" / "coordinator.key").read_bytes() for site in ("north", "south")]
    shutil.rmtree(kits / "authorities")
    written = [file for file in [*tmp_path.glob("*.log"), *record.rglob("*")] if file.is_file()]
    assert not any(secret in file.read_bytes() for secret in secrets for file in written)
