"""The runs behind docs/reliability.md: bad clients, lost answers, hostile clients, and a long run's memory.

Each finished run is a line of benchmarks/reliability.jsonl; what is there is not run again. scripts/torture.py has the
commands."""

import ctypes
import gc
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from holdfast.checkpoint import Checkpoints
from holdfast.config import Config, load_config
from holdfast.data.sources import load_data
from holdfast.engines.pool import Pool
from holdfast.experiment import build_federation, choose_engine, plan_of
from holdfast.machine import machine_of, one_thread
from holdfast.methods import METHODS
from holdfast.progress import track
from holdfast.simulation.rounds import run_rounds

TOP = Path(__file__).parents[1]
FILE = TOP / "benchmarks" / "reliability.jsonl"
PAGE = TOP / "docs" / "reliability.md"
Line = dict[str, Any]
Settings = list[tuple[str, Any]]

BAD = 1  # the client of which everything is bad
TINY: dict[str, Any] = {
    "data": {"name": "glyphs", "classes": 6, "train_per_class": 12, "test_per_class": 6, "size": 16},
    "plan": {
        "tasks": 3,
        "clients": 6,
        "join_per_task": 2,
        "selected": 4,
        "rounds": 2,
        "move_on": 0.7,
        "class_share": 1.0,
        "memory": 12,
    },
    "train": {"epochs": 1, "batch": 16},
}
QUICK: dict[str, dict[str, Any]] = {
    **{name: {"iterations": 3, "perturb_steps": 2} for name in ("lga", "lga_paper", "lga_code", "glfc")},
    **{name: {"inference": "nme", "tune_epochs": 2} for name in ("podnet", "afc")},
    "icarl": {"inference": "nme"},
    "geodl": {"inference": "nme"},
    "dytox": {"width": 32, "heads": 4, "depth": 2, "tune_epochs": 2},
    "fedavg": {"replay": True},
}
# What is bad of a client, and which of its channels is lost in the run without it.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({}, "server"),
    "inf": ({}, "server"),
    "scale": ({"factor": 1e30}, "server"),
    "wrong_shape": ({}, "server"),
    "wrong_key": ({}, "server"),
    "wrong_dtype": ({}, "server"),
    "bad_samples": ({}, "server"),
    "bad_share": ({}, "proxy"),
    "crash": ({}, "both"),
}
CHANNELS = ("server", "proxy", "both")
RATES = (0.0, 0.1, 0.3, 0.5)
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "sign_flip": {"sign_flip": {"count": 1}},
    "scale": {"scale": {"count": 1, "factor": 10.0}},
    "label_flip": {"label_flip": {"count": 1}},
    "poison_share": {"poison_share": {"count": 1}},
}
AGGREGATORS = ("mean", "samples", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
REPLAY = {"name": "fedavg", "replay": True}
WARM = 100  # rounds of the soak before its memory is first measured


def known(file: Path, table: str) -> dict[str, Line]:
    """The lines of a table by their names."""
    if not file.exists():
        return {}
    lines = (json.loads(line) for line in file.read_text().splitlines())
    return {line["name"]: line for line in lines if line["table"] == table}


def append(file: Path, line: Line) -> None:
    with open(file, "a") as out:
        out.write(json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())


def run_missing(file: Path, table: str, wanted: Iterable[tuple[str, Config, Line]]) -> None:
    """Runs what has no line yet; each has a name, a config, and facts for its line."""
    done = known(file, table)
    missing = [one for one in wanted if one[0] not in done]
    for name, config, facts in track(missing, table, len(missing)):
        append(file, {"table": table, "name": name, **facts, **outcome(config)})


def outcome(config: Config) -> Line:
    """What a run has come to: its model's and its figures' digests, accuracies, and what was refused."""
    data = load_data(config.data)
    plan = plan_of(config, data)
    figures, after, refused, missing = [], [], {}, 0
    with one_thread():
        federation = build_federation(config, data, plan)
        with choose_engine(config, data, federation) as engine:
            for done in run_rounds(federation, engine):
                line = done.line
                figures.append([line[key] for key in ("accuracy", "macro_f1", "losses", "trained", "detector")])
                missing += len(line["missing"])
                for one in line["refused"]:
                    refused[one["kind"]] = refused.get(one["kind"], 0) + 1
                if plan.ends_task(line["round"] - 1):
                    after.append(line["accuracy"])
        model = hashlib.sha256()
        for name, tensor in federation.server.weights.items():
            model.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return {
        "model": model.hexdigest(),
        "figures": hashlib.sha256(json.dumps(figures).encode()).hexdigest(),
        "average_accuracy": mean(after),
        "last_accuracy": after[-1],
        "refused": refused,
        "missing": missing,
        "machine": machine_of(federation.device),
    }


# bad clients


def bad_clients(
    file: Path, methods: Sequence[str] = (), kinds: Sequence[str] = (), tiny: Mapping[str, Any] = TINY
) -> int:
    """Every kind of bad client with every method, and the runs without that client; returns the number of runs that
    differ from them."""
    chosen, spoilt = methods or tuple(METHODS), kinds or tuple(KINDS)
    run_missing(file, "bad-clients", _bad(chosen, spoilt, tiny))
    lines = known(file, "bad-clients")
    return sum(not _same(lines, method, kind) for method in chosen for kind in spoilt)


def _bad(methods: Sequence[str], kinds: Sequence[str], tiny: Mapping[str, Any]) -> Iterable[tuple[str, Config, Line]]:
    needed = [channel for channel in CHANNELS if channel in {KINDS[kind][1] for kind in kinds}]
    for method in methods:
        rules = {f"without-{channel}": {"drop": {"clients": [BAD], "channel": channel}} for channel in needed}
        rules |= {kind: {kind: {"clients": [BAD], **KINDS[kind][0]}} for kind in kinds}
        for name, faults in rules.items():
            tree = {**tiny, "method": {"name": method, **QUICK.get(method, {})}, "faults": faults}
            yield f"{method}/{name}", load_config(tree), {"method": method, "kind": name}


def _same(lines: Mapping[str, Line], method: str, kind: str) -> bool:
    """Does the run with this bad client have the bits of the run without it?"""
    mine, reference = lines.get(f"{method}/{kind}"), lines.get(f"{method}/without-{KINDS[kind][1]}")
    return bool(mine and reference) and all(mine[key] == reference[key] for key in ("model", "figures"))  # type: ignore[index]


# lost answers, hostile clients


def drops(file: Path, protocol: str, seeds: Sequence[int], methods: Sequence[str]) -> None:
    """A fraction of all answers is lost."""
    wanted = []
    for method in methods:
        for rate in RATES:
            for seed in seeds:
                faults: Settings = [("faults.drop", rate)] if rate else []
                config = _config(protocol, method, seed, faults)
                facts = {"protocol": protocol, "method": method, "rate": rate, "seed": seed}
                wanted.append((f"{protocol}/{method}/{rate}/{seed}", config, facts))
    run_missing(file, "drops", wanted)


def hostile(
    file: Path,
    protocol: str,
    seeds: Sequence[int],
    methods: Sequence[str],
    aggregators: Sequence[str],
    attacks: Sequence[str],
) -> None:
    """In every round one of the selected clients is hostile."""
    wanted = []
    for method in methods:
        for aggregator in aggregators or AGGREGATORS:
            for attack in attacks or ATTACKS:
                if attack == "poison_share" and method == "replay":
                    continue  # it has no shares
                for seed in seeds:
                    settings: Settings = [("train.aggregator", aggregator), ("faults", ATTACKS[attack])]
                    config = _config(protocol, method, seed, settings)
                    facts = {"protocol": protocol, "method": method, "aggregator": aggregator, "attack": attack}
                    name = f"{protocol}/{method}/{aggregator}/{attack}/{seed}"
                    wanted.append((name, config, {**facts, "seed": seed}))
    run_missing(file, "hostile", wanted)


def _config(protocol: str, method: str, seed: int, settings: Settings) -> Config:
    chosen = [("method", REPLAY)] if method == "replay" else [("method.name", method)]
    return load_config(TOP / "configs" / f"{protocol}.toml", [*chosen, ("seed", seed), *settings])


# a long run


def soak(file: Path, rounds: int) -> int:
    """A run of so many rounds, with workers, checkpoints, shares and faults: how much more memory its processes have at
    the end than after the first rounds."""
    if f"{rounds}" in known(file, "soak"):
        return 0
    plan = {**TINY["plan"], "tasks": 2, "rounds": -(-rounds // 2), "deadline": 30.0, "quorum": 2}
    faults = {"drop": 0.1, "duplicate": 0.1, "nan": 0.1, "crash": 0.05, "delay": {"probability": 0.1, "seconds": 40}}
    method = {"name": "lga", "shares": "when_selected", **QUICK["lga"]}
    engine = {"engine": "pool", "workers": 2}
    config = load_config({**TINY, "plan": plan, "method": method, "faults": faults, "run": engine})
    data = load_data(config.data)
    sizes: list[float] = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        federation, checkpoints = build_federation(config, data, plan_of(config, data)), Checkpoints(Path(folder))
        with choose_engine(config, data, federation) as chosen:
            assert isinstance(chosen, Pool)
            for done in track(run_rounds(federation, chosen), "soak", federation.plan.rounds):
                number = done.line["round"]
                checkpoints.save(number, federation, done.counts)
                if number >= WARM and number % 50 == 0:
                    sizes.append(_megabytes([os.getpid(), *(worker.process.pid for worker in chosen.workers)]))
    growth = max(sizes[-3:]) / max(sizes[:3]) - 1
    facts = {"rounds": federation.plan.rounds, "megabytes": sizes, "growth": growth}
    append(file, {"table": "soak", "name": f"{rounds}", **facts, "machine": machine_of(federation.device)})
    return int(growth > 0.05)


def _megabytes(processes: Sequence[int]) -> float:
    """The resident memory of these processes; what this one has freed is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = (re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text()) for one in processes)
    return sum(int(match[1]) for match in found if match) / 1024


# the tables


def write_tables(file: Path = FILE, page: Path = PAGE) -> None:
    """Writes the tables between the marks of the page."""
    start, end = "<!-- tables -->\n", "<!-- end of tables -->"
    text = page.read_text()
    before, rest = text.split(start)
    page.write_text(before + start + "\n" + "\n".join(_tables(file)) + "\n" + end + rest.split(end)[1])


def _tables(file: Path) -> list[str]:
    kills = known(file, "kills").values()
    soaks = known(file, "soak").values()
    parts = [
        *_bad_table(known(file, "bad-clients")),
        *_drop_table(known(file, "drops").values()),
        *_hostile_table(known(file, "hostile").values()),
        *(f"{one['kills']} kills of {one['runs']} runs: {one['same']} ended with the same bits.\n" for one in kills),
        *(f"{one['rounds']} rounds: memory grew by {100 * one['growth']:.1f} %.\n" for one in soaks),
    ]
    return parts or ["No runs yet.\n"]


def _bad_table(lines: Mapping[str, Line]) -> list[str]:
    methods = list(dict.fromkeys(line["method"] for line in lines.values()))
    if not methods:
        return []
    rows = []
    for kind in KINDS:
        same = [_same(lines, method, kind) for method in methods if f"{method}/{kind}" in lines]
        refused = sum(sum(lines[f"{m}/{kind}"]["refused"].values()) for m in methods if f"{m}/{kind}" in lines)
        rows.append([kind, f"{sum(same)} of {len(same)}", str(refused)])
    about = f"One client is bad in every round; {len(methods)} methods ({', '.join(methods)}).\n"
    return [
        "### Bad clients\n",
        about,
        *_markdown(["kind", "methods with the bits of a run without it", "messages refused"], rows),
    ]


def _drop_table(lines: Iterable[Line]) -> list[str]:
    groups = _grouped(lines, ("protocol", "method", "rate"))
    rows = []
    for (protocol, method, rate), some in groups.items():
        cost = _cost(some, groups.get((protocol, method, 0.0), []))
        rows.append([protocol, method, f"{rate:.0%}", str(len(some)), _percent(some), cost])
    head = ["protocol", "method", "answers lost", "seeds", "average accuracy", "points lost"]
    return ["### Lost answers\n", *_markdown(head, rows)] if rows else []


def _hostile_table(lines: Iterable[Line]) -> list[str]:
    groups = _grouped(lines, ("protocol", "method", "aggregator", "attack"))
    attacks = [attack for attack in ATTACKS if any(key[3] == attack for key in groups)]
    rows = []
    for protocol, method, aggregator in dict.fromkeys(key[:3] for key in groups):
        cells = []
        for attack in attacks:
            some = groups.get((protocol, method, aggregator, attack), [])
            cost = _cost(some, groups.get((protocol, method, aggregator, "none"), []))
            cells.append(_percent(some) + (f" ({cost})" if some and attack != "none" else ""))
        rows.append([protocol, method, aggregator, *cells])
    head = ["protocol", "method", "aggregator", *attacks]
    note = "Average accuracy in %, and the points lost to the attack.\n"
    return ["### One hostile client in every round\n", note, *_markdown(head, rows)] if rows else []


def _grouped(lines: Iterable[Line], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Line]]:
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    return groups


def _percent(some: Sequence[Line]) -> str:
    return f"{100 * mean(line['average_accuracy'] for line in some):.1f}" if some else "-"


def _cost(some: Sequence[Line], reference: Sequence[Line]) -> str:
    """The points lost, over the seeds that both have."""
    known_seeds = {line["seed"]: line["average_accuracy"] for line in reference}
    lost = [known_seeds[line["seed"]] - line["average_accuracy"] for line in some if line["seed"] in known_seeds]
    return f"{100 * mean(lost):+.1f}" if lost else "-"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]
