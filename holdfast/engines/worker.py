"""A worker process of the pool: it builds the world from the run's config, and then works for whoever is at the other
end of its connection. Everything that passes is bytes of safetensors and JSON."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from holdfast.client.training import ClientWork
from holdfast.config import load_config
from holdfast.data.images import DataSet
from holdfast.engines.pool import ASK, DONE, FAILED
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of
from holdfast.machine import one_thread
from holdfast.models.passes import Question
from holdfast.protocol.messages import Inbox, Job, State, Teachers, pack, unpack


def serve(connection: Connection, work: ClientWork) -> None:
    """Answers requests until the other end is gone. A request is the folder of the round's messages, the kind of work,
    and what is to be done."""
    known, message = b"", None
    while True:
        folder, kind, content = (connection.recv_bytes() for _ in range(3))
        if folder != known:
            known, message = folder, _read(Path(os.fsdecode(folder)), kind)
        try:
            if isinstance(message, Question):
                tensors, facts = unpack("chunk", content)
                answer = work.answer(message, tensors["rows"], facts["chunk"])
                parts = [pack("answer", {"answer": answer}, {})]
            else:
                assert message is not None
                state, reply, shares = work(State.from_bytes(content), message)
                parts = [state.to_bytes(), reply.to_bytes(), *(share.to_bytes() for share in shares)]
        except HoldfastError as error:
            connection.send_bytes(FAILED)
            connection.send_bytes(str(error).encode())
            continue
        for part in (DONE, str(len(parts)).encode(), *parts):
            connection.send_bytes(part)


def _read(place: Path, kind: bytes) -> Question | Inbox:
    if kind == ASK:
        return Question.from_bytes((place / "question").read_bytes())
    job, teachers = (place / "job").read_bytes(), (place / "teachers").read_bytes()
    return Inbox(Job.from_bytes(job), Teachers.from_bytes(teachers))


def main(handle: int) -> None:
    with one_thread(), Connection(handle) as connection:
        try:
            file = Path(os.fsdecode(connection.recv_bytes()))
            config, data = load_config(file), DataSet.mapped(file.parent)
            work = ClientWork(build_federation(config, data, plan_of(config, data)).world)
            serve(connection, work)
        except (EOFError, ConnectionError, KeyboardInterrupt):
            return  # the run is over, or was stopped


if __name__ == "__main__":
    main(int(sys.argv[1]))
