"""What a federation is, as the coordinator writes it down (`federation.toml`), and what a party finds in its kit."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked

from holdfast import __version__
from holdfast.config import Config, load_config, to_tree
from holdfast.errors import HoldfastError, nearest
from holdfast.files import LONGEST, parse_json, parse_toml, read_limited
from holdfast.settings import STRICT, Count

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}\Z")
FORBID = ConfigDict(extra="forbid")
DATA = "folder:site"  # the data set of a site is the folder that it is started with


@checked(frozen=True, config=STRICT)
class Address:
    """Where a party is reached, and where it listens."""

    address: str
    listen: str | None = None  # default: the port of `address`, on all interfaces
    max_megabytes: Count = 1024  # of one message

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def bind(self) -> tuple[str, int]:
        host, port = split_address(self.listen or f"0.0.0.0:{split_address(self.address)[1]}")
        return host, port


@checked(frozen=True, config=STRICT)
class Rounds:
    """When a round takes place."""

    minimum: Count = 1  # sites without which no round is counted
    deadline: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600.0  # seconds for the answers of a round
    total: Annotated[int, Field(ge=0, le=1_000_000)] = 0  # rounds after which the federation stops; 0: never
    pause: bool = True  # wait for new classes once a task's rounds are over
    start_with: Count = 1  # sites that the first round waits for


@checked(frozen=True, config=STRICT)
class Evaluation:
    """What sites hold out and tell of it."""

    share: Annotated[float, Field(ge=0, lt=1)] = 0.2  # of each class's images
    most: Count = 200  # images of a class
    totals_only: bool = False  # a site tells how many images were right, not which class was taken for which


@dataclass(frozen=True)
class Agreement:
    """All that the parties of a federation have agreed on; its digest is in every kit."""

    name: str
    server: Address
    proxy: Address
    rounds: Rounds
    evaluation: Evaluation
    classes: int  # most classes that the federation can ever have
    experiment: Mapping[str, Any]  # a config: method, model, train, plan.rounds, plan.memory, data.size, seed, ...
    shared_seeds: bool = False  # for tests only: secret seeds equal the experiment's, so that a replay can compare

    @property
    def config(self) -> Config:
        tree = {**self.experiment, "data": {**self.experiment.get("data", {}), "name": DATA}}
        return load_config({**tree, "plan": {"growth": "announce", "observe": "selected", **tree.get("plan", {})}})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "experiment": dict(self.experiment)}

    @property
    def digest(self) -> str:
        """The same for all parties, or they are not in the same federation."""
        agreed = {key: value for key, value in self.to_json().items() if key not in ("server", "proxy", "rounds")}
        agreed["experiment"] = to_tree(self.config)
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Kit:
    """A party's start-up kit."""

    folder: Path
    role: str  # server, proxy or site
    name: str
    number: int  # of a site; -1
    agreement: Agreement

    def file(self, name: str) -> Path:
        return self.folder / name

    @property
    def secret(self) -> int:
        """The party's secret seed."""
        path = self.file("secret.seed")
        try:
            mode, text = path.stat().st_mode, path.read_text()
        except OSError as error:
            raise HoldfastError(f"cannot read {path}: {error.strerror}; take the whole kit") from error
        if mode & 0o077:
            raise HoldfastError(f"others can read {path}; run: chmod 600 {path}")
        if not text.strip().isdigit():
            raise HoldfastError(f"{path} holds no seed; take the kit again as it was written")
        return int(text)


def split_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise HoldfastError(f"{text!r} is not an address; write host:port, for example server.example.org:9092")
    return host.strip("[]"), int(port)


def check_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.match(name):
        raise HoldfastError(
            f"{name!r} cannot be a name; use small letters, digits and hyphens, at most 40, for example 'st-mary'"
        )
    return name


SECTIONS: dict[str, type] = {"server": Address, "proxy": Address, "rounds": Rounds, "evaluation": Evaluation}


