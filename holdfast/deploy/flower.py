"""The courier over Flower: a SuperLink of the server's own, on this machine only, and a run whose messages we send.

Sites reach the SuperLink through the gate (gate.py). No app is shipped or run: the run that Flower needs has an empty
one, and the server process itself holds the run's token."""

import ctypes
import hashlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, message_from_proto, run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest, PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import (
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from holdfast.deploy.courier import Failure
from holdfast.deploy.flower_node import ENTRY, PULL, RECORD, blob_of, brief
from holdfast.errors import HoldfastError
from holdfast.files import write_atomic

POLL = 0.1  # seconds between two questions for answers
START = 60.0  # seconds that a SuperLink may take to start
GRACE = 10.0  # seconds that a site may be disconnected while everybody else has answered
TTL = 3600.0 * 24  # seconds that a message is kept for a site
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_UPDATE_CHECK": "0"}

log = logging.getLogger("holdfast.deploy")

APP = {
    "pyproject.toml": b"""\
[project]
name = "holdfast"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41,<1.42"]

[tool.flwr.app]
publisher = "holdfast"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "holdfast_app:nothing"
clientapp = "holdfast_app:nothing"
""",
    "holdfast_app.py": b'raise SystemExit("this federation runs no apps: sites take part with holdfast join")\n',
    "LICENSE": b"Apache-2.0\n",
}


def _die_with_parent() -> None:
    """Has the kernel end this process when its parent is killed, where the kernel can (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class FlowerCourier:
    """Starts and stops the SuperLink; knows the sites by the names of their registered keys."""

    def __init__(self, folder: Path, certificate: Path, key: Path, authority: Path) -> None:
        self.folder, self.certificate, self.key, self.authority = folder, certificate, key, authority
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.grid: HttpGrid | None = None
        self._again: set[str] = set()  # sites that have come back and need their request again
        self._names: dict[int, str] = {}  # node id -> site

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # the SuperLink

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = self.folder / "superexec.secret"
        write_atomic(secret, b"")
        os.chmod(secret, 0o600)
        secret.write_bytes(secrets.token_hex(32).encode())
        command = [str(Path(sys.executable).with_name("flower-superlink")), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--isolation", "process", "--enable-supernode-auth"]
        command += ["--ssl-certfile", str(self.certificate), "--ssl-keyfile", str(self.key)]
        command += ["--ssl-ca-certfile", str(self.authority), "--database", str(self.folder / "superlink.db")]
        command += ["--superexec-auth-secret-file", str(secret)]
        environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.folder / "flwr")}
        with open(self.folder / "superlink.log", "ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        write_atomic(self.folder / "superlink.pid", str(self.process.pid).encode())
        self._await_health()
        self._start_run(secret.read_bytes())

    def _await_health(self) -> None:
        assert self.process is not None
        end = time.monotonic() + START
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise HoldfastError(f"Flower's SuperLink has stopped; see {self.folder / 'superlink.log'}")
            with suppress(httpx.HTTPError), httpx.Client(verify=str(self.authority)) as client:
                if client.get(f"https://{self.address}/health").status_code < 500:
                    return
            time.sleep(0.1)
        raise HoldfastError(f"Flower's SuperLink did not start within {START:.0f} s; see {self.folder}/superlink.log")

    def _control(self) -> ControlHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        return ControlHttpClient.from_server_address(self.address, False, str(self.authority), [version])

    def _start_run(self, secret: bytes) -> None:
        """Starts a run and takes its task, as the process that would run its app."""
        content = build_fab_from_files(APP)[0]
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        last = self.folder / "run_id"
        with self._control() as control:
            if last.exists():  # or its open messages would still be delivered
                with suppress(httpx.HTTPStatusError, ValueError):
                    control.StopRun(StopRunRequest(run_id=int(last.read_text())))
            run_id = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
        write_atomic(last, str(run_id).encode())
        interceptors: list[Any] = [
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
            ),
        ]
        runtime = RuntimeHttpClient.from_server_address(self.address, False, str(self.authority), interceptors)
        with runtime:
            while True:
                found = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
                if not found.token:
                    raise HoldfastError("Flower's SuperLink gives no task for our run; delete its database")
                if found.task.run_id == run_id:
                    break
        certificate = self.authority.read_bytes()
        self.grid = HttpGrid(self.address, False, certificate, token=found.token)
        self._beats = HeartbeatSender(make_task_heartbeat_fn_http(self.grid._runtime_client))
        self._beats.start()
        answer = self.grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = answer.task_id, answer.run.run_id
        TaskIdentity.node_id = answer.context.node_id
        self.grid.set_run(run_from_proto(answer.run))

    def stop(self) -> None:
        if self.grid is not None:
            self._beats.stop()
            self.grid.close()
            self.grid = None
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    # sites

    def admit(self, site: str, public_key: bytes) -> int:
        """Registers a site's key, unless it is registered; gives its node id. The site gets its open request again."""
        with self._control() as control:
            for node in control.ListNodes(ListNodesRequest()).nodes_info:
                if node.public_key == public_key and not node.unregistered_at:
                    node_id = int(node.node_id)
                    break
            else:
                request = RegisterNodeRequest(public_key=public_key, name=site)
                node_id = int(control.RegisterNode(request).node_id)
        self._names[node_id] = site
        self._again.add(site)
        return node_id

    def _nodes(self) -> dict[str, int]:
        assert self.grid is not None
        found = {}
        for node in self.grid.get_nodes():
            name = self._names.get(int(node.node_id), node.name)
            if name:
                found[name] = int(node.node_id)
        return found

    def present(self) -> Sequence[str]:
        return sorted(self._nodes())

    # messages

    def exchange(self, blobs: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes | Failure]]:
        end = time.monotonic() + deadline
        waiting: dict[str, str] = {}  # message id -> site
        left = dict(blobs)
        lost: dict[str, float] = {}  # sites that are not connected, and since when
        self._again -= left.keys()
        while left:
            unsent = [site for site in left if site not in waiting.values() or site in self._again]
            if unsent:
                nodes = self._nodes()
                lost = {site: lost.get(site, time.monotonic()) for site in unsent if site not in nodes}
                for site in (site for site in unsent if site in nodes):
                    self._again.discard(site)
                    waiting = {sent: other for sent, other in waiting.items() if other != site}
                    waiting[self._push(nodes[site], left[site])] = site
            else:
                lost = {}
            for message in self._pull(waiting):
                site = waiting.pop(message.metadata.reply_to_message_id, "")
                if site not in left:
                    continue
                if message.has_error():
                    reason = brief(RuntimeError(message.error.reason or f"error {message.error.code}"))
                    log.warning("%s: no answer (%s); asking again if it comes back", site, reason)
                    continue
                del left[site]
                yield site, blob_of(message)
            if left and time.monotonic() > end:
                for site in list(left):
                    yield site, Failure(f"no answer within {deadline:.0f} s")
                return
            if left.keys() <= lost.keys() and all(time.monotonic() - lost[site] > GRACE for site in left):
                for site in list(left):
                    yield site, Failure("no answer: it has lost its connection")
                return
            if left:
                time.sleep(POLL)

    def _push(self, node: int, blob: bytes) -> str:
        assert self.grid is not None
        content = RecordDict({RECORD: ConfigRecord({ENTRY: blob})})
        [sent] = self.grid.push_messages([Message(content, node, "query", ttl=TTL)])
        return str(sent)

    def _pull(self, waiting: Mapping[str, str]) -> list[Message]:
        """The answers that have come. Flower's own `pull_messages` waits a second for each that is still being sent."""
        assert self.grid is not None
        if not waiting:
            return []
        client, run_id, node = self.grid._runtime_client, self.grid.run.run_id, self.grid.node
        pulled = client.PullMessages(PullAppMessagesRequest(message_ids=list(waiting)))
        found = []
        for envelope, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            if envelope.HasField("error"):
                found.append(message_from_proto(envelope))
                continue
            try:
                message: Message = pull_and_inflate_object_from_tree(
                    tree,
                    make_pull_object_fn_protobuf(client.PullObject, node, run_id),
                    make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run_id),
                    return_type=Message,
                    **PULL,
                )
            except ObjectPullError as error:  # its site has died while it was sending
                log.warning("an answer did not come through (%s)", brief(error))
                continue
            found.append(message)
        return found
