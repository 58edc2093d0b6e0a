"""Several clients in parallel: worker processes with one thread each, the longest work first."""

import json
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
from holdfast.data.images import DataSet
from holdfast.engines.settings import TIMEOUT
from holdfast.errors import HoldfastError
from holdfast.extensions import import_paths
from holdfast.locks import lock_file
from holdfast.models.passes import CHUNK
from holdfast.protocol.codec import MalformedMessage, pack, unpack
from holdfast.protocol.enrolment import Enrolment
from holdfast.protocol.messages import Encoder, Failure, Inbox, InferenceRequest, PrototypeShare, Reply
from holdfast.protocol.state import ClientState
from holdfast.simulation.engine import ImageGroup
from holdfast.simulation.faults import Faults

ATTEMPTS = 3  # per piece of work, when workers die
START = 300.0  # seconds more for the first piece of a worker, which has to start
HANGS = 2  # per piece of work, when workers hang
SHARED = Path("/dev/shm")
PREFIX = "holdfast-pool-"
HIDDEN = ".holdfast-new-"  # a folder that is not locked yet
MESSAGES = 2**29  # bytes of shared memory for a round's models
MINUTE = 60.0  # seconds
DONE, FAILED = b"done", b"failed"  # the first part of a worker's answer
WORK, INFER = b"work", b"infer"  # kinds of pieces


@dataclass(frozen=True)
class Piece:
    """A piece of work for a worker: its name in error messages, its kind and its content."""

    name: str
    kind: bytes
    content: bytes


@dataclass
class Worker:
    """A process, our end of its connection, the index of its piece of work, and when that is to be done."""

    process: subprocess.Popen[bytes]
    connection: Connection
    piece: int | None = None
    due: float = 0.0
    ready: bool = False  # has it answered before?

    def take(self, index: int, place: Path, pieces: Sequence[Piece], timeout: float) -> None:
        self.piece, self.due = index, time.monotonic() + timeout + (0 if self.ready else START)
        try:
            for part in (os.fsencode(place), pieces[index].kind, pieces[index].content):
                self.connection.send_bytes(part)
        except ConnectionError:
            pass  # it has died, which `_run` notices when it waits for the answer

    def answer(self) -> list[bytes] | Failure:
        if self.connection.recv_bytes() == FAILED:
            self.piece, self.ready = None, True
            return Failure.from_bytes(self.connection.recv_bytes())
        parts = [self.connection.recv_bytes() for _ in range(int(self.connection.recv_bytes()))]
        self.piece, self.ready = None, True
        return parts


