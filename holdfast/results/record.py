"""The run folder: an append-only record, one line per round, and the result that is computed from it."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NotRequired, Required  # pydantic needs the last two for Python 3.11

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from holdfast.errors import HoldfastError
from holdfast.files import as_json, write_atomic
from holdfast.locks import lock_file
from holdfast.methods.settings import with_aggregator
from holdfast.results.checksums import write_sums
from holdfast.results.stored import Clients, StoredRun, Tree, read_file, stored

SCHEMA = 2  # of result.json and of the lines of record.jsonl

# Settings that configs of older runs lack, with the values that applied then.
NEWER: Tree = {
    "plan": {"observe": "present", "max_samples": 1_000_000, "quorum": 1, "retries": 2, "over_select": 0},
    "model": {"width": 64, "freeze": 0},
    "train": {
        "trim": 0.2,
        "hostile": 1,
        "clip": False,
        "server_optimiser": "none",
        "server_momentum": 0.9,
        "server_beta": 0.99,
    },
}
# The same for fields of methods.
NEWER_FIELDS: dict[str, dict[str, Any]] = {
    "fedavg": {"inference": "head", "prior": 0.0},
    **{name: {"prior": 0.0} for name in ("podnet", "afc", "geodl", "lga_paper", "lga_code")},
    "lga": {"prior": 0.0, "groups": "own", "exponent": "client", "clamp": False},
}


def newer_settings(method: object) -> Tree:
    """Settings that configs of older runs of this method lack, with the values that applied then."""
    return {**NEWER, "method": NEWER_FIELDS.get(str(method), {})}


Fraction = Annotated[float, Field(ge=0, le=1.000001)]  # sums may be rounded
Amount = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=2**53)]
GROUPS = {"Zo", "Zn", "Za"}  # of clients in the last task
SCORED = {"hits", "transitions", "late", "false_alarms", "client_rounds"}  # what is shown of detectors


class WorstClient(TypedDict):
    """The client with the lowest accuracy on the classes it has held."""

    client: Annotated[int, Field(ge=-1, le=2**53)]  # -1: a federation in which nobody could be asked
    accuracy: Fraction
    name: NotRequired[str]  # results of older versions have none


@dataclass(frozen=True)
class Result:
    """What a run found. Accuracies are between 0 and 1."""

    version: str  # of Holdfast
    experiment: str  # the same for runs that differ only in the seed
    method: str
    dataset: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    task_sizes: list[Annotated[int, Field(ge=1, le=1_000_000)]]
    accuracy_after_task: list[Fraction]  # on all seen classes
    accuracy_matrix: list[list[Fraction]]  # row: after which task; column: on which task
    average_accuracy: Fraction  # over tasks, the first included
    last_accuracy: Fraction
    forgetting: Annotated[float, Field(ge=-1, le=1)] | None  # None with a single task
    macro_f1: Fraction
    macro_recall: Fraction
    worst_client: WorstClient
    group_accuracy: dict[str, Fraction | None]  # Zo, Zn, Za of the last task, on the classes they have held
    bytes: dict[str, dict[str, Count]]  # channel -> kind -> bytes; older runs lack kinds that were added later
    seconds: dict[str, Amount]  # phase -> seconds
    confusion: list[list[Count]]  # at the end: true by predicted class, in head order; last column: none predicted
    classes: list[str]  # the names of its rows
    detection: dict[str, Amount | None] | None = None  # how well the clients' detectors worked
    curves: dict[str, list[Fraction]] | None = None  # after each task: macro_f1, macro_recall, and both batchwise128
    machine: str | None = None  # where it was computed: other machines may round differently
    weights: dict[str, Any] | None = None  # model.weights: the file, its SHA-256, and what became of its tensors

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Detected(TypedDict, total=False):
    """What a round's detectors did; clients by number."""

    asked: Count
    hits: list[Count]
    misses: list[Count]
    late: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    false_alarms: list[Count]


