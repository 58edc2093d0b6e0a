"""The pool: the bits of the serial engine, whatever happens to its workers."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import experiment
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines import pool
from holdfast.engines.pool import Pool
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, choose_engine, plan_of, pool_of
from holdfast.simulation.engine import Engine
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds

METHOD = {"name": "fedavg", "replay": True}


def run_all(settings: dict[str, Any], engine: Engine | None, kill: bool = False) -> tuple[Federation, list[Any]]:
    config = load_config(settings)
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    with engine or pool_of(federation, data, 2) as chosen:

        def tick() -> None:
            if kill and isinstance(chosen, Pool):  # one of the two, after every client
                victim = chosen.workers[len(lines) % 2].process
                os.kill(victim.pid, signal.SIGKILL)

        lines: list[Any] = []
        for done in run_rounds(federation, chosen, tick):
            lines.append({key: value for key, value in done.line.items() if key != "seconds"})
    return federation, lines


def test_a_pool_gives_the_serial_bits(small: dict[str, Any]) -> None:
    """For every method: tests/methods/test_contract.py."""
    settings = {**small, "method": METHOD}
    serial, lines = run_all(settings, Serial())
    pooled, same = run_all(settings, None)
    assert same == lines
    for name, tensor in serial.server.weights.items():
        assert torch.equal(tensor, pooled.server.weights[name]), name
    for client in range(len(serial.plan.arrivals)):
        assert serial.population.state(client).to_bytes() == pooled.population.state(client).to_bytes(), client


def test_a_killed_worker_changes_nothing_but_the_time(small: dict[str, Any]) -> None:
    settings = {**small, "plan": {**small["plan"], "tasks": 2, "rounds": 1}, "method": METHOD}
    serial, lines = run_all(settings, Serial())
    pooled, same = run_all(settings, None, kill=True)
    assert same == lines
    for name, tensor in serial.server.weights.items():
        assert torch.equal(tensor, pooled.server.weights[name]), name


def test_a_clients_failure_is_one_sentence_and_nothing_is_left_behind(small: dict[str, Any]) -> None:
    config = load_config({**small, "train": {**small["train"], "lr": 100.0, "epochs": 60}})
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    pool = pool_of(federation, data, 2)
    with pytest.raises(HoldfastError, match=r"no client.s update could be used in round \d: .*lower train\.lr"), pool:
        list(run_rounds(federation, pool))
    assert not Path(pool.folder).exists()
    assert all(worker.process.poll() is not None for worker in pool.workers)


def test_a_worker_that_hangs_is_replaced_and_changes_nothing_but_the_time(small: dict[str, Any]) -> None:
    settings = {**small, "plan": {**small["plan"], "tasks": 2, "rounds": 1}, "method": METHOD}
    serial, lines = run_all(settings, Serial())
    config = load_config(settings)
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    with pool_of(federation, data, 2, timeout=5.0) as engine:
        rounds = run_rounds(federation, engine)
        same = [next(rounds).line]
        hung = engine.workers[0].process
        os.kill(hung.pid, signal.SIGSTOP)
        same += [done.line for done in rounds]
        assert hung.poll() == -signal.SIGKILL
        assert engine.workers[0].process is not hung
    for one, other in zip(lines, same, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert all(torch.equal(tensor, federation.server.weights[name]) for name, tensor in serial.server.weights.items())


def test_a_client_whose_work_hangs_every_time_is_left_out(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stops itself in the work of one client, again and again."""
    monkeypatch.setattr(pool, "START", 60.0)
    settings = {**small, "plan": {**small["plan"], "tasks": 1, "rounds": 1, "retries": 0}, "method": METHOD}
    config = load_config(settings)
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    victim = federation.plan.selected[0][0]
    with pool_of(federation, data, 1, timeout=5.0) as engine:
        original = pool.Worker.take

        def stopping(worker: Any, index: int, place: Path, pieces: Any, timeout: float) -> None:
            original(worker, index, place, pieces, timeout)
            if pieces[index].name == f"client {victim}":
                os.kill(worker.process.pid, signal.SIGSTOP)
                worker.due -= 64.0

        monkeypatch.setattr(pool.Worker, "take", stopping)
        [done] = run_rounds(federation, engine)
    assert done.line["missing"] == [victim]
    assert [(one["client"], one["kind"]) for one in done.line["refused"]] == [(victim, "timeout")]
    assert "took longer than 5 seconds, 2 times; see run.timeout" in done.line["refused"][0]["reason"]
    assert done.line["trained"] == [client for client in done.line["selected"] if client != victim]


