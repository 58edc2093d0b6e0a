"""A worker process of the pool: it builds the world from the run's config, and then works for whoever is at the other
end of its connection. Everything that passes is bytes of safetensors and JSON."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.pool import DONE, FAILED
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, one_thread, plan_of
from holdfast.federation.client import ClientWork
from holdfast.federation.messages import Inbox, Job, State, Teachers


def serve(connection: Connection, work: ClientWork) -> None:
    """Answers requests until the other end is gone. A request is the folder of the round's messages, then a state."""
    known, inbox = b"", None
    while True:
        folder = connection.recv_bytes()
        if folder != known:
            place = Path(os.fsdecode(folder))
            job, teachers = (place / "job").read_bytes(), (place / "teachers").read_bytes()
            known, inbox = folder, Inbox(Job.from_bytes(job), Teachers.from_bytes(teachers))
        assert inbox is not None
        try:
            state, reply, shares = work(State.from_bytes(connection.recv_bytes()), inbox)
        except HoldfastError as error:
            connection.send_bytes(FAILED)
            connection.send_bytes(str(error).encode())
            continue
        connection.send_bytes(DONE)
        for part in (state.to_bytes(), reply.to_bytes(), str(len(shares)).encode(), *(s.to_bytes() for s in shares)):
            connection.send_bytes(part)


def main(handle: int) -> None:
    with one_thread(), Connection(handle) as connection:
        try:
            config = load_config(Path(os.fsdecode(connection.recv_bytes())))
            data = load_data(config.data)
            work = ClientWork(build_federation(config, data, plan_of(config, data)).world)
            serve(connection, work)
        except (EOFError, ConnectionError, KeyboardInterrupt):
            return  # the run is over, or was stopped


if __name__ == "__main__":
    main(int(sys.argv[1]))