class Line(TypedDict, total=False):
    """What readers rely on in a line of a record, as far as it is there."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    task: Required[Count]
    accuracy: Fraction
    macro_f1: Fraction
    macro_recall: Fraction
    batchwise128: dict[str, Fraction]
    task_accuracy: list[Fraction]
    selected: list[Count]
    detector: Detected
    bytes: dict[str, dict[str, Count]]
    seconds: dict[str, Amount]


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keeps a second process out of a run's folder while this one writes to it; a killed process releases it."""
    with open(folder / ".lock", "w") as lock:
        try:
            lock_file(lock, wait=False)
        except OSError as error:
            raise HoldfastError(
                f"{folder} is being written by another process; wait for it, or choose another folder"
            ) from error
        try:
            yield
        finally:
            (folder / ".lock").unlink(missing_ok=True)


class Record:
    """Writes the lines of a run, one per round. Keeps the first `keep` lines that are already there, which must have
    the hash `digest`."""

    def __init__(self, folder: Path, keep: int = 0, digest: str = "") -> None:
        self.file = folder / "record.jsonl"
        self._hash = hashlib.sha256()
        if keep:  # a round that was recorded but not checkpointed is run again
            kept = b"".join(line + b"\n" for line in read_file(folder, "record.jsonl").split(b"\n")[:keep])
            self._hash.update(kept)
            if self.digest != digest:
                raise HoldfastError(
                    f"{self.file} does not match the checkpoint after round {keep}; restore the file, "
                    "or delete the folder and run it again"
                )
            write_atomic(self.file, kept)
        self._file = open(self.file, "ab" if keep else "wb")  # noqa: SIM115

    @property
    def digest(self) -> str:
        """The hash of all lines so far."""
        return self._hash.hexdigest()

    def write(self, line: dict[str, Any]) -> None:
        text = json.dumps({"schema": SCHEMA, **line}).encode() + b"\n"
        try:
            self._file.write(text)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise HoldfastError(
                f"cannot write to {self.file}: {error.strerror}; free space and run the same command again to continue"
            ) from error
        self._hash.update(text)

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_record(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's record, one per round, in order. A run is a folder or an address in an archive."""
    source = stored(run)
    lines = source.record()
    if lines is None:
        raise HoldfastError(f"{run} is not the folder of a finished run: it has no record.jsonl")
    try:
        current = [migrated(line, run) for line in lines]
        if not current or any(line["round"] != i or not line["task"] for i, line in enumerate(current, 1)):
            raise ValueError("it does not hold one line per round")
        TypeAdapter(list[Line]).validate_python(current, strict=True)
        return current
    except ValidationError as error:
        problem = error.errors()[0]
        place = problem["loc"]
        where = ".".join(map(str, place[1:]))
        raise source.damaged("record.jsonl", f"line {int(place[0]) + 1}, {where}: {problem['msg']}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise source.damaged("record.jsonl", error) from error


def read_clients(run: Path, result: Result) -> Clients | None:
    """The clients of a run according to its plan; None if the run has no plan. `result` is the result of the run."""
    source = stored(run)
    clients = source.clients()
    if clients and not {name for held in clients.held for name in held} <= set(result.classes):
        raise source.damaged("plan.json", "its classes are not those of the result")
    return clients


def read_config(run: Path) -> Tree | None:
    """The run's settings as written, section by section, plus settings that were added later; None if the file is
    missing."""
    source = stored(run)
    tree = source.config()
    if tree is None:
        return None
    if not isinstance(tree.get("method"), dict) or not all(isinstance(tree.get(name, {}), dict) for name in NEWER):
        raise source.damaged("config.toml", "it names no method, or a section is not a table")
    return complete(tree)


def complete(tree: Tree) -> Tree:
    """The settings of a run, with those that were added later as the run had them."""
    newer = newer_settings(tree["method"].get("name"))
    filled = {**tree, **{section: {**values, **tree.get(section, {})} for section, values in newer.items()}}
    return {**filled, "train": with_aggregator({"weighting": "uniform", **filled["train"]})}


def configs_of(results: Iterable[Result], runs: Iterable[Path]) -> dict[str, Tree]:
    """The settings by experiment; runs whose config is missing or damaged are skipped."""
    configs: dict[str, Tree] = {}
    for result, run in zip(results, runs, strict=True):
        with suppress(HoldfastError):
            if tree := read_config(run):
                configs[result.experiment] = tree
    return configs


def write_result(folder: Path, result: Result) -> None:
    """Writes the result and, before it, the hashes of all finished files: a folder with a result is complete."""
    content = as_json({"schema": SCHEMA, **result.to_json()})
    write_sums(folder, content)
    write_atomic(folder / "result.json", content)


def curves_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Macro F1 and recall after each task, from the lines of a record; also batchwise if recorded."""
    ends = list({line["task"]: line for line in lines}.values())
    curves = {name: [line[name] for line in ends] for name in ("macro_f1", "macro_recall")}
    if all("batchwise128" in line for line in ends):
        curves |= {f"{name}_batchwise128": [line["batchwise128"][name] for line in ends] for name in list(curves)}
    return curves


def read_result(run: Path) -> Result:
    """The result of a finished run, in a folder or an archive."""
    source = stored(run)
    try:
        facts = migrated(source.result(), run)
        if facts.get("curves") is None and source.record() is not None:  # older versions did not write them
            facts["curves"] = curves_of(read_record(run))
        result = TypeAdapter(Result).validate_python(facts)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise source.damaged("result.json", f"{where}: {problem['msg']}") from error
    except (ValueError, AttributeError) as error:
        raise source.damaged("result.json", error) from error
    except (KeyError, TypeError) as error:
        raise source.damaged("record.jsonl", f"a line lacks {error}") from error
    _check_shapes(result, source)
    return result


def _check_shapes(result: Result, source: StoredRun) -> None:
    tasks, classes = len(result.task_sizes), len(result.classes)
    lengths = [len(result.accuracy_after_task), *map(len, (result.curves or {}).values())]
    if (
        not tasks
        or {tasks} != set(lengths)
        or [len(row) for row in result.accuracy_matrix] != list(range(1, tasks + 1))
    ):
        raise source.damaged("result.json", f"its curves are not those of {tasks} tasks")
    if [len(row) for row in result.confusion] != [classes + 1] * classes:
        raise source.damaged("result.json", f"its confusion matrix is not that of {classes} classes")
    if {"client", "accuracy"} - result.worst_client.keys() or result.group_accuracy.keys() - GROUPS:
        raise source.damaged("result.json", "its worst client, or a group of clients, is not described as such")
    if result.detection and any(result.detection.get(key) is None for key in SCORED):
        raise source.damaged("result.json", "its figures about the detectors are not complete")


def read_run(run: Path) -> tuple[Result, list[dict[str, Any]]]:
    """The result of a finished run and its record."""
    result, lines = read_result(run), read_record(run)
    if (lines[-1]["task"], lines[-1].get("accuracy")) != (len(result.task_sizes), result.last_accuracy):
        raise stored(run).damaged("record.jsonl", "its end does not match result.json")
    return result, lines


def migrated(facts: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """A result, or a line of a record, in the current schema. Schema 1 has no `schema` field; schema 2 adds further
    kinds of bytes to lines, and curves to results."""
    schema = facts.get("schema", 1)
    if not isinstance(schema, int) or schema < 1:
        raise ValueError(f"{schema!r} is not a schema")
    if schema > SCHEMA:
        raise HoldfastError(f"{run} was written by a newer version of Holdfast (schema {schema}); update Holdfast")
    return {key: value for key, value in facts.items() if key != "schema"}
