"""Computes a real federation again as a simulation, and compares the global models round by round.

The server's record says which sites were counted, and every site's own log what came to it in which round."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.data import folder
from holdfast.data.decode import decode_image
from holdfast.data.images import DataSet, Images, ImageSet
from holdfast.deploy.party import has_proxy, setup_of
from holdfast.deploy.serve import digest_of
from holdfast.deploy.settings import Kit, read_kit
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import aggregation_of, enrolment_of
from holdfast.machine import one_thread
from holdfast.protocol.messages import Announcement, Broadcast
from holdfast.proxy.prototype_server import build_selector
from holdfast.seeding import torch_generator
from holdfast.server.clients import Opened
from holdfast.server.collection import Quorum
from holdfast.server.metrics import Counts
from holdfast.server.server import Server
from holdfast.simulation.federation import Federation, SimulatedClients
from holdfast.simulation.plan import Plan
from holdfast.simulation.rounds import run_round
from holdfast.simulation.timeline import Arrival

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ReplayPlan(Plan):
    """What has happened, as a plan."""

    ends: tuple[bool, ...] = ()
    task: tuple[int, ...] = ()

    def ends_task(self, round_index: int) -> bool:
        return self.ends[round_index]

    def task_of_round(self, round_index: int) -> int:
        return self.task[round_index]

    def rounds_of(self, task: int) -> range:
        return range(1)


class ReplayClients(SimulatedClients):
    """Simulated clients whose announcements are heard when the real ones were."""

    lines: Lines = ()

    def announce(self, class_list: Broadcast) -> tuple[list[Announcement], int]:
        super().announce(class_list)
        grown = tuple(self.lines[class_list.round_index]["grown"])
        return [Announcement(class_list.round_index, grown)] if grown else [], 0

    def open_round(self, broadcast: Broadcast, selected: Sequence[int], observers: np.ndarray) -> Opened:
        opened = super().open_round(broadcast, selected, observers)
        later = self.lines[broadcast.round_index + 1 : broadcast.round_index + 2]
        if later:
            grown = tuple(later[0]["grown"])
            opened.announcements = [Announcement(broadcast.round_index, grown)] if grown else []
        return opened


class NoScores:
    """A replay compares models; their figures are in the record."""

    def start(self) -> None:
        pass

    def detection(self, round_index: int, opened: Opened) -> dict[str, Any]:
        return {}

    def model(self, round_index: int) -> tuple[dict[str, Any], Counts]:
        return {}, np.zeros((0, 1), dtype=np.int64)


@dataclass(frozen=True)
class Compared:
    """A round's two digests."""

    round: int
    recorded: str
    found: str

    @property
    def same(self) -> bool:
        return self.recorded == self.found


def replay(
    record: Path,
    kits: Sequence[Path],
    images: Path | None = None,
    done: Callable[[Compared], None] = lambda _: None,
) -> list[Compared]:
    """The digests of all rounds; `kits` are those of the sites, with their state. Images that have left a site's folder
    are looked for in `images`/<site>/."""
    lines = _read_lines(record)
    sites = [read_kit(kit, "site") for kit in kits]
    if not sites:
        raise HoldfastError("name the kits of the sites, whose images and logs a replay reads")
    agreement = sites[0].agreement
    if any(site.agreement.digest != agreement.digest for site in sites):
        raise HoldfastError("these kits are not of the same federation")
    _require_all(lines, sites)
    if has_proxy(agreement) and not agreement.shared_seeds:
        raise HoldfastError(
            "the proxy and the sites of this federation have secret seeds, so nobody can compute it again"
        )
    data, arrivals = _world(lines, sites, agreement.config.data.size or 0, images)
    plan = _plan(lines, data.classes, arrivals, agreement.config.plan.rounds)
    return _run(sites[0], lines, data, plan, done)


