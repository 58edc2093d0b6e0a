"""`holdfast serve`: the global server as a process."""

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast import __version__
from holdfast.config import to_toml
from holdfast.deploy.clients import Deployed, Evaluation
from holdfast.deploy.courier import Courier
from holdfast.deploy.envelope import Envelope
from holdfast.deploy.live import LiveFederation, LivePlan
from holdfast.deploy.party import has_proxy, setup_of
from holdfast.deploy.proxy_link import ProxyLink
from holdfast.deploy.remote import ModelSink, RemoteSelector
from holdfast.deploy.settings import Kit
from holdfast.deploy.summary import figures_of, write_summary
from holdfast.errors import HoldfastError
from holdfast.experiment import aggregation_of, enrolment_of
from holdfast.files import write_atomic, write_json
from holdfast.machine import one_thread
from holdfast.protocol.codec import MalformedMessage, Weights, pack, unpack
from holdfast.protocol.messages import Job, TaskEnded
from holdfast.proxy.prototype_server import build_selector
from holdfast.results import checksums
from holdfast.results.record import Record, only_writer
from holdfast.seeding import torch_generator
from holdfast.server.clients import Opened
from holdfast.server.collection import Check, Quorum
from holdfast.server.metrics import Counts
from holdfast.server.server import Server
from holdfast.simulation.rounds import run_round

KEPT = 2  # checkpoints
POLL = 2.0  # seconds between two looks for sites and new classes
RETRIES = 2

log = logging.getLogger("holdfast.deploy")


class Later:
    """The record's figures come a round later: sites evaluate a model when they get it."""

    def __init__(self, clients: Deployed) -> None:
        self.clients = clients

    def start(self) -> None:
        pass

    def detection(self, round_index: int, opened: Opened) -> dict[str, Any]:
        """Who noticed; a server cannot know who should have."""
        return {"noticed": [self.clients.names[n] for n in sorted(self.clients.announced)]}

    def model(self, round_index: int) -> tuple[dict[str, Any], Counts]:
        return {}, np.zeros((0, 1), dtype=np.int64)


