"""Several clients at once: worker processes with one thread each, the longest work first."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from holdfast.config import Config, to_toml
from holdfast.errors import HoldfastError
from holdfast.federation.client import ClientWork, Outcome
from holdfast.federation.local import World
from holdfast.federation.messages import Inbox, PrototypeShare, Reply, State

ATTEMPTS = 3  # at one client's work, when workers die over it
SHARED = Path("/dev/shm")
DONE, FAILED = b"done", b"failed"  # how a worker's answer begins


@dataclass
class Worker:
    """A process, our end of its connection, and which piece of work it has."""

    process: subprocess.Popen[bytes]
    connection: Connection
    piece: int | None = None


class Pool:
    """Gives every worker the round's messages once, through shared memory, and each client's state by its own pipe.

    A worker builds the same world from the same config, so its outcomes have the bits that this process would get. One
    that dies is replaced, and its client's work is done again."""

    def __init__(self, config: Config, workers: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=SHARED if SHARED.is_dir() else None))
        self.config = self.folder / "config.toml"
        self.config.write_bytes(to_toml(config).encode())
        self.workers = [self._start() for _ in range(workers)]
        self.rounds = 0

    def map(self, work: ClientWork, states: Sequence[State], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        inbox = _the_only(inboxes)
        place = self._post(inbox)
        sizes = [_images(work.world, state, inbox.job.round) for state in states]
        queue = sorted(range(len(states)), key=lambda i: sizes[i])  # the longest is last, and taken first
        attempts = [0] * len(states)
        outcomes: dict[int, Outcome] = {}
        given = 0
        while given < len(states):
            for i, worker in enumerate(self.workers):
                if worker.piece is None and queue:
                    self._give(i, place, queue.pop(), states)
            busy = {worker.connection: i for i, worker in enumerate(self.workers) if worker.piece is not None}
            for connection in wait(list(busy)):
                i = busy[connection]  # type: ignore[index]
                piece = self.workers[i].piece
                assert piece is not None
                try:
                    outcomes[piece] = _receive(self.workers[i].connection)
                    self.workers[i].piece = None
                except (EOFError, ConnectionError):
                    attempts[piece] += 1
                    self._replace(i, states[piece], attempts[piece])
                    queue.append(piece)
            while given in outcomes:
                yield outcomes.pop(given)
                given += 1
        shutil.rmtree(place)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. (If this process is killed, they end by themselves when their connection is gone.)"""
        for worker in self.workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> Worker:
        mine, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.engines.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        connection = Connection(mine.detach())
        connection.send_bytes(os.fsencode(self.config))
        return Worker(process, connection)

    def _post(self, inbox: Inbox) -> Path:
        """Lays the round's messages where every worker reads them once."""
        self.rounds += 1
        place = self.folder / str(self.rounds)
        place.mkdir()
        (place / "job").write_bytes(inbox.job.to_bytes())
        (place / "teachers").write_bytes(inbox.teachers.to_bytes())
        return place

    def _give(self, i: int, place: Path, piece: int, states: Sequence[State]) -> None:
        worker = self.workers[i]
        worker.piece = piece
        try:
            worker.connection.send_bytes(os.fsencode(place))
            worker.connection.send_bytes(states[piece].to_bytes())
        except ConnectionError:
            pass  # it has died; the wait below finds out

    def _replace(self, i: int, state: State, attempts: int) -> None:
        worker = self.workers[i]
        worker.connection.close()
        code = worker.process.wait()
        if attempts >= ATTEMPTS:
            raise HoldfastError(
                f"{attempts} worker processes died over client {state.client}, the last with code {code}; is there "
                "enough memory? run.engine=serial does without workers"
            )
        self.workers[i] = self._start()


def _images(world: World, state: State, number: int) -> int:
    """How many images a client has, which is how long its work takes."""
    current = world.plan.arrivals[state.client][world.plan.current(state.client, number)]
    return len(world.holding(current)) + sum(map(len, state.memory.values()))


def _the_only(inboxes: Iterable[Inbox]) -> Inbox:
    """All selected clients of a round get the same messages."""
    first, *others = inboxes
    assert all(other is first for other in others)
    return first


def _receive(connection: Connection) -> Outcome:
    answer = connection.recv_bytes()
    if answer == FAILED:
        raise HoldfastError(connection.recv_bytes().decode())
    state, reply = State.from_bytes(connection.recv_bytes()), Reply.from_bytes(connection.recv_bytes())
    count = int(connection.recv_bytes())
    return state, reply, tuple(PrototypeShare.from_bytes(connection.recv_bytes()) for _ in range(count))