class Pool:
    """Gives all workers the images and the round's messages once, through shared memory, and sends each piece of work
    through its worker's connection.

    A worker is enrolled like a client and maps the same images, so its answers have the same bits as those of this
    process. A worker that dies is replaced, and its piece of work is done again."""

    def __init__(
        self,
        enrolment: Enrolment,
        data: DataSet,
        workers: int,
        encoder: Encoder | None = None,
        devices: Sequence[str] = ("cpu",),
        faults: Faults | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        for place in (SHARED, Path(tempfile.gettempdir())):
            sweep(place)
        parts = (data.train.images, data.test.images)
        needed = MESSAGES + 2 * sum(part.stored.nbytes for part in parts if part.file is None)
        shared = SHARED.is_dir() and shutil.disk_usage(SHARED).free > needed
        self.folder, self.lock = locked_folder(SHARED if shared else Path(tempfile.gettempdir()))
        self.devices, self.timeout = devices, timeout
        self.posted = 0
        self.workers: list[Worker] = []
        try:
            data.lay_out(self.folder)
            (self.folder / "enrolment").write_bytes(enrolment.to_bytes())
            (self.folder / "path").write_text(json.dumps(list(import_paths())))
            if encoder is not None:
                (self.folder / "encoder").write_bytes(encoder.to_bytes())
            if faults is not None:
                (self.folder / "faults").write_bytes(faults.to_bytes())
            for i in range(workers):
                self.workers.append(self._start(i))
        except BaseException:
            self.close()
            raise

    def map(
        self, work: ClientWork, states: Sequence[ClientState], inboxes: Iterable[Inbox]
    ) -> Iterator[Outcome | Failure]:
        inbox = _the_only(inboxes)
        place = self._post(job=inbox.job.to_bytes(), teachers=inbox.teachers.to_bytes())
        longest_first = sorted(range(len(states)), key=lambda i: -states[i].images)
        pieces = [Piece(f"client {state.client}", WORK, state.to_bytes()) for state in states]
        for answer in self._run(place, pieces, longest_first):
            if isinstance(answer, Failure):
                yield replace(answer, round_index=inbox.job.round_index, phase=inbox.job.phase)
                continue
            try:
                state, reply = ClientState.from_bytes(answer[0]), Reply.from_bytes(answer[1])
                yield state, reply, tuple(map(PrototypeShare.from_bytes, answer[2:]))
            except MalformedMessage as error:
                yield Failure("malformed", str(error), inbox.job.round_index, inbox.job.phase)

    def infer(self, work: ClientWork, request: InferenceRequest, groups: Sequence[ImageGroup]) -> list[Tensor]:
        place = self._post(request=request.to_bytes())
        chunks = [(group.name, i, ids) for group in groups for i, ids in enumerate(group.chunks)]
        batches = _batched(chunks)
        pieces = [
            Piece(
                "passes over images",
                INFER,
                pack(
                    "chunks",
                    {str(k): ids for k, (_, _, ids) in enumerate(batch)},
                    {"chunks": [[name, i] for name, i, _ in batch]},
                ),
            )
            for batch in batches
        ]
        answers: list[Tensor] = []
        for batch, answer in zip(batches, self._run(place, pieces, range(len(pieces))), strict=True):
            if isinstance(answer, Failure):
                raise HoldfastError(answer.reason)
            tensors, _ = unpack("answers", answer[0])
            answers += [tensors[str(k)] for k in range(len(batch))]
        remaining = iter(answers)
        return [torch.cat([next(remaining) for _ in group.chunks]) for group in groups]

    def _run(self, place: Path, pieces: Sequence["Piece"], order: Sequence[int]) -> Iterator[list[bytes] | Failure]:
        """Gives the pieces in `order` to free workers; yields the answers in the order of `pieces`."""
        queue = list(order)[::-1]
        attempts, hangs = [0] * len(pieces), [0] * len(pieces)
        answers: dict[int, list[bytes] | Failure] = {}
        yielded = 0
        while yielded < len(pieces):
            for worker in self.workers:
                if worker.piece is None and queue:
                    worker.take(queue.pop(), place, pieces, self.timeout)
            busy = {worker.connection: i for i, worker in enumerate(self.workers) if worker.piece is not None}
            first_due = min(self.workers[i].due for i in busy.values())
            for connection in wait(list(busy), max(0.0, first_due - time.monotonic())):
                i = busy[connection]  # type: ignore[index]
                piece = self.workers[i].piece
                assert piece is not None
                try:
                    answers[piece] = self.workers[i].answer()
                except (EOFError, ConnectionError):
                    attempts[piece] += 1
                    self._replace(i, pieces[piece], attempts[piece])
                    queue.append(piece)
            for i, worker in enumerate(self.workers):
                if worker.piece is None or worker.due > time.monotonic():
                    continue
                piece = worker.piece
                hangs[piece] += 1
                worker.process.kill()
                self._replace(i, pieces[piece])
                if hangs[piece] < HANGS:
                    queue.append(piece)
                else:
                    what = f"{pieces[piece].name} took longer than {self.timeout:g} seconds, {HANGS} times"
                    answers[piece] = Failure("timeout", f"{what}; see run.timeout")
            while yielded in answers:
                yield answers.pop(yielded)
                yielded += 1
        shutil.rmtree(place)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. (If this process is killed, they end when their connection closes.)"""
        for worker in self.workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)
        sweep(self.folder.parent)

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
        connection.send_bytes(os.fsencode(self.folder))
        connection.send_bytes(self.devices[i % len(self.devices)].encode())
        return Worker(process, connection)

    def _post(self, **messages: bytes) -> Path:
        """Writes messages to a folder from which every worker reads them once."""
        self.posted += 1
        place = self.folder / str(self.posted)
        place.mkdir()
        for name, message in messages.items():
            (place / name).write_bytes(message)
        return place

    def _replace(self, i: int, piece: Piece, attempts: int = 0) -> None:
        worker = self.workers[i]
        worker.connection.close()
        code = worker.process.wait()
        if attempts >= ATTEMPTS:
            raise HoldfastError(
                f"{attempts} worker processes died while computing {piece.name}, the last with code {code}; "
                "check that there is enough memory, or use run.engine=serial, which needs no workers"
            )
        self.workers[i] = self._start(i)


def locked_folder(place: Path) -> tuple[Path, int]:
    """A new folder for a pool and the lock on it, which the system releases when this process ends. The folder gets a
    name that `sweep` knows only when it is locked, so that another process never takes it for a dead one's."""
    hidden = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=place))
    lock = os.open(hidden, os.O_RDONLY)
    lock_file(lock)
    return hidden.rename(place / f"{PREFIX}{hidden.name.removeprefix(HIDDEN)}"), lock


def sweep(place: Path) -> None:
    """Removes the folders of killed processes at once; the folder of a live process is locked. A process that is killed
    before it has named its folder leaves an empty one, which goes after a minute."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is locked, owned by another user, or already removed
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                lock_file(lock, wait=False)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
    for folder in place.glob(f"{HIDDEN}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > MINUTE:
                folder.rmdir()


def _batched(chunks: Sequence[tuple[str, int, Tensor]]) -> list[list[tuple[str, int, Tensor]]]:
    """Groups chunks into pieces of work; small ones together, to save messages."""
    batches: list[list[tuple[str, int, Tensor]]] = []
    images = CHUNK
    for chunk in chunks:
        if images + len(chunk[2]) > CHUNK:
            batches.append([])
            images = 0
        batches[-1].append(chunk)
        images += len(chunk[2])
    return batches


def _the_only(inboxes: Iterable[Inbox]) -> Inbox:
    """All selected clients of a round get the same messages."""
    first, *others = inboxes
    assert all(other is first for other in others)
    return first
