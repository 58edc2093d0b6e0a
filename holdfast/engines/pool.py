"""Several clients at once: worker processes with one thread each, the longest work first."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from torch import Tensor

from holdfast.client.training import ClientWork, Outcome
from holdfast.config import Config, to_toml
from holdfast.data.images import DataSet
from holdfast.errors import HoldfastError
from holdfast.methods.context import World
from holdfast.models.passes import CHUNK, Question
from holdfast.protocol.messages import Inbox, PrototypeShare, Reply, State, pack, unpack

ATTEMPTS = 3  # at one client's work, when workers die over it
SHARED = Path("/dev/shm")
PREFIX = "holdfast-pool-"
MESSAGES = 2**29  # bytes that a round's models may take in shared memory
MINUTE = 60.0  # seconds
DONE, FAILED = b"done", b"failed"  # how a worker's answer begins
WORK, ASK = b"work", b"ask"  # kinds of pieces


@dataclass(frozen=True)
class Piece:
    """Something that a worker can do: what an error calls it, what kind of work it is, and what is to be done."""

    name: str
    kind: bytes
    content: bytes


@dataclass
class Worker:
    """A process, our end of its connection, and which piece of work it has."""

    process: subprocess.Popen[bytes]
    connection: Connection
    piece: int | None = None

    def take(self, number: int, place: Path, pieces: Sequence[Piece]) -> None:
        self.piece = number
        try:
            for part in (os.fsencode(place), pieces[number].kind, pieces[number].content):
                self.connection.send_bytes(part)
        except ConnectionError:
            pass  # it has died; whoever waits for its answer finds out

    def answer(self) -> list[bytes]:
        if self.connection.recv_bytes() == FAILED:
            raise HoldfastError(self.connection.recv_bytes().decode())
        parts = [self.connection.recv_bytes() for _ in range(int(self.connection.recv_bytes()))]
        self.piece = None
        return parts


class Pool:
    """Gives all workers the images and the round's messages once, through shared memory, and each piece of work by its
    worker's own pipe.

    A worker builds the same world from the same config, so its answers have the bits that this process would get. One
    that dies is replaced, and its piece is done again."""

    def __init__(self, config: Config, data: DataSet, workers: int, devices: Sequence[str] = ("cpu",)) -> None:
        for place in (SHARED, Path(tempfile.gettempdir())):
            sweep(place)
        parts = (data.train.images, data.test.images)
        room = MESSAGES + 2 * sum(part.stored.nbytes for part in parts if part.file is None)
        shared = SHARED.is_dir() and shutil.disk_usage(SHARED).free > room
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED if shared else None))
        self.lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.configs = [self.folder / f"config-{i}.toml" for i in range(len(devices))]
        self.posted = 0
        self.workers: list[Worker] = []
        try:
            data.lay_out(self.folder)
            for file, device in zip(self.configs, devices, strict=True):
                file.write_bytes(to_toml(replace(config, run=replace(config.run, device=device))).encode())
            for i in range(workers):
                self.workers.append(self._start(i))
        except BaseException:
            self.close()
            raise

    def map(self, work: ClientWork, states: Sequence[State], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        inbox = _the_only(inboxes)
        place = self._post(job=inbox.job.to_bytes(), teachers=inbox.teachers.to_bytes())
        sizes = [_images(work.world, state, inbox.job.round) for state in states]
        longest_first = sorted(range(len(states)), key=lambda i: -sizes[i])
        pieces = [Piece(f"client {state.client}", WORK, state.to_bytes()) for state in states]
        for answer in self._run(place, pieces, longest_first):
            yield (
                State.from_bytes(answer[0]),
                Reply.from_bytes(answer[1]),
                tuple(map(PrototypeShare.from_bytes, answer[2:])),
            )

    def ask(self, work: ClientWork, question: Question, rows: Tensor) -> Tensor:
        place = self._post(question=question.to_bytes())
        chunks = rows.split(CHUNK)
        pieces = [
            Piece("questions about images", ASK, pack("chunk", {"rows": some}, {"chunk": i}))
            for i, some in enumerate(chunks)
        ]
        answers = [unpack("answer", answer[0])[0]["answer"] for answer in self._run(place, pieces, range(len(pieces)))]
        return torch.cat(answers)

    def _run(self, place: Path, pieces: Sequence["Piece"], order: Sequence[int]) -> Iterator[list[bytes]]:
        """Has every piece done by whichever worker is free, in this order; yields the answers in their own."""
        queue = list(order)[::-1]
        attempts = [0] * len(pieces)
        answers: dict[int, list[bytes]] = {}
        given = 0
        while given < len(pieces):
            for worker in self.workers:
                if worker.piece is None and queue:
                    worker.take(queue.pop(), place, pieces)
            busy = {worker.connection: i for i, worker in enumerate(self.workers) if worker.piece is not None}
            for connection in wait(list(busy)):
                i = busy[connection]  # type: ignore[index]
                piece = self.workers[i].piece
                assert piece is not None
                try:
                    answers[piece] = self.workers[i].answer()
                except (EOFError, ConnectionError):
                    attempts[piece] += 1
                    self._replace(i, pieces[piece], attempts[piece])
                    queue.append(piece)
            while given in answers:
                yield answers.pop(given)
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
        os.close(self.lock)

    def _start(self, i: int) -> Worker:
        mine, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.engines.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        connection = Connection(mine.detach())
        connection.send_bytes(os.fsencode(self.configs[i % len(self.configs)]))
        return Worker(process, connection)

    def _post(self, **messages: bytes) -> Path:
        """Lays messages where every worker reads them once."""
        self.posted += 1
        place = self.folder / str(self.posted)
        place.mkdir()
        for name, message in messages.items():
            (place / name).write_bytes(message)
        return place

    def _replace(self, i: int, piece: Piece, attempts: int) -> None:
        worker = self.workers[i]
        worker.connection.close()
        code = worker.process.wait()
        if attempts >= ATTEMPTS:
            raise HoldfastError(
                f"{attempts} worker processes died over {piece.name}, the last with code {code}; is there "
                "enough memory? run.engine=serial does without workers"
            )
        self.workers[i] = self._start(i)


def sweep(place: Path) -> None:
    """Removes what killed processes have left here: the folder of a living one is locked. One that was made
    this very minute may be about to be."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone
            if time.time() - folder.stat().st_mtime < MINUTE:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _images(world: World, state: State, number: int) -> int:
    """How many images a client has, which is how long its work takes."""
    current = world.plan.arrivals[state.client][world.plan.current(state.client, number)]
    return len(world.holding(current)) + sum(map(len, state.memory.values()))


def _the_only(inboxes: Iterable[Inbox]) -> Inbox:
    """All selected clients of a round get the same messages."""
    first, *others = inboxes
    assert all(other is first for other in others)
    return first
