"""The client as a party: it owns its images, memory, detector, teachers, encoder and notes, and is driven by messages
alone. It needs no plan, no test set and no other client, and can be saved to a folder and loaded again."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.client.data import ClientImages
from holdfast.client.detector import History, Observation, detector_of, observation_of
from holdfast.client.memory import update_memory
from holdfast.client.training import ClientWork, attempt
from holdfast.data.images import ImageSet
from holdfast.errors import HoldfastError
from holdfast.files import parse_json, read_limited, write_atomic
from holdfast.methods import method_of
from holdfast.models.encoder import GradientEncoder
from holdfast.models.limited import as_large_as
from holdfast.models.passes import CHUNK
from holdfast.protocol.codec import MAX_BYTES, MAX_HEADER, Facts, MalformedMessage, pack, unpack
from holdfast.protocol.enrolment import Enrolment
from holdfast.protocol.messages import (
    Announcement,
    Broadcast,
    Encoder,
    Failure,
    Inbox,
    InferenceRequest,
    Job,
    Message,
    RoundClosed,
    TaskEnded,
    Teachers,
    TransitionNotice,
)
from holdfast.protocol.registry import Registry
from holdfast.protocol.state import ClientState, Holdings
from holdfast.seeding import torch_generator

SCHEMA = 1
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Arrival:
    """Told to a client by whoever watches its data, never by another party: from now on its current data is this."""

    data: Holdings  # class name -> ids of its images, in the client's own order
    images: tuple[ImageSet, tuple[str, ...]] | None = None  # the new data and its classes, if the ids are of others


@dataclass
class Client:
    """One institution or device. `receive` is its whole life: it takes a message, changes the client, and returns the
    messages that the client sends. Announcements and replies are for the global server, shares for the proxy."""

    images: ClientImages
    keep_pixels: bool = False  # does the memory keep copies, so that it survives when the data folder moves on?
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.state = ClientState(-1)
        self.departed: list[Holdings] = []  # data that other data has replaced, and that is not in the memory yet
        self.history: History = ()
        self.teachers = Teachers()
        self.alarms: list[int] = []  # the rounds in which the detector raised an alarm
        self._owed = False  # did the client owe prototypes before this round's alarm?
        self._noticed_in, self._seen_in, self._announced_in, self._trained_in = -1, -1, -1, -1  # rounds
        self._work: ClientWork | None = None

    # messages

    def receive(self, message: Message | Arrival) -> list[Message]:
        """Takes in one message; returns what the client sends because of it."""
        if isinstance(message, Enrolment):
            self._enrol(message)
            return []
        if self._work is None:
            raise HoldfastError(
                f"this client got {type(message).__name__} before it was enrolled; send Enrolment first"
            )
        handlers: dict[type, Callable[[Any], list[Message]]] = {
            Arrival: self._arrive,
            Encoder: self._take_encoder,
            TransitionNotice: self._take_notice,
            Broadcast: self._observe_broadcast,
            Teachers: self._take_teachers,
            Job: self._do_job,
            TaskEnded: self._end_task,
            RoundClosed: self._close_round,
        }
        if type(message) not in handlers:
            raise HoldfastError(f"a client does not receive {type(message).__name__}")
        return handlers[type(message)](message)

    @property
    def work(self) -> ClientWork:
        """The client's work, once it is enrolled."""
        if self._work is None:
            raise HoldfastError("this client is not enrolled yet; send it an Enrolment first")
        return self._work

    def _enrol(self, enrolment: Enrolment) -> None:
        self.state = replace(self.state, client=enrolment.client)
        self._work = ClientWork(enrolment, method_of(enrolment.method), self.images, self.device)
        self.detector = detector_of(self._work.method.detector_kind())

    def _take_encoder(self, message: Encoder) -> list[Message]:
        self.work.encoder = encoder_of(message, self.work.enrolment.spec.image_size).to(self.device)
        return []

    def _take_teachers(self, message: Teachers) -> list[Message]:
        self.teachers = message
        return []

    def _take_notice(self, message: TransitionNotice) -> list[Message]:
        if not self.detector.observes:
            self._alarm(message.round_index)
        return []

    def _arrive(self, arrival: Arrival) -> list[Message]:
        """New data replaces the old, which goes into the memory with the next model that the client gets. Classes whose
        images were all there before are still there; they have not arrived."""
        waiting = len(self.state.arrivals) - self.state.stored - len(self.departed)
        if waiting and self.work.method.keeps_memory:  # else a task's end has put the old data into the memory
            self.departed.append(self.state.data)
        if self.keep_pixels:
            self._copy()
        if arrival.images is not None:
            self.images.replace_data(*arrival.images)
        data = {name: ids for name, ids in arrival.data.items() if len(ids)}
        came = tuple(data) if arrival.images is not None else _came(self.state.data, data)
        self.state = replace(self.state, data=data, arrivals=(*self.state.arrivals, came))
        return []

    def _observe_broadcast(self, broadcast: Broadcast) -> list[Message]:
        if broadcast.weights:
            request = InferenceRequest("", broadcast.registry.growths, broadcast.weights)
            self._see(broadcast.round_index, request)
        return self._announce(broadcast.round_index, broadcast.registry)

    def _do_job(self, job: Job) -> list[Message]:
        request = InferenceRequest("", job.registry.growths, job.weights)
        if self._seen_in != job.round_index:
            self._see(job.round_index, request)
        announced = self._announce(job.round_index, job.registry)
        if job.phase == "finish":
            self._remember_everything(request)
        if job.phase == "train":
            self._trained_in = job.round_index
        outcome = attempt(self.work, self.state, Inbox(job, self.teachers))
        if isinstance(outcome, Failure):
            return [*announced, outcome]
        self.state, reply, shares = outcome
        return [*announced, reply, *shares]

    def _end_task(self, message: TaskEnded) -> list[Message]:
        self._remember_everything(InferenceRequest("", message.registry.growths, message.weights))
        return []

    def _close_round(self, message: RoundClosed) -> list[Message]:
        """Prototypes of classes that were noticed in a round in which the client was not selected are given up, unless
        the method has clients share late or the client owed others already."""
        sharing = self.work.method.prototypes()
        late = sharing is not None and sharing.late
        if self._noticed_in == message.round_index != self._trained_in and not self._owed and not late:
            self.state = replace(self.state, shared=self.state.noticed)
        return []

    # what a client does with a global model

    def _announce(self, round_index: int, registry: Registry) -> list[Message]:
        """Once per round, with the first message that has the class list."""
        names = registry.unknown(self.state.data)
        if not names or self._announced_in == round_index:
            return []
        self._announced_in = round_index
        return [Announcement(round_index, names)]

    def _see(self, round_index: int, request: InferenceRequest) -> None:
        """What every first model of a round is used for: the memory of data that has left, and detection."""
        self._seen_in = round_index
        while self.departed:
            self._remember(self.departed.pop(0), request)
        if self.detector.observes and self.state.data:
            self._observe(round_index, request)

    def _observe(self, round_index: int, request: InferenceRequest) -> None:
        augmented = self.work.method.observes_augmented
        stream = ("round", round_index, "observed") if augmented else ()
        asked = replace(request, what="entropies", stream=stream)
        entropies = [self._infer(asked, name, ids) for name, ids in self.state.data.items()]
        alarm, self.history = self.detector.decide(self.history, observation_of(torch.cat(entropies).double().numpy()))
        if alarm:
            self._alarm(round_index)

    def _alarm(self, round_index: int) -> None:
        """A false alarm changes nothing; what was missed waits for the next alarm, and nothing of it is lost."""
        self.alarms.append(round_index)
        state = self.state
        if any(state.arrivals[state.noticed :]):
            self._owed = state.shared < state.noticed
            self._noticed_in = round_index
            self.state = replace(state, noticed=len(state.arrivals))

    def _remember_everything(self, request: InferenceRequest) -> None:
        """A task is over: what has left and what is still here goes into the memory."""
        while self.departed:
            self._remember(self.departed.pop(0), request)
        if self.state.stored < len(self.state.arrivals):
            self._remember(self.state.data, request)

    def _remember(self, data: Holdings, request: InferenceRequest) -> None:
        state, method = self.state, self.work.method
        if not method.keeps_memory:
            return

        asked = replace(request, what="features")

        def best(name: str, ids: Tensor, count: int) -> Tensor:
            return ids[method.exemplars(self._infer(asked, name, ids), count)] if count else ids[:0]

        if self.keep_pixels:  # of a class that comes again, an image that is in the memory already gets the same id
            copies = {c: ids for c, ids in data.items() if c in state.memory or bool((ids < 0).any())}
            data = {**data, **self._copy(copies)}
        memory = update_memory(self.state.memory, data, self.work.enrolment.memory, best)
        self.state = replace(self.state, memory=memory, stored=state.stored + 1)
        if self.keep_pixels:
            self._copy()

    def _copy(self, data: Holdings | None = None) -> Holdings:
        """Copies of everything that must outlive the data folder: the memory, what is on its way into it, and `data`,
        whose new ids it returns."""
        memory, copied, *departed = self.images.copy(self.state.memory, data or {}, *self.departed)
        self.state = replace(self.state, memory=memory)
        self.departed = list(departed)
        return copied

    def _infer(self, request: InferenceRequest, name: str, ids: Tensor) -> Tensor:
        """An answer about images of one class, in chunks that are keyed by the class and these images alone."""
        chunks = ids.long().split(CHUNK)
        return torch.cat([self.work.infer(request, chunk, name, i) for i, chunk in enumerate(chunks)])

    # to a folder and back

    def save(self, folder: Path) -> None:
        """Writes all that the client owns but for the images of its data, which stay where they are. A process that is
        killed here leaves the folder as it was."""
        folder.mkdir(parents=True, exist_ok=True)
        blobs = {
            "enrolment": self.work.enrolment.to_bytes(),
            "state": self.state.to_bytes(),
            "teachers": self.teachers.to_bytes(),
            "copies": self.images.to_bytes(),
            "pending": self._pending(),
        }
        if self.work.encoder is not None:
            blobs["encoder"] = Encoder(self.work.encoder.state_dict()).to_bytes()
        files = {name: f"{name}-{hashlib.sha256(blob).hexdigest()[:16]}.safetensors" for name, blob in blobs.items()}
        for name, file in files.items():
            if not (folder / file).exists():
                write_atomic(folder / file, blobs[name])
        facts = {
            "schema": SCHEMA,
            "files": files,
            "keep_pixels": self.keep_pixels,
            "alarms": self.alarms,
            "owed": self._owed,
            "rounds": [self._noticed_in, self._seen_in, self._announced_in, self._trained_in],
        }
        write_atomic(folder / "client.json", json.dumps(facts, indent=1).encode())
        for old in folder.glob("*.safetensors"):
            if old.name not in files.values():
                old.unlink()

    def _pending(self) -> bytes:
        """What the detector remembers, and data on its way into the memory."""
        tensors = {f"history.{i}": torch.from_numpy(np.array(one.images)) for i, one in enumerate(self.history)}
        for i, held in enumerate(self.departed):
            tensors |= {f"departed.{i}.{k}": ids for k, ids in enumerate(held.values())}
        facts = {"means": [one.mean for one in self.history], "departed": [list(held) for held in self.departed]}
        return pack("pending", tensors, facts)

    @staticmethod
    def load(folder: Path, images: ClientImages, device: torch.device = CPU) -> "Client":
        """The client that was saved there, with its data's images where they are now."""
        try:
            facts = parse_json(read_limited(folder / "client.json", MAX_HEADER))
            if facts["schema"] != SCHEMA:
                raise ValueError(f"schema {facts['schema']}")
            blobs = {name: read_limited(folder / Path(file).name, MAX_BYTES) for name, file in facts["files"].items()}
            return Client._restore(facts, blobs, images, device)
        except MalformedMessage as error:
            raise MalformedMessage(f"{folder} does not hold a client that this version can load ({error})") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise HoldfastError(f"{folder} does not hold a client that this version can load ({error})") from error

    @staticmethod
    def _restore(
        facts: Mapping[str, Any], blobs: Mapping[str, bytes], images: ClientImages, device: torch.device
    ) -> "Client":
        client = Client(images, bool(facts["keep_pixels"]), device)
        images.take_copies(blobs["copies"])
        client.receive(Enrolment.from_bytes(blobs["enrolment"]))
        if "encoder" in blobs:
            client.receive(Encoder.from_bytes(blobs["encoder"]))
        client.teachers = Teachers.from_bytes(blobs["teachers"])
        client.state = ClientState.from_bytes(blobs["state"])
        tensors, values = unpack("pending", blobs["pending"])
        means = Facts("pending", values).numbers("means")
        client.history = tuple(Observation(mean, tensors[f"history.{i}"].numpy()) for i, mean in enumerate(means))
        client.departed = [
            {name: tensors[f"departed.{i}.{k}"] for k, name in enumerate(names)}
            for i, names in enumerate(values["departed"])
        ]
        numbers = Facts("client", facts)
        client.alarms, client._owed = list(numbers.integers("alarms")), numbers.flag("owed")
        rounds = numbers.integers("rounds", least=-1)
        client._noticed_in, client._seen_in, client._announced_in, client._trained_in = rounds
        return client


def _came(before: Holdings, now: Holdings) -> tuple[str, ...]:
    """The classes of which there are images that were not there before."""
    return tuple(
        name for name, ids in now.items() if name not in before or not bool(torch.isin(ids, before[name]).all())
    )


def encoder_of(message: Encoder, image_size: int) -> GradientEncoder:
    """The encoding network of a message."""
    try:
        capacity = len(message.weights["linear.bias"])
        with as_large_as(message.weights):
            encoder = GradientEncoder(image_size, capacity, torch_generator(0, "buffer"))
        encoder.load_state_dict(dict(message.weights))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise MalformedMessage("an encoder does not have the weights of an encoding network") from error
    return encoder
