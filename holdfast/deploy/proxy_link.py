"""The way to the proxy, for sites and for the server."""

from typing import Any

import grpc

from holdfast import __version__
from holdfast.deploy.envelope import Envelope
from holdfast.deploy.proxy_service import SERVICE
from holdfast.deploy.settings import Kit
from holdfast.deploy.site import ProxyAway
from holdfast.errors import HoldfastError
from holdfast.protocol.messages import GlobalModel

DEADLINE = 60.0  # seconds of a call that waits for nothing
PATIENCE = 960.0  # of one that waits until the proxy has judged


class ProxyLink:
    """A connection with mutual TLS."""

    def __init__(self, kit: Kit, deadline: float = DEADLINE) -> None:
        self.kit, self.deadline = kit, deadline
        credentials = grpc.ssl_channel_credentials(
            kit.file("proxy-ca.crt").read_bytes(),
            kit.file("proxy.key").read_bytes(),
            kit.file("proxy.crt").read_bytes(),
        )
        most = kit.agreement.proxy.max_megabytes * 2**20
        options = [("grpc.max_receive_message_length", most), ("grpc.max_send_message_length", most)]
        options += [("grpc.max_reconnect_backoff_ms", 2000), ("grpc.initial_reconnect_backoff_ms", 200)]
        self.channel = grpc.secure_channel(kit.agreement.proxy.address, credentials, options=options)
        self.bytes = {"in": 0, "out": 0}

    def call(self, name: str, order: Envelope, deadline: float | None = None) -> Envelope:
        blob = order.to_bytes()
        try:
            method: Any = self.channel.unary_unary(f"/{SERVICE}/{name}")
            answer = method(blob, timeout=deadline or self.deadline)
        except grpc.RpcError as error:
            status, details = error.code(), str(error.details()).split("\n")[0][:200]
            if status in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT):
                raise HoldfastError(f"the proxy refused: {details}") from error
            if status == grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise HoldfastError(f"a message is larger than [proxy] max_megabytes allows: {details}") from error
            raise ProxyAway(f"no answer from the proxy at {self.kit.agreement.proxy.address}: {details}") from error
        self.bytes["out"] += len(blob)
        self.bytes["in"] += len(answer)
        return Envelope.from_bytes(answer)

    def hello(self) -> float:
        """The proxy's clock; raises HoldfastError if it is not the proxy of this federation."""
        answer = self.call("Hello", Envelope({}), 10.0).facts
        if answer.get("version") != __version__:
            raise HoldfastError(f"the proxy has Holdfast {answer.get('version')}, and this is {__version__}")
        if answer.get("agreement") != self.kit.agreement.digest:
            raise HoldfastError("the proxy works by another agreement; compare federation.toml with its operator")
        return float(answer.get("time", 0.0))

    def encoder(self) -> bytes:
        return self.call("Encoder", Envelope({})).parts["encoder"]

    def teachers(self, growth: int, judged: int) -> bytes:
        return self.call("Teachers", Envelope({"growth": growth, "judged": judged}), PATIENCE).parts["teachers"]

    def put_shares(self, run: str, round_index: int, shares: list[bytes]) -> None:
        parts = {str(i): blob for i, blob in enumerate(shares)}
        self.call("PutShares", Envelope({"run": run, "round": round_index}, parts))

    def put_model(self, run: str, counted: list[str], model: GlobalModel) -> None:
        self.call("PutModel", Envelope({"run": run, "counted": counted}, {"model": model.to_bytes()}))
