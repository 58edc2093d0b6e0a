"""The proxy as a process: gRPC with mutual TLS. Who may call what follows from the caller's certificate.

The pool has no names: a share's sender is known on arrival only, where it is kept until its round is judged, and is
left behind when the share goes into the pool."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from holdfast import __version__
from holdfast.deploy.envelope import Envelope
from holdfast.deploy.party import setup_of
from holdfast.deploy.settings import Kit
from holdfast.errors import HoldfastError
from holdfast.files import write_atomic, write_json
from holdfast.machine import one_thread
from holdfast.protocol.codec import MalformedMessage, Snapshot, pack, unpack
from holdfast.protocol.messages import Encoder, GlobalModel, PrototypeShare
from holdfast.proxy.prototype_server import PrototypeServer, build_selector

SERVICE = "holdfast.Proxy"
MAX_SHARES = 10_000  # of one site in one round
WAIT = 900.0  # seconds that a site may wait for teachers
WORKERS = 64  # sites that can wait at once

log = logging.getLogger("holdfast.deploy")


class Denied(HoldfastError):
    """This caller may not do that."""


class ProxyService:
    """Γ, the pool and the chosen models of one federation, on disk and in memory."""

    def __init__(self, kit: Kit, state: Path) -> None:
        self.kit, self.state = kit, state
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        selector = build_selector(kit.agreement.config.method, setup_of(kit.agreement, kit.secret))
        if not isinstance(selector, PrototypeServer):
            raise HoldfastError(
                f"the method {kit.agreement.config.method.name} needs no proxy; there is nothing to start"
            )
        self.selector = selector
        self.run, self.judged, self.put = "", -1, -1  # the last rounds whose models were judged, and put
        self.changed = threading.Condition()
        self.work = threading.Lock()
        self.bytes = {"in": 0, "out": 0}
        self.refused = 0
        self._restore()

    # what callers ask

    def hello(self, role: str, order: Envelope) -> Envelope:
        return Envelope({"version": __version__, "agreement": self.kit.agreement.digest, "time": time.time()})

    def encoder(self, role: str, order: Envelope) -> Envelope:
        _only(role, "site")
        return Envelope({}, {"encoder": Encoder(self.selector.encoder.state_dict()).to_bytes()})

    def teachers(self, role: str, order: Envelope) -> Envelope:
        _only(role, "site")
        growth, least = order.checked.integer("growth", -1), order.checked.integer("judged", -1)
        with self.changed:
            self.changed.wait_for(lambda: self.judged >= least, WAIT)
        with self.work:
            blob = self.selector.teachers(growth).to_bytes()
        return Envelope({"judged": self.judged}, {"teachers": blob})

    def put_shares(self, role: str, order: Envelope) -> Envelope:
        """Takes a site's shares of a round, all at once. The same again changes nothing; others replace them, until
        the round is judged: then it is too late."""
        _only(role, "site")
        round_index, run = order.checked.integer("round"), order.checked.text("run")
        blobs = list(order.parts.values())
        if len(blobs) > MAX_SHARES or not run.isalnum():
            raise MalformedMessage("too many shares in one message, or no run")
        for blob in blobs:
            PrototypeShare.from_bytes(blob)
        with self.changed:
            self._enter(run)
            file = self.state / "shares" / f"{round_index:08d}-{role.removeprefix('site:')}.bin"
            sealed = Envelope({"round": round_index}, {str(i): blob for i, blob in enumerate(blobs)}).to_bytes()
            if (
                file.name in self.taken
            ):  # of a round that is over; what comes late for the first time counts in the next
                return Envelope({"taken": False})
            file.parent.mkdir(exist_ok=True, mode=0o700)
            write_atomic(file, sealed)
        return Envelope({"taken": True})

    def put_model(self, role: str, order: Envelope) -> Envelope:
        """Takes the model of a round, and which sites were counted in it; it is judged at once, in the background."""
        _only(role, "server")
        run, counted = order.checked.text("run"), set(order.checked.texts("counted"))
        model = GlobalModel.from_bytes(order.parts["model"])
        with self.changed:
            self._enter(run)
            if model.round_index > self.put:
                facts = {"counted": sorted(counted)}
                write_atomic(self._model_file(model.round_index), Envelope(facts, dict(order.parts)).to_bytes())
                self.put = model.round_index
                self.changed.notify_all()
        return Envelope({"put": self.put})

    # judging

    def judge_forever(self, stopped: Callable[[], bool]) -> None:
        while not stopped():
            with self.changed:
                self.changed.wait_for(lambda: stopped() or bool(self._waiting()), 0.5)
                waiting = self._waiting()
            if waiting and not stopped():
                self._judge(waiting[0])

    def _waiting(self) -> list[Path]:
        return sorted(self.state.glob("model-*.bin"))

    def _judge(self, file: Path) -> None:
        order = Envelope.from_bytes(file.read_bytes())
        model = GlobalModel.from_bytes(order.parts["model"])
        counted = order.facts["counted"]
        with self.changed:  # no share comes in between
            files = [one for one in sorted((self.state / "shares").glob("*.bin")) if _round(one) <= model.round_index]
            offered: list[tuple[int, PrototypeShare]] = []
            for number, one in enumerate(files):
                late = _round(one) < model.round_index
                if late or _site(one) in counted:
                    parts = Envelope.from_bytes(one.read_bytes()).parts.values()
                    offered += [(number, PrototypeShare.from_bytes(blob)) for blob in parts]
        start = time.monotonic()
        with self.work, one_thread():
            admitted, refused = self.selector.admit(model.growths, offered)
            found = self.selector.judge(model, admitted)
        self.refused += len(refused)
        for refusal in refused:
            log.warning("round %d: a share was refused: %s", model.round_index + 1, refusal.reason)
        with self.changed:
            self.judged = model.round_index
            self.taken |= {one.name for one in files}
            self._save()
            seconds = round(time.monotonic() - start, 3)
            line = {"round": model.round_index + 1, "shares": len(admitted), **found, "seconds": seconds}
            with open(self.state / "proxy.jsonl", "a") as record:
                record.write(json.dumps(line) + "\n")
            for one in (*files, file):
                one.unlink()
            self.status()
            self.changed.notify_all()
        log.info("round %d: judged with %d new prototypes", model.round_index + 1, len(admitted))

    # disk

    def _enter(self, run: str) -> None:
        """A federation that is started anew has another run; the pool of the old one is put aside."""
        if run == self.run:
            return
        if self.run:
            raise Denied(f"this proxy serves the run {self.run[:8]}; move its state folder away to begin another one")
        self.run = run
        self._save()

    def _model_file(self, round_index: int) -> Path:
        return self.state / f"model-{round_index:08d}.bin"

    def _save(self) -> None:
        blobs = {name: pack("part", *snapshot) for name, snapshot in self.selector.snapshot().items()}
        facts = {"run": self.run, "judged": self.judged, "taken": sorted(self.taken)[-MAX_SHARES:]}
        write_atomic(self.state / "proxy.bin", Envelope(facts, blobs).to_bytes())

    def _restore(self) -> None:
        self.taken: set[str] = set()
        file = self.state / "proxy.bin"
        if file.exists():
            saved = Envelope.from_bytes(file.read_bytes())
            self.run, self.judged = saved.checked.text("run"), saved.checked.integer("judged", -1)
            self.taken = set(saved.checked.texts("taken"))
            parts: Mapping[str, Snapshot] = {name: unpack("part", blob) for name, blob in saved.parts.items()}
            if self.judged >= 0:
                self.selector.restore(parts)
        for share in (self.state / "shares").glob("*.bin"):
            if share.name in self.taken:
                share.unlink()  # in the pool, but the process was killed before it was removed
        for old in self._waiting():
            if _round(old.with_name(old.name.removeprefix("model-"))) <= self.judged:
                old.unlink()  # judged, but the process was killed before it was removed
        self.put = max([self.judged, *(int(one.stem.removeprefix("model-")) for one in self._waiting())])

    def status(self) -> None:
        facts: dict[str, Any] = {"proxy": True, "run": self.run, "round": self.judged + 1, "bytes": self.bytes}
        facts |= {"prototypes": len(self.selector.gallery()), "refused": self.refused, "written": time.time()}
        write_json(self.state / "status.json", facts)


def _round(file: Path) -> int:
    return int(file.name.split("-")[0].split(".")[0])


def _site(file: Path) -> str:
    return file.stem.partition("-")[2]


def _only(role: str, wanted: str) -> None:
    if role.partition(":")[0] != wanted:
        raise Denied(f"a certificate of the role {role!r} may not do this; only a {wanted} may")


# gRPC


def start(service: ProxyService, max_bytes: int) -> grpc.Server:
    """Serves until it is stopped."""
    kit = service.kit
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(_handler(service, getattr(service, method)))
        for name, method in {
            "Hello": "hello",
            "Encoder": "encoder",
            "Teachers": "teachers",
            "PutShares": "put_shares",
            "PutModel": "put_model",
        }.items()
    }
    options = [("grpc.max_receive_message_length", max_bytes), ("grpc.max_send_message_length", max_bytes)]
    options += [("grpc.so_reuseport", 0)]
    server = grpc.server(ThreadPoolExecutor(WORKERS), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    credentials = grpc.ssl_server_credentials(
        [(kit.file("proxy.key").read_bytes(), kit.file("proxy.crt").read_bytes())],
        kit.file("proxy-ca.crt").read_bytes(),
        require_client_auth=True,
    )
    host, port = kit.agreement.proxy.bind
    try:
        if not server.add_secure_port(f"{host}:{port}", credentials):
            raise RuntimeError("no port")
    except RuntimeError as error:
        raise HoldfastError(
            f"cannot listen on {host}:{port}; another program may use the port: set [proxy] listen"
        ) from error
    server.start()
    service.status()
    return server


def _handler(
    service: ProxyService, method: Callable[[str, Envelope], Envelope]
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    def handle(blob: bytes, context: grpc.ServicerContext) -> bytes:
        names = context.auth_context().get("x509_common_name", [b""])
        role = names[0].decode("utf-8", "replace")
        service.bytes["in"] += len(blob)
        try:
            answer = method(role, Envelope.from_bytes(blob)).to_bytes()
        except Denied as error:
            log.warning("%s was refused: %s", role, error)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except (MalformedMessage, KeyError) as error:
            log.warning("%s sent something unusable: %s", role, error)
            service.refused += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except HoldfastError as error:
            log.error("%s", error)
            context.abort(grpc.StatusCode.INTERNAL, "the proxy's log says more")
        service.bytes["out"] += len(answer)
        return answer

    return handle
