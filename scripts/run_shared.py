"""`holdfast run` in one process, with client work that another run has done already taken from a folder:
`python scripts/run_shared.py FOLDER CONFIG [the flags of holdfast run]`.

Runs that differ in the number of their tasks or in what the proxy does begin alike, and their clients do the same work
to the bit. A client's outcome is found again by all that it is made of: its state (with its images and what has arrived
at it), its messages, the settings that reach a client, and, if it sends prototypes, how. Only `seconds` differ from a
run by itself."""

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
from holdfast.protocol.messages import Inbox, PrototypeShare, Reply
from holdfast.protocol.state import ClientState
from holdfast.simulation.federation import Federation

PROXYS = ("sbm", "ssa", "iterations", "start", "rate", "snapshots", "augmented", "radius", "omega", "patience")
WEIGHTS = ("cbl", "groups", "exponent", "clamp")  # without an effect as long as a client has no memory
PROTOTYPES = ("npb", "capacity", "latent_noise", "perturb_steps", "perturb_rate")


class Shared(Serial):
    """One client after another; what is in the folder is not done again."""

    def __init__(self, folder: Path, config: Config, federation: Federation) -> None:
        tree, encoder = to_tree(config), federation.selector.encoder
        method = {key: value for key, value in tree["method"].items() if key not in PROXYS + PROTOTYPES}
        data = {key: value for key, value in tree["data"].items() if key != "classes"}
        rest = [config.seed, data, tree["model"], tree["train"], federation.enrolment.memory]
        self.about = json.dumps([method, *rest], sort_keys=True)
        unweighted = {key: value for key, value in method.items() if key not in WEIGHTS}
        self.about_first = json.dumps([unweighted, *rest], sort_keys=True)
        outputs = None if encoder is None else sum(tensor.numel() for tensor in encoder.parameters())
        self.prototypes = json.dumps([outputs, *(tree["method"].get(key) for key in PROTOTYPES)])
        self.folder = folder

    def map(self, work: ClientWork, states: Sequence[ClientState], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        for state, inbox in zip(states, inboxes, strict=True):
            digest = hashlib.sha256((self.about if state.memory else self.about_first).encode())
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
    """The state last: where it is, all is."""
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
    return ClientState.from_bytes(state), Reply.from_bytes(reply), tuple(shares)


def main(folder: Path, *flags: str) -> None:
    def engine(config: Config, data: DataSet, federation: Federation) -> Shared:
        return Shared(folder, config, federation)

    experiment.choose_engine = engine  # type: ignore[assignment]
    sys.argv = ["holdfast", "run", *flags]
    cli.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