def _run(kit: Kit, lines: Lines, data: DataSet, plan: ReplayPlan, done: Callable[[Compared], None]) -> list[Compared]:
    config = kit.agreement.config
    setup = setup_of(kit.agreement, config.seed)
    with one_thread():
        model = config.method.build_model(setup.spec, torch_generator(config.seed, "model"))
        server = Server(model, config.seed, aggregation_of(config.train))
        federation = Federation(
            plan,
            data,
            config.method,
            enrolment_of(config, setup),
            server,
            build_selector(config.method, setup),
            "announce",
            "selected",
            quorum=Quorum(0, 0),
        )
        clients = ReplayClients(federation, Serial(), federation.work())
        clients.lines = lines
        found = []
        for round_index, line in enumerate(lines):
            run_round(federation, clients, NoScores(), round_index, lambda: None)
            found.append(Compared(round_index + 1, line["digest"], digest_of(server.weights)))
            done(found[-1])
    return found


def _read_lines(record: Path) -> Lines:
    file = record / "record.jsonl"
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise HoldfastError(f"{file} cannot be read ({error}); give the record folder of a server") from error
    if not lines or any("digest" not in line or line["round"] != i for i, line in enumerate(lines, 1)):
        raise HoldfastError(f"{file} is not the record of a real federation; 'holdfast show' reads simulations")
    return lines


def _require_all(lines: Lines, sites: Sequence[Kit]) -> None:
    given = {site.number for site in sites}
    for line in lines:
        for number in line["counted"]:
            if number not in given:
                raise HoldfastError(f"the site {line['sites'][str(number)]} was counted, but its kit is not given")


def _world(
    lines: Lines, sites: Sequence[Kit], size: int, images_of: Path | None
) -> tuple[DataSet, list[list[tuple[int, dict[str, list[int]]]]]]:
    """All images that sites have trained on, and what came to each: (round, class -> rows), in time order."""
    pixels: list[np.ndarray] = []
    labels: list[str] = []
    rows: dict[tuple[int, str], int] = {}
    arrivals: list[list[tuple[int, dict[str, list[int]]]]] = [[] for _ in range(1 + max(site.number for site in sites))]
    for site in sites:
        for facts in _log_of(site):
            if facts["round"] >= len(lines):
                continue
            held: dict[str, list[int]] = {}
            for name, files in facts["train"].items():
                for file in files:
                    key = site.number, file
                    if key not in rows:
                        rows[key] = len(pixels)
                        pixels.append(decode_image(_place(site, facts["folder"], file, images_of), size, file))
                        labels.append(name)
                    held.setdefault(name, []).append(rows[key])
            arrivals[site.number].append((facts["round"], held))
    classes = tuple(dict.fromkeys(labels))
    numbers = torch.tensor([classes.index(name) for name in labels], dtype=torch.int64)
    images = ImageSet(Images(torch.from_numpy(np.stack(pixels))), numbers)
    return DataSet("replay", classes, images, images, folder.MEAN, folder.STD, False), arrivals


def _place(site: Kit, folder: str, file: str, images: Path | None) -> Path:
    """Where an image is, or was kept for a replay."""
    here = Path(folder) / file
    if here.exists() or images is None:
        return here
    return images / site.name / file


def _log_of(site: Kit) -> list[dict[str, Any]]:
    """What came to a site, from its state."""
    files = sorted(site.file("state").glob("*/arrival-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
    ledgers = list(site.file("state").glob("*/site.json"))
    if len(ledgers) != 1:
        raise HoldfastError(f"{site.folder} has the state of {len(ledgers)} runs; a replay needs that of one")
    count = json.loads(ledgers[0].read_bytes())["ledger"]["arrivals"]
    return [json.loads(file.read_bytes()) for file in files[:count]]


def _plan(
    lines: Lines, classes: Sequence[str], arrivals: Sequence[Sequence[tuple[int, dict[str, list[int]]]]], rounds: int
) -> ReplayPlan:
    index = {name: c for c, name in enumerate(classes)}
    never = (Arrival(len(lines), ()),)
    frozen = tuple(
        tuple(
            Arrival(when, tuple(index[name] for name in held), tuple(row for mine in held.values() for row in mine))
            for when, held in mine
        )
        or never
        for mine in arrivals
    )
    joined = [mine[0].round_index for mine in frozen]
    selected = tuple(tuple(number for number in line["counted"] if joined[number] <= r) for r, line in enumerate(lines))
    return ReplayPlan(
        tasks=((),),
        starts=(0,),
        rounds_per_task=rounds,
        arrivals=frozen,
        selected=selected,
        growths=(),
        groups=(),
        ends=tuple(line["ended"] for line in lines),
        task=tuple(line["task"] - 1 for line in lines),
    )