def test_an_error_in_one_clients_work_is_that_clients_failure(small: dict[str, Any]) -> None:
    """As in one process; the worker lives on."""
    settings = {**small, "plan": {**small["plan"], "tasks": 1}, "method": METHOD, "faults": {"crash": {"count": 1}}}
    serial, lines = run_all(settings, Serial())
    pooled, same = run_all(settings, None)
    assert same == lines
    assert all(torch.equal(tensor, pooled.server.weights[name]) for name, tensor in serial.server.weights.items())
    for line in lines:
        assert [one["kind"] for one in line["refused"]] == ["crash"] * line["attempts"]
        assert "a fault of the config" in line["refused"][0]["reason"]


def test_workers_that_die_again_and_again_end_the_run_in_one_sentence(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ATTEMPTS", 1)
    config = load_config(small)
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    with pool_of(federation, data, 1) as engine:
        os.kill(engine.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(HoldfastError, match=r"1 worker processes died while computing .* use run\.engine=serial"):
            list(run_rounds(federation, engine))


def test_a_pool_is_taken_where_it_is_worth_its_start(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_of(**run: Any) -> Engine:
        config = load_config({**small, "run": run})
        data = load_data(config.data)
        return choose_engine(config, data, build_federation(config, data, plan_of(config, data)))

    assert isinstance(engine_of(), Serial)  # a few hundred images
    assert isinstance(engine_of(engine="serial", workers=4), Serial)
    with engine_of(engine="pool", workers=1) as one:
        assert isinstance(one, Pool)
        assert len(one.workers) == 1
    monkeypatch.setattr(experiment, "WORTH_A_POOL", 1)
    monkeypatch.setattr(experiment, "cores", lambda: 2)
    with engine_of() as two:
        assert isinstance(two, Pool)
        assert len(two.workers) == 2


def test_what_killed_processes_left_in_memory_is_swept_at_once_and_what_lives_is_not(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SHARED", tmp_path)
    dead, later = tmp_path / f"{pool.PREFIX}dead", tmp_path / f"{pool.PREFIX}later"
    dead.mkdir()
    (dead / "images.npy").write_bytes(b"x")
    unnamed, old = tmp_path / f"{pool.HIDDEN}young", tmp_path / f"{pool.HIDDEN}old"
    for folder in (unnamed, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    config = load_config(small)
    data = load_data(config.data)
    with pool_of(build_federation(config, data, plan_of(config, data)), data, 1) as living:
        assert living.folder.parent == tmp_path
        assert not dead.exists()  # though it is seconds old
        assert unnamed.exists()  # its process may be about to lock it
        assert not old.exists()
        os.utime(living.folder, (0, 0))
        pool.sweep(tmp_path)
        assert living.folder.exists()
        later.mkdir()
    assert not living.folder.exists()
    assert not later.exists()  # a pool that ends sweeps as well


def test_a_folder_is_locked_before_it_has_a_name_that_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fcntl.flock

    def swept_meanwhile(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", original)
            pool.sweep(tmp_path)  # another pool starts between the folder's creation and its lock
        original(lock, how)

    monkeypatch.setattr(fcntl, "flock", swept_meanwhile)
    folder, lock = pool.locked_folder(tmp_path)
    pool.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    os.close(lock)
    pool.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from pathlib import Path
from holdfast.engines import pool
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.experiment import build_federation, plan_of, pool_of

pool.SHARED = Path(sys.argv[1])
config = load_config({"data": {"name": "digits"}})
data = load_data(config.data)
with pool_of(build_federation(config, data, plan_of(config, data)), data, 1):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_the_workers_of_a_killed_run_remove_its_folder(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    assert len(list(tmp_path.iterdir())) == 1
    run.kill()
    run.communicate()
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
