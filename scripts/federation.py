"""`make federation`: a whole federation on this machine. Server, proxy and four sites as processes; classes that
appear at one site in mid-run, a site that joins late, one that is killed and comes back; then the report, and the
comparison with the simulation.

`python scripts/federation.py [--out runs/federation] [--kills 0]`. With kills, so many processes of all parties are
ended by `kill -9` at random moments and started again."""

import argparse
import random
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.deploy.processes import Processes, federation_toml, free_ports, glyphs, lines, status, write_images

SITES = ["east", "north", "south", "west"]
METHOD = 'name = "lga"\ncapacity = 10'


def main(out: Path, kills: int, seed: int) -> int:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    images, kits = glyphs(6, 40), out / "kits"
    for i, site in enumerate(SITES):
        part = slice(10 * i, 10 * i + 10)
        write_images(out / "images" / site, {name: arrays[part] for name, arrays in list(images.items())[:3]})
    text = federation_toml(METHOD, SITES, free_ports(2), 8, rounds=4).replace("minimum = 4", "minimum = 2")
    (out / "federation.toml").write_text(text.replace("start_with = 4", "start_with = 3"))
    with Processes(out) as processes:
        say(processes.holdfast("provision", str(out / "federation.toml"), "--out", str(kits)).stdout)
        commands = {"proxy": ["proxy", str(kits / "proxy")], "server": ["serve", str(kits / "server")]}
        for site in SITES:
            place = str(out / "images" / site)
            commands[site] = ["join", str(kits / f"site-{site}"), "--images", place, "--settled", "0"]
        for name in ("proxy", "server", "north", "south", "west"):
            processes.start(name, *commands[name])
        story(processes, out, kits, images, commands, kills, random.Random(seed))
        say(processes.holdfast("status", str(kits / "server")).stdout)
        record = kits / "server" / "state" / "record"
        report = out / "report.html"
        processes.holdfast("report", str(record), "--out", str(report))
        done = processes.holdfast("replay", str(record), *(str(kits / f"site-{site}") for site in SITES), timeout=300)
        say(done.stdout + done.stderr + f"\nreport: {report}")
    return done.returncode


def story(processes, out: Path, kits: Path, images, commands, kills: int, rng: random.Random) -> None:  # type: ignore[no-untyped-def]
    """What happens while the rounds go on."""
    told: set[str] = set()

    def once(what: str, when: bool) -> bool:
        if when and what not in told:
            told.add(what)
            say(f"round {len(lines(kits / 'server' / 'state' / 'record')) + 1}: {what}")
            return True
        return False

    end, left, next_kill = time.monotonic() + 600 + 60 * kills, kills, time.monotonic() + 15
    while status(kits / "server").get("state") != "finished":
        if time.monotonic() > end:
            raise SystemExit("the federation did not come to an end\n" + processes.logs())
        done = status(kits / "server").get("round", 0)
        if once("the site east joins", done >= 1):
            processes.start("east", *commands["east"])
        if once("the site south is killed", done >= 2):
            processes.end("south", signal.SIGKILL)
        if once("the site south comes back", done >= 3):
            processes.start("south", *commands["south"])
        if once("three new classes appear at the site north", done >= 4):
            write_images(out / "images" / "north", {name: a[:10] for name, a in list(images.items())[3:]})
        if left and time.monotonic() > next_kill:
            name = rng.choice(sorted(processes.running))
            say(f"round {done + 1}: kill -9 {name}")
            processes.end(name, signal.SIGKILL)
            processes.start(name, *commands[name])
            left, next_kill = left - 1, time.monotonic() + rng.uniform(5, 25)
        time.sleep(0.2)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/federation"))
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(main(options.out, options.kills, options.seed))
