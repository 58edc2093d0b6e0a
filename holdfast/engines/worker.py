"""A worker process of the pool. It is enrolled like a client and then answers requests that come through its
connection. All messages are safetensors and JSON."""

import json
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from holdfast.client.client import encoder_of
from holdfast.client.data import ClientImages
from holdfast.client.training import ClientWork, attempt
from holdfast.data.images import DataSet
from holdfast.engines.pool import DONE, FAILED, INFER, sweep
from holdfast.errors import HoldfastError
from holdfast.extensions import allow
from holdfast.machine import one_thread
from holdfast.methods import method_of
from holdfast.protocol.codec import pack, unpack
from holdfast.protocol.enrolment import Enrolment
from holdfast.protocol.messages import Encoder, Failure, Inbox, InferenceRequest, Job, Teachers
from holdfast.protocol.state import ClientState
from holdfast.simulation.faults import Faults


def serve(connection: Connection, work: ClientWork) -> None:
    """Answers requests until the connection closes. A request is the folder of the round's messages, the kind of work
    and its content."""
    known, message = b"", None
    while True:
        folder, kind, content = (connection.recv_bytes() for _ in range(3))
        if folder != known:
            known, message = folder, _read(Path(os.fsdecode(folder)), kind)
        try:
            if isinstance(message, InferenceRequest):
                parts = [_infer(work, message, content)]
            else:
                assert message is not None
                outcome = attempt(work, ClientState.from_bytes(content), message)
                if isinstance(outcome, Failure):
                    _fail(connection, outcome)
                    continue
                state, reply, shares = outcome
                parts = [state.to_bytes(), reply.to_bytes(), *(share.to_bytes() for share in shares)]
        except HoldfastError as error:
            _fail(connection, Failure("crash", str(error)))
            continue
        for part in (DONE, str(len(parts)).encode(), *parts):
            connection.send_bytes(part)


def refuse(connection: Connection, reason: str) -> None:
    """Answers the first request with the reason why this process cannot work."""
    for _ in range(3):
        connection.recv_bytes()
    _fail(connection, Failure("crash", reason))


def _fail(connection: Connection, failure: Failure) -> None:
    connection.send_bytes(FAILED)
    connection.send_bytes(failure.to_bytes())


def _infer(work: ClientWork, request: InferenceRequest, content: bytes) -> bytes:
    tensors, facts = unpack("chunks", content)
    answers = {str(k): work.infer(request, tensors[str(k)], *chunk) for k, chunk in enumerate(facts["chunks"])}
    return pack("answers", answers, {})


def _read(place: Path, kind: bytes) -> InferenceRequest | Inbox:
    if kind == INFER:
        return InferenceRequest.from_bytes((place / "request").read_bytes())
    job, teachers = (place / "job").read_bytes(), (place / "teachers").read_bytes()
    return Inbox(Job.from_bytes(job), Teachers.from_bytes(teachers))


def build_work(folder: Path, device: torch.device) -> ClientWork:
    """The clients' work, built from the files that the pool has written to this folder."""
    enrolment = Enrolment.from_bytes((folder / "enrolment").read_bytes())
    sys.path[:] = json.loads((folder / "path").read_bytes())
    for name in (str(enrolment.method.get("name")), enrolment.spec.backbone):
        allow(name)  # the process that has started this one uses them too
    encoder = None
    if (folder / "encoder").exists():
        message = Encoder.from_bytes((folder / "encoder").read_bytes())
        encoder = encoder_of(message, enrolment.spec.image_size).to(device)
    data = DataSet.mapped(folder)
    train, test = (ClientImages(part, data.classes) for part in (data.train, data.test))
    work = ClientWork(enrolment, method_of(enrolment.method), train, device, encoder, test)
    if (folder / "faults").exists():
        return Faults.from_bytes((folder / "faults").read_bytes()).within(work)
    return work


def main(handle: int) -> None:
    over = suppress(EOFError, ConnectionError, KeyboardInterrupt)  # the run is over, or was stopped or killed
    with one_thread(), Connection(handle) as connection, over:
        folder, device = Path(os.fsdecode(connection.recv_bytes())), connection.recv_bytes().decode()
        try:
            try:
                work = build_work(folder, torch.device(device))
            except HoldfastError as error:
                refuse(connection, str(error))
                return
            serve(connection, work)
        finally:
            sweep(folder.parent)  # a killed run cannot remove its folder itself


if __name__ == "__main__":
    main(int(sys.argv[1]))
