"""`holdfast run` in one process, with a folder as a cache of client work that runs share:
`python scripts/run_shared.py FOLDER CONFIG [the flags of holdfast run]`.

Runs that differ only in the number of tasks or in what the proxy does begin alike, and their clients do the same work
to the bit. The key of a client's outcome is everything that it depends on: the client's state, its messages, the data
that have arrived, the settings that reach a client, and, if it sends prototypes, how. Only `seconds` differ from a run
without the cache."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from holdfast import cli, experiment
from holdfast.client.training import ClientWork, Outcome
from holdfast.config import Config, to_tree
from holdfast.data.images import DataSet
from holdfast.engines.serial import Serial
from holdfast.files import write_atomic
from holdfast.methods.context import World
from holdfast.protocol.messages import Inbox, PrototypeShare, Reply, State

PROXYS = ("sbm", "ssa", "iterations", "start", "rate", "snapshots", "augmented", "radius", "omega", "patience")
PROTOTYPES = ("npb", "capacity", "latent_noise", "perturb_steps", "perturb_rate")


class Shared(Serial):
    """One client after another; outcomes that are in the folder are not computed again."""

    def __init__(self, folder: Path, config: Config, world: World) -> None:
        tree = to_tree(config)
        method = {key: value for key, value in tree["method"].items() if key not in PROXYS + PROTOTYPES}
        data = {key: value for key, value in tree["data"].items() if key != "classes"}
        sections = [config.seed, method, data, tree["plan"]["rounds"], tree["model"], tree["train"], world.memory]
        self.about = json.dumps(sections, sort_keys=True)
        outputs = None if world.encoder is None else sum(tensor.numel() for tensor in world.encoder.parameters())
        self.prototypes = json.dumps([outputs, *(tree["method"].get(key) for key in PROTOTYPES)])
        self.folder, self.plan = folder, world.plan

    def map(self, work: ClientWork, states: Sequence[State], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        for state, inbox in zip(states, inboxes, strict=True):
            arrived = self.plan.arrivals[state.client][: self.plan.current(state.client, inbox.job.round) + 1]
            digest = hashlib.sha256(f"{self.about}{arrived}".encode())
            for part in (state, inbox.job, inbox.teachers):
                digest.update(part.to_bytes())
            plain = self.folder / digest.hexdigest()
            digest.update(self.prototypes.encode())
            sharing = self.folder / digest.hexdigest()
            known = next((place for place in (plain, sharing) if (place / "state").exists()), None)
            outcome = work(state, inbox) if known is None else _read(known)
            if known is None:
                _write(sharing if outcome[2] else plain, outcome)
            yield outcome


def _write(place: Path, outcome: Outcome) -> None:
    """Writes the state last: where it is, the outcome is complete."""
    state, reply, shares = outcome
    place.mkdir(parents=True, exist_ok=True)
    for name, part in [
        ("reply", reply),
        *((f"share{i:04d}", share) for i, share in enumerate(shares)),
        ("state", state),
    ]:
        write_atomic(place / name, part.to_bytes())


def _read(place: Path) -> Outcome:
    shares = (PrototypeShare.from_bytes(file.read_bytes()) for file in sorted(place.glob("share*")))
    state, reply = (place / "state").read_bytes(), (place / "reply").read_bytes()
    return State.from_bytes(state), Reply.from_bytes(reply), tuple(shares)


def main(folder: Path, *flags: str) -> None:
    def engine(config: Config, data: DataSet, world: World) -> Shared:
        return Shared(folder, config, world)

    experiment.choose_engine = engine  # type: ignore[assignment]
    sys.argv = ["holdfast", "run", *flags]
    cli.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
