"""A site's end of the wire: a node of the Flower federation that answers messages by itself.

It speaks Flower's Fleet API with Flower's own client. Unlike a SuperNode it never fetches or runs an app: whatever the
server ships, only bytes reach this process."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from holdfast.errors import HoldfastError

POLL = 0.25  # seconds between two questions for a message
PATIENCE = 2.0  # seconds between two attempts to connect
PULL: dict[str, Any] = {"initial_backoff": 0.05, "backoff_cap": 1.0, "max_time": 600.0, "max_tries_per_object": None}
RECORD, ENTRY = "holdfast", "blob"

log = logging.getLogger("holdfast.deploy")
Handler = Callable[[bytes], bytes]


class Unwelcome(HoldfastError):
    """The server has refused this site; trying again would not help."""


@dataclass
class FlowerNode:
    """Connects a site to its server, again and again, and hands every message to the site."""

    address: str  # host:port
    authority: Path  # the certificate of the coordinator's CA
    key: ec.EllipticCurvePrivateKey
    node_id: Callable[[], int]  # tells the server that this site is here; gives its node id
    handle: Handler

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Answers messages until `stopped`; a lost connection is made again."""
        while not stopped():
            try:
                self._connected(stopped)
            except Unwelcome:
                raise
            except (httpx.HTTPError, RuntimeError, HoldfastError) as error:
                log.warning("no connection to the server at %s (%s); trying again", self.address, brief(error))
                _wait(PATIENCE, stopped)

    def _connected(self, stopped: Callable[[], bool]) -> None:
        public = self.key.public_key()
        name = public_key_to_bytes(public)
        identity = NodeAuthHttpInterceptor(self.key, public)
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        client = FleetHttpClient.from_server_address(self.address, False, str(self.authority), [version, identity])
        with client:
            node_id = self.node_id()
            with suppress(httpx.HTTPStatusError):  # a node that was killed still counts as connected for a while
                client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))
            interval = HEARTBEAT_DEFAULT_INTERVAL
            answer = client.ActivateNode(ActivateNodeRequest(public_key=name, heartbeat_interval=interval))
            node = Node(node_id=answer.node_id)
            beats = HeartbeatSender(lambda: _beat(client, node))
            beats.start()
            log.info("connected to the server at %s", self.address)
            try:
                while not stopped():
                    if not self._one(client, node):
                        _wait(POLL, stopped)
            finally:
                beats.stop()
                with suppress(httpx.HTTPError, RuntimeError):
                    client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _one(self, client: FleetHttpClient, node: Node) -> bool:
        """Answers one message, if there is one."""
        pulled = client.PullMessages(PullMessagesRequest(node=node))
        if not pulled.messages_list:
            return False
        envelope, tree = message_from_proto(pulled.messages_list[0]), pulled.message_object_trees[0]
        try:
            message = _inflated(client, node, envelope, tree)
        except (httpx.HTTPStatusError, ObjectPullError) as error:  # of a server that has died; its successor asks again
            log.warning("a message could not be read (%s)", brief(error))
            return True
        started = time.monotonic()
        answer = Message(_content(self.handle(blob_of(message))), reply_to=message)
        try:
            _push(client, node, answer, time.monotonic() - started)
        except httpx.HTTPStatusError as error:  # nobody waits for it any more; it is asked for again, or never
            log.warning("an answer was not taken (%s)", brief(error))
        return True


def _inflated(client: FleetHttpClient, node: Node, envelope: Message, tree: ObjectTree) -> Message:
    run_id = envelope.metadata.run_id
    message: Message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, node, run_id),
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run_id),
        return_type=Message,
        **PULL,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _push(client: FleetHttpClient, node: Node, answer: Message, seconds: float) -> None:
    run_id = answer.metadata.run_id
    answer.metadata.__dict__["_message_id"] = answer.object_id
    with no_object_id_recompute():
        tree, objects = get_object_tree(answer), get_all_nested_objects(answer)
        envelope = message_to_proto(remove_content_from_message(answer))  # the content goes as objects
        taken = client.PushMessages(
            PushMessagesRequest(
                node=node, messages_list=[envelope], message_object_trees=[tree], clientapp_runtime_list=[seconds]
            )
        )
        push_objects(
            objects,
            make_push_object_fn_protobuf(client.PushObject, node, run_id, taken.session_id),
            object_ids_to_push=set(taken.objects_to_push),
        )


def _beat(client: FleetHttpClient, node: Node) -> bool:
    try:
        request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        return bool(client.SendNodeHeartbeat(request).success)
    except httpx.HTTPError:
        return False


def _content(blob: bytes) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord({ENTRY: blob})})


def blob_of(message: Message) -> bytes:
    """The bytes that a message carries; empty if it carries something else."""
    record = message.content.config_records.get(RECORD) if message.has_content() else None
    blob = record.get(ENTRY) if record is not None else None
    return blob if isinstance(blob, bytes) else b""


def brief(error: Exception) -> str:
    """The first line of an error, without addresses of documentation."""
    return (str(error) or type(error).__name__).split("\n")[0][:200]


def _wait(seconds: float, stopped: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stopped():
        time.sleep(min(0.25, seconds))