def read_federation(file: Path) -> tuple[Agreement, list[str]]:
    """The agreement of a `federation.toml`, and its sites."""
    try:
        tree = parse_toml(read_limited(file, LONGEST).decode("utf-8-sig"))
    except OSError as error:
        raise HoldfastError(f"cannot read {file}: {error.strerror}; give the path of a federation.toml") from error
    except ValueError as error:
        raise HoldfastError(f"{file} is not TOML: {error}; see docs/deploy.md for an example") from error
    sites = tree.pop("sites", None)
    if not isinstance(sites, list) or not sites:
        raise HoldfastError(f'{file} names no sites; write for example: sites = ["north", "south"]')
    names = [check_name(site) for site in sites]
    if len(set(names)) != len(names):
        raise HoldfastError(f"{file} names a site twice; every site needs a name of its own")
    return agreement_of(tree, str(file)), names


def agreement_of(tree: Mapping[str, Any], where: str) -> Agreement:
    """A validated agreement."""
    known = [field.name for field in fields(Agreement)]
    for key in tree:
        if key not in known:
            raise HoldfastError(f"{where}: unknown setting {key!r}; {nearest(key, known)}")
    for key in ("server", "proxy"):
        if key not in tree:
            raise HoldfastError(f'{where} lacks [{key}] with its address, for example address = "host:9092"')
    parts = {key: _section(where, key, kind, tree.get(key, {})) for key, kind in SECTIONS.items()}
    classes, experiment = tree.get("classes", 100), tree.get("experiment", {})
    if type(classes) is not int or not 1 <= classes <= 100_000:
        raise HoldfastError(f"{where}: classes = {classes!r} should be the most classes there can ever be, such as 100")
    if not isinstance(experiment, Mapping):
        raise HoldfastError(f"{where}: [experiment] should hold sections of a config, such as [experiment.method]")
    agreement = Agreement(
        check_name(tree.get("name")),
        classes=classes,
        experiment=experiment,
        shared_seeds=bool(tree.get("shared_seeds", False)),
        **parts,
    )
    for place in (agreement.server, agreement.proxy):
        split_address(place.address)
        _ = place.bind
    plan = agreement.config.plan  # raises HoldfastError if the experiment is not possible
    if plan.growth != "announce" or plan.observe != "selected":
        raise HoldfastError(f"{where}: a deployed federation needs plan.growth=announce and plan.observe=selected")
    if agreement.config.method.all_at_once:
        raise HoldfastError(
            f"{where}: the method {agreement.config.method.name} needs all classes at once; use another"
        )
    return agreement


def _section(where: str, key: str, kind: type, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise HoldfastError(f"{where}: {key} should be a section [{key}]")
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            raise HoldfastError(f"{where}: unknown setting {key}.{name}; {nearest(name, known)}")
    try:
        return kind(**values)
    except (ValidationError, TypeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "address is missing"
        raise HoldfastError(f"{where}: [{key}] is not possible: {reason[0].lower()}{reason[1:]}") from error


def read_kit(folder: Path, role: str) -> Kit:
    """A party's kit; refused if it is another party's, another version's, or not as it was written."""
    file = folder / "kit.json"
    try:
        facts = parse_json(read_limited(file, LONGEST))
        version, found = str(facts["version"]), str(facts["role"])
        name, number, digest, tree = str(facts["name"]), int(facts["number"]), facts["digest"], facts["agreement"]
    except OSError as error:
        raise HoldfastError(f"{folder} is no kit: {file.name}: {error.strerror}; see 'holdfast provision'") from error
    except (ValueError, KeyError, TypeError) as error:
        raise HoldfastError(f"{file} is damaged ({error}); take the kit again as it was written") from error
    if found != role:
        command = {"server": "holdfast serve", "proxy": "holdfast proxy", "site": "holdfast join"}.get(found, "another")
        raise HoldfastError(f"{folder} is the kit of a {found}, which is started with {command}")
    if version != __version__:
        raise HoldfastError(f"the kit {folder} is of Holdfast {version} and this is {__version__}; install {version}")
    agreement = agreement_of(tree, str(file))
    if agreement.digest != digest:
        raise HoldfastError(f"{file} has been changed since it was written; ask the coordinator for the kit again")
    return Kit(folder, found, name, number, agreement)
