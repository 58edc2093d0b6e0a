"""A run that is still going or was stopped: what it has reached, as the folder of a run that ends there."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from holdfast.checkpoint import Checkpoints
from holdfast.config import Config, load_config
from holdfast.data.sources import load_data
from holdfast.errors import HoldfastError
from holdfast.experiment import identity_of, model_facts, named, selector_setup
from holdfast.files import write_json
from holdfast.models.stored import write_model
from holdfast.protocol.codec import Snapshot
from holdfast.results.details import UNFINISHED
from holdfast.results.record import read_config, read_record, write_result
from holdfast.results.summary import summarise
from holdfast.simulation.plan import Plan
from holdfast.simulation.timeline import Arrival


@contextmanager
def finished_part(run: Path, with_model: bool = False) -> Iterator[tuple[Path, str]]:
    """The folder of the run and, if it is not finished, a sentence that says so; then the folder is a temporary one
    with the rounds up to the last checkpoint: config, plan, record, result and, if wanted, the model."""
    if (run / "result.json").exists() or not (run / "config.toml").is_file():
        yield run, ""
        return
    with TemporaryDirectory(prefix="holdfast-unfinished-") as place:
        folder = Path(place) / (run.resolve().name or "run")
        folder.mkdir()
        yield folder, _write(run, folder, with_model)


def _write(run: Path, folder: Path, with_model: bool) -> str:
    resume = f"go on with: holdfast resume {run}"
    config = load_config(read_config(run))
    found = Checkpoints(run, identity_of(config)).read("loop", "server/model")
    if found is None or not (run / "plan.json").is_file():
        raise HoldfastError(f"{run} has no finished round yet; {resume}")
    done, parts = found
    facts = json.loads((run / "plan.json").read_bytes())
    rounds, plan = len(facts["selected"]), _plan(facts, done)
    lines = read_record(run)[:done]
    (folder / "config.toml").write_bytes((run / "config.toml").read_bytes())
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = facts["class_names"]
    write_json(folder / "plan.json", {"data": facts["data"], **plan.to_json(names, facts["clients"])})
    counts = parts["loop"][0]["counts"].numpy()
    result = summarise(named(config, facts["data"]), plan, names, lines, counts, facts["clients"])
    write_result(folder, result)
    if with_model:
        _write_model(folder / "model.safetensors", config, parts["server/model"])
    note = f"{run} is not finished: this is round {done} of {rounds}; {resume}"
    (folder / UNFINISHED).write_text(note, encoding="utf-8")
    return note


def _plan(facts: Mapping[str, Any], done: int) -> Plan:
    """The plan that a run wrote, as if it ended after so many rounds."""
    starts = [first - 1 for first in facts["starts"] if first <= done]
    arrivals = (
        tuple(
            Arrival(
                one["round"] - 1,
                tuple(one["classes"]),
                tuple(one["images"]) if "images" in one else None,
                tuple(one["new"]) if "new" in one else None,
            )
            for one in mine
            if one["round"] <= done
        )
        for mine in facts["arrivals"]
    )
    growths = tuple((one["round"] - 1, tuple(one["classes"])) for one in facts["growths"] if one["round"] <= done)
    return Plan(
        tasks=tuple(tuple(task) for task in facts["tasks"][: len(starts)]),
        starts=tuple(starts),
        rounds_per_task=done,
        arrivals=tuple(arrivals),
        selected=tuple(tuple(chosen) for chosen in facts["selected"][:done]),
        growths=growths,
        groups=tuple(tuple(groups) for groups in facts["groups"][: len(starts)]),
    )


def _write_model(file: Path, config: Config, model: Snapshot) -> None:
    weights, registry = model
    setup = selector_setup(config, load_data(config.data), torch.device("cpu"))
    facts = model_facts(config, setup.spec, setup.transform, registry["names"], registry["growths"])
    write_model(file, weights, facts)