class GlobalServer:
    """The server of one federation, its record and its checkpoints."""

    def __init__(
        self,
        kit: Kit,
        state: Path,
        courier: Courier,
        wire: Callable[[], dict[str, int]] = dict,
        link: ModelSink | None = None,
    ) -> None:
        self.kit, self.state, self.courier, self.wire = kit, state, courier, wire
        agreement, config = kit.agreement, kit.agreement.config
        self.config, self.rounds = config, agreement.rounds
        setup = setup_of(agreement, config.seed)
        model = config.method.build_model(setup.spec, torch_generator(config.seed, "model"))
        self.server = Server(model, config.seed, aggregation_of(config.train))
        self.folder = state / "record"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.accuracy: float | None = None
        self.clients = Deployed(
            courier, agreement.digest, self._run_name(), self._check, self.rounds.minimum, self.rounds.deadline
        )
        selector = (
            RemoteSelector(link or ProxyLink(kit), self.clients, state / "unsent")
            if has_proxy(agreement)
            else build_selector(config.method, setup)
        )
        plan = LivePlan(self.server, config.plan.rounds, self.rounds.total, config.seed, config.plan.selected)
        enrolment = enrolment_of(config, setup)
        quorum = Quorum(self.rounds.minimum, RETRIES)
        self.federation = LiveFederation(plan, config.method, enrolment, self.server, selector, quorum)
        self.done = 0
        self.held: dict[str, Any] | None = None  # the last line, until its model is evaluated
        self.counts: Counts = np.zeros((0, 1), dtype=np.int64)
        self.state_of_play = "starting"
        self.sites: dict[str, dict[str, Any]] = {}  # for the status: since when, last round, ...
        self.refused = 0

    def _run_name(self) -> str:
        """This federation's run: drawn once."""
        file = self.state / "run.json"
        if not file.exists():
            write_json(file, {"run": secrets.token_hex(8), "started": time.time(), "version": __version__})
        return str(json.loads(file.read_bytes())["run"])

    def _check(self, job: Job) -> Check:
        most = self.federation.enrolment.max_samples
        return self.server.check(self.config.method, job.round_index, job.phase, most)

    def admit(self, site: str, number: int) -> None:
        """A site with a valid certificate has come, or come back."""
        known = self.clients.names.get(number)
        if known not in (None, site):
            raise HoldfastError(f"number {number} belongs to the site {known}, not to {site}; use the newest kits")
        self.clients.names[number] = site
        self.sites.setdefault(site, {})["since"] = time.time()
        self.audit("join", site=site)

    # the loop

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Runs rounds until `stopped`, or until all are done."""
        with one_thread(), only_writer(self.folder):
            write_atomic(self.folder / "config.toml", to_toml(self.config).encode())
            lines, digest = self._restore()
            with Record(self.folder, lines, digest) as record:
                self.record = record
                log.info("run %s: going on after round %d", self.clients.run[:8], self.done)
                while not stopped():
                    if self.rounds.total and self.done >= self.rounds.total:
                        self._settle()
                        self._say("finished")
                        return
                    if self.rounds.pause and self.federation.plan.over(self.done) and not self._woken(stopped):
                        continue
                    ready = self._ready(stopped)
                    if not stopped():
                        self._round(ready)

    def _ready(self, stopped: Callable[[], bool]) -> list[int]:
        """The numbers of the sites that take part now; waits until there are enough."""
        least = max(self.rounds.minimum, 1 if self.done else self.rounds.start_with)
        while not stopped():
            present = [site for site in self.courier.present() if site in self.clients.names.values()]
            new = [site for site in present if self.sites.setdefault(site, {}).get("greeted") is not True]
            for site, why in self.clients.greet(new).items() if new else ():
                self.sites[site]["greeted"] = not why
                if why:
                    log.warning("%s is not ready: %s", site, why)
            ready = [n for n, site in self.clients.names.items() if site in present and self.sites[site].get("greeted")]
            if len(ready) >= least:
                return sorted(ready)
            self._say(f"waiting for {least - len(ready)} more sites")
            time.sleep(min(POLL, 0.5))
        return []

    def _woken(self, stopped: Callable[[], bool]) -> bool:
        """While nothing is new: settles the record, then asks the sites now and then. Has a new class come?"""
        self._settle()
        ready = self._ready(stopped)
        news = self.clients.poll([self.clients.names[n] for n in ready], self.server.registry) if ready else []
        if news:
            log.info("new classes at %s", ", ".join(news))
            return True
        self._say("paused: nothing is new")
        end = time.monotonic() + POLL
        while time.monotonic() < end and not stopped():
            time.sleep(0.1)
        return False

    def _round(self, ready: Sequence[int]) -> None:
        index, plan = self.done, self.federation.plan
        plan.open(index, ready)
        self.clients.ready, self.clients.known = ready, len(self.server.registry.names)
        self._say(f"round {index + 1}")
        before = self.wire()
        line = run_round(self.federation, self.clients, Later(self.clients), index, lambda: None).line
        after = self.wire()
        line |= {
            "sites": {str(n): self.clients.names[n] for n in ready},
            "counted": self.clients.counted,
            "classes": list(self.server.registry.names),
            "growths": list(self.server.registry.growths),
            "digest": digest_of(self.server.weights),
            "ended": plan.ends_task(index),
            "cycle": plan.cycle,
            "away": dict(sorted(self.clients.away.items())),
            "wire": {key: after[key] - before[key] for key in after},
        }
        self.refused += len(line["refused"])
        for one in line["refused"]:
            self.audit("refused", round=index + 1, site=self.clients.names.get(one["client"]), why=one["reason"])
        for number in self.clients.counted:
            self.sites[self.clients.names[number]]["round"] = index + 1
        self._flush(self.clients.evaluations)
        self.held = line
        self.done += 1
        self._save()
        self.audit("round", round=self.done, counted=[self.clients.names[n] for n in self.clients.counted])
        log.info("round %d: %d of %d sites counted", self.done, len(self.clients.counted), len(plan.selected[index]))

    def _settle(self) -> None:
        """Has the last model evaluated, and writes the result of the rounds so far."""
        if self.held is None:
            return
        ready = [self.clients.names[n] for n in self.clients.ready]
        if not ready:  # after a restart
            ready = [site for site in self.courier.present() if site in self.clients.names.values()]
        model = TaskEnded(self.done - 1, self.server.registry, dict(self.server.weights))
        self._flush(self.clients.evaluate(ready, model))
        self._save()
        write_summary(self.folder, self.config, self.federation, self.counts, self.clients.names)
        log.info("the record is in %s", self.folder)

    def _flush(self, evaluations: Mapping[str, Evaluation]) -> None:
        """Writes the line that waits for the evaluation of its model."""
        if self.held is None:
            return
        figures, self.counts = figures_of(self.held, evaluations, self.config.seed)
        (self.folder / checksums.NAME).unlink(missing_ok=True)  # of the summary so far; the record goes on
        self.record.write({**self.held, **figures})
        self.accuracy = figures["accuracy"]
        self.held = None

    # status and audit

    def _say(self, what: str) -> None:
        if what != self.state_of_play:
            log.info("%s", what)
        self.state_of_play = what
        present = set(self.courier.present())
        sites = {
            name: {
                "connected": name in present,
                "since": self.sites.get(name, {}).get("since"),
                "round": self.sites.get(name, {}).get("round"),
                "proxy": self.clients.away.get(name, "") or "reached",
            }
            for _, name in sorted(self.clients.names.items())
        }
        facts = {
            "server": True,
            "run": self.clients.run,
            "state": what,
            "round": self.done,
            "classes": len(self.server.registry.names),
            "accuracy": self.accuracy,
            "refused": self.refused,
            "bytes": self.wire(),
            "sites": sites,
            "rounds_left": max(0, self.federation.plan.cycle - (self.done - self.server.last_growth)),
            "written": time.time(),
        }
        write_json(self.state / "status.json", facts)

    def audit(self, what: str, **facts: Any) -> None:
        """One line in the audit log: who came, what was refused, who was counted; never a secret."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "what": what, **facts}
        with open(self.state / "audit.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    # checkpoints

    def _save(self) -> None:
        """Everything that a restarted server needs, in one file; the last two are kept."""
        parts = {f"server/{k}": pack("part", *v) for k, v in self.server.snapshot().items()}
        parts |= {f"selector/{k}": pack("part", *v) for k, v in self.federation.selector.snapshot().items()}
        remembered, ends = self.clients.remembered()
        parts |= {f"end/{k}": v for k, v in ends.items()}
        facts = {
            "version": __version__,
            "done": self.done,
            "lines": self.done - (self.held is not None),
            "digest": self.record.digest,
            "held": self.held,
            "clients": remembered,
            "joined": self.federation.plan.joined.tolist(),
            "counts": self.counts.tolist(),
        }
        body = Envelope(facts, parts).to_bytes()
        folder = self.state / "checkpoints"
        folder.mkdir(exist_ok=True, mode=0o700)
        name = f"round-{self.done:08d}-{facts['lines']:08d}.bin"
        write_atomic(folder / name, hashlib.sha256(body).digest() + body)
        for old in sorted(folder.glob("round-*.bin"))[:-KEPT]:
            old.unlink()

    def _restore(self) -> tuple[int, str]:
        """Goes back to the newest whole checkpoint; returns the lines of the record and their hash."""
        for file in sorted((self.state / "checkpoints").glob("round-*.bin"), reverse=True):
            blob = file.read_bytes()
            try:
                if hashlib.sha256(blob[32:]).digest() != blob[:32]:
                    raise MalformedMessage("it does not match its hash")
                saved = Envelope.from_bytes(blob[32:])
            except MalformedMessage as error:
                log.warning("the checkpoint %s cannot be used (%s); trying the one before", file, error)
                file.unlink()
                continue
            facts = saved.facts
            if facts["version"] != __version__:
                raise HoldfastError(
                    f"{self.state} was written by Holdfast {facts['version']} and this is {__version__}; use that"
                )
            self.done, self.held = facts["done"], facts["held"]
            self.counts = np.array(facts["counts"], dtype=np.int64)
            self.federation.plan.joined = np.array(facts["joined"], dtype=np.int64)
            of = {
                role: {k.partition("/")[2]: v for k, v in saved.parts.items() if k.startswith(f"{role}/")}
                for role in ("server", "selector", "end")
            }
            self.server.restore({k: unpack("part", v) for k, v in of["server"].items()})
            self.federation.selector.restore({k: unpack("part", v) for k, v in of["selector"].items()})
            self.clients.remember(facts["clients"], of["end"])
            return facts["lines"], facts["digest"]
        return 0, ""


def digest_of(weights: Weights) -> str:
    """A hash of a model, the same wherever its bits are the same."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
