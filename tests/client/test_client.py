"""A client as a party: it is driven by messages alone, in whatever order they come."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.client.client import Arrival, Client
from holdfast.client.data import ClientImages
from holdfast.data.images import Images, ImageSet
from holdfast.errors import HoldfastError
from holdfast.methods import method_of
from holdfast.methods.herding import herd
from holdfast.models.encoder import GradientEncoder
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.passes import in_chunks
from holdfast.models.transform import Transform
from holdfast.protocol.codec import MalformedMessage
from holdfast.protocol.enrolment import Enrolment, Preset, Training
from holdfast.protocol.messages import (
    Announcement,
    Broadcast,
    Encoder,
    GlobalModel,
    InferenceRequest,
    Job,
    Message,
    PrototypeShare,
    Reply,
    RoundClosed,
    TaskEnded,
    Teachers,
    TransitionNotice,
)
from holdfast.protocol.registry import Registry
from holdfast.protocol.state import Holdings
from holdfast.seeding import torch_generator

SIZE, PER_CLASS = 16, 6
NAMES = ("owl", "fox", "elk", "hen")
SPEC = ModelSpec("convnet", "batch", SIZE)
TRANSFORM = Transform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), flip=False)
REPLAY: dict[str, Any] = {"name": "fedavg", "replay": True}  # told of new classes
ORACLE: dict[str, Any] = {"name": "lga", "detector": "oracle", "perturb_steps": 1}  # told, and shares prototypes
AUTO: dict[str, Any] = {**ORACLE, "detector": "auto"}  # observes
KNOWN = Registry(NAMES[:3], (2, 1))


def pixels_of(seed: int, count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), generator=torch_generator(seed), dtype=torch.uint8)


def all_images() -> ClientImages:
    """Six images of each class, in their order."""
    labels = torch.arange(len(NAMES)).repeat_interleave(PER_CLASS)
    return ClientImages(ImageSet(Images(pixels_of(1, len(labels))), labels), NAMES)


def rows(*names: str) -> dict[str, Tensor]:
    """The ids of all images of these classes."""
    return {name: torch.arange(PER_CLASS) + PER_CLASS * NAMES.index(name) for name in names}


def enrolment_of(method: dict[str, Any], memory: int = 6) -> Enrolment:
    training = Training(1, 4, Preset(0.01, 0.9, 0.0, "cosine"))
    return Enrolment(7, method, SPEC, TRANSFORM, training, memory, seed=5)


def client_of(method: dict[str, Any], keep_pixels: bool = False, images: ClientImages | None = None) -> Client:
    client = Client(images or all_images(), keep_pixels)
    assert client.receive(enrolment_of(method)) == []
    return client


def model_of(seed: int, registry: Registry = KNOWN) -> IncrementalModel:
    model = method_of(REPLAY).build_model(SPEC, torch_generator(seed))
    for classes in registry.growths:
        model.grow(classes, torch_generator(seed, "grow", len(model.growths)))
    return model.eval()


def broadcast(round_index: int, seed: int = 2, registry: Registry = KNOWN) -> Broadcast:
    return Broadcast(round_index, registry, model_of(seed, registry).state_dict())


def job(round_index: int, seed: int = 2, registry: Registry = KNOWN, phase: Any = "train") -> Job:
    return Job(round_index, 0.0, 0.5, registry, model_of(seed, registry).state_dict(), phase)


def task_ended(round_index: int, seed: int = 2) -> TaskEnded:
    return TaskEnded(round_index, KNOWN, model_of(seed).state_dict())


def encoder() -> Encoder:
    return Encoder(GradientEncoder(SIZE, len(NAMES), torch_generator(3)).state_dict())


def herded(ids: Tensor, count: int, seed: int = 2, source: ClientImages | None = None) -> list[int]:
    """Which of these images herding keeps under the model of this seed."""
    model, images = model_of(seed), source or all_images()
    features = in_chunks(model, lambda some: TRANSFORM.plain(images.pixels(some)), ids, lambda x: model(x).features)
    return ids[herd(features, count)].tolist()


def plain(held: Holdings) -> dict[str, list[int]]:
    return {name: ids.tolist() for name, ids in held.items()}


# who may be told what


def share() -> PrototypeShare:
    return PrototypeShare({"linear.bias": torch.zeros(3)}, 1, torch.zeros(2))


FOR_CLIENTS: dict[str, Callable[[], Message | Arrival]] = {
    "Arrival": lambda: Arrival(rows("owl")),
    "Encoder": encoder,
    "Broadcast": lambda: broadcast(0),
    "TransitionNotice": lambda: TransitionNotice(0),
    "Job": lambda: job(0),
    "TaskEnded": lambda: task_ended(0),
    "RoundClosed": lambda: RoundClosed(0),
    "Teachers": Teachers,
}
NOT_FOR_CLIENTS: dict[str, Message] = {
    "Announcement": Announcement(0, ("owl",)),
    "Reply": Reply(),
    "PrototypeShare": share(),
    "GlobalModel": GlobalModel(0, (1,), {}),
    "InferenceRequest": InferenceRequest("features", (1,), {}),
}


@pytest.mark.parametrize("name", [*FOR_CLIENTS, *NOT_FOR_CLIENTS])
def test_nothing_is_taken_before_the_enrolment(name: str) -> None:
    client = Client(all_images())
    message = FOR_CLIENTS[name]() if name in FOR_CLIENTS else NOT_FOR_CLIENTS[name]
    with pytest.raises(HoldfastError, match=rf"^this client got {name} before it was enrolled; send Enrolment first$"):
        client.receive(message)
    assert not client.state.arrivals
    client.receive(enrolment_of(REPLAY))
    if name in FOR_CLIENTS:
        client.receive(message)  # now it is


@pytest.mark.parametrize("name", NOT_FOR_CLIENTS)
def test_messages_for_other_parties_are_refused(name: str) -> None:
    client = client_of(REPLAY)
    client.receive(Arrival(rows("owl")))
    before = client.state.to_bytes()
    with pytest.raises(HoldfastError, match=rf"^a client does not receive {name}$"):
        client.receive(NOT_FOR_CLIENTS[name])
    assert client.state.to_bytes() == before


def test_an_enrolment_says_who_the_client_is_and_an_unknown_method_is_refused() -> None:
    client = client_of(REPLAY)
    assert client.state.client == 7
    with pytest.raises(HoldfastError, match="unknown method 'magic'"):
        Client(all_images()).receive(enrolment_of({"name": "magic"}))


def test_an_encoder_of_another_shape_is_refused() -> None:
    client = client_of(ORACLE)
    with pytest.raises(MalformedMessage, match=r"^an encoder does not have the weights of an encoding network$"):
        client.receive(Encoder({"linear.bias": torch.zeros(4)}))
    with pytest.raises(MalformedMessage):
        client.receive(Encoder({}))


# announcing and noticing


def test_a_client_announces_what_the_registry_does_not_know() -> None:
    client = client_of(REPLAY)
    client.receive(Arrival(rows("hen", "owl")))
    assert client.receive(Broadcast(0, KNOWN)) == [Announcement(0, ("hen",))]
    assert client.receive(broadcast(1)) == [Announcement(1, ("hen",))]
    assert client.receive(Broadcast(2, KNOWN.grown(("hen",)))) == []
    # A job is a selected client's first message of a round, or comes after others.
    first = client.receive(job(3))
    assert [type(message) for message in first] == [Announcement, Reply]
    assert first[0] == Announcement(3, ("hen",))
    assert [type(message) for message in client.receive(job(3, phase="finish"))] == [Reply]


def test_the_oracle_is_told_by_a_notice_and_by_nothing_else() -> None:
    client = client_of(ORACLE)
    client.receive(Arrival(rows("owl")))
    client.receive(broadcast(0))
    client.receive(job(0))
    assert (client.alarms, client.state.noticed) == ([], 0)
    client.receive(TransitionNotice(1))
    assert (client.alarms, client.state.noticed) == ([1], 1)
    assert client.history == ()
    # Told again, it has nothing new to notice; an arrival without classes is none either.
    client.receive(Arrival({}))
    client.receive(TransitionNotice(2))
    assert (client.alarms, client.state.noticed) == ([1, 2], 1)
    # What comes later is noticed together with it.
    client.receive(Arrival(rows("fox")))
    client.receive(TransitionNotice(3))
    assert client.state.noticed == len(client.state.arrivals) == 3


def test_a_detector_that_observes_is_not_told() -> None:
    client = client_of(AUTO)
    client.receive(Arrival(rows("owl")))
    client.receive(TransitionNotice(0))
    client.receive(Broadcast(0, KNOWN))  # no model, nothing to observe
    assert (client.alarms, client.state.noticed, client.history) == ([], 0, ())
    client.receive(broadcast(0))
    assert (client.alarms, client.state.noticed) == ([0], 1)
    client.receive(job(0))  # the round's model again: it is observed once
    assert len(client.history) == 1
    client.receive(job(1))
    assert len(client.history) == 2
    client.receive(Arrival({}))
    client.receive(broadcast(2))  # without images it sees nothing (N14)
    assert len(client.history) == 2
    assert client.alarms == [0]


# prototypes that are given up


def told(client: Client, round_index: int, *names: str) -> None:
    """These classes come to the client, and the oracle says so."""
    client.receive(Arrival(rows(*names)))
    client.receive(TransitionNotice(round_index))


def shares_of(messages: Sequence[Message]) -> int:
    return sum(isinstance(message, PrototypeShare) for message in messages)


def test_who_is_not_selected_when_it_notices_gives_its_prototypes_up() -> None:
    client = client_of(ORACLE)
    client.receive(encoder())
    told(client, 0, "owl", "fox")
    assert client.state.shared == 0
    client.receive(RoundClosed(0))
    assert client.state.shared == client.state.noticed == 1
    assert shares_of(client.receive(job(1))) == 0
    # Classes that come later are another matter.
    told(client, 2, "elk")
    assert shares_of(client.receive(job(2))) == 1
    client.receive(RoundClosed(2))
    assert client.state.shared == 2


def test_who_is_selected_does_not_give_up() -> None:
    client = client_of(ORACLE)
    client.receive(encoder())
    told(client, 0, "hen")
    # The head does not know its class yet, so it sends nothing now; it is asked, so it owes the prototype.
    assert client.receive(job(0))[1:] == [Reply()]
    client.receive(RoundClosed(0))
    assert client.state.shared == 0
    client.receive(RoundClosed(1))  # a round in which it neither noticed anything nor was selected
    assert client.state.shared == 0
    assert shares_of(client.receive(job(2, registry=KNOWN.grown(("hen",))))) == 1
    assert client.state.shared == 1


def test_extras_alone_are_no_selection_for_training() -> None:
    client = client_of(ORACLE)
    told(client, 0, "owl")
    client.receive(job(0, phase="begin"))
    client.receive(RoundClosed(0))
    assert client.state.shared == 1


def test_who_owes_prototypes_already_gives_none_up() -> None:
    client = client_of(ORACLE)
    client.receive(encoder())
    told(client, 0, "hen")
    client.receive(job(0))
    client.receive(RoundClosed(0))
    told(client, 1, "owl")  # not selected this time
    client.receive(RoundClosed(1))
    assert (client.state.noticed, client.state.shared) == (2, 0)
    client.receive(task_ended(1))
    sent = client.receive(job(2, registry=KNOWN.grown(("hen",))))
    assert shares_of(sent) == 2  # of its data, and of the exemplars of what it owed before
    # Once the debt is paid, the next one is given up again.
    told(client, 3, "elk")
    client.receive(RoundClosed(3))
    assert client.state.shared == 3


def test_a_method_that_shares_late_gives_none_up() -> None:
    client = client_of({**ORACLE, "shares": "when_selected"})
    client.receive(encoder())
    told(client, 0, "owl", "fox")
    client.receive(RoundClosed(0))
    assert client.state.shared == 0
    assert shares_of(client.receive(job(1))) == 2
    assert client.state.shared == 1


def test_a_false_alarm_gives_nothing_up() -> None:
    client = client_of(ORACLE)
    told(client, 0, "hen")
    client.receive(job(0))
    client.receive(RoundClosed(0))
    client.receive(TransitionNotice(1))  # nothing has come since
    client.receive(RoundClosed(1))
    assert (client.state.noticed, client.state.shared) == (1, 0)


# memory


def test_a_tasks_end_puts_what_is_here_into_the_memory() -> None:
    client = client_of(REPLAY)
    client.receive(Arrival(rows("owl", "fox")))
    client.receive(broadcast(0, seed=4))
    client.receive(job(0, seed=4))
    assert client.state.memory == {}
    client.receive(task_ended(1))
    expected = {name: herded(ids, 3) for name, ids in rows("owl", "fox").items()}
    assert plain(client.state.memory) == expected
    assert client.state.stored == 1
    client.receive(task_ended(3, seed=4))  # the same data is stored once
    assert plain(client.state.memory) == expected
    # More classes: fewer of each, and the old lists lose their ends.
    client.receive(Arrival(rows("elk")))
    client.receive(task_ended(5, seed=4))
    assert plain(client.state.memory) == {
        "owl": expected["owl"][:2],
        "fox": expected["fox"][:2],
        "elk": herded(rows("elk")["elk"], 2, seed=4),
    }


def test_a_last_job_finds_the_task_in_the_memory() -> None:
    """A client that is asked for extras at the end has the model by that job; no other message tells it."""
    client = client_of(REPLAY)
    client.receive(Arrival(rows("owl")))
    client.receive(job(1, phase="finish"))
    assert plain(client.state.memory) == {"owl": herded(rows("owl")["owl"], 6)}
    assert client.state.stored == 1


def test_data_that_has_left_waits_for_the_next_model() -> None:
    client = client_of(REPLAY)
    client.receive(Arrival(rows("owl")))
    client.receive(broadcast(0, seed=4))
    client.receive(Arrival(rows("fox")))
    assert [plain(held) for held in client.departed] == [plain(rows("owl"))]
    for quiet in (TransitionNotice(1), Broadcast(1, KNOWN), RoundClosed(1), Teachers()):
        assert client.receive(quiet) == []
        assert len(client.departed) == 1
        assert (client.state.memory, client.state.stored) == ({}, 0)
    client.receive(Arrival(rows("elk")))
    assert [list(held) for held in client.departed] == [["owl"], ["fox"]]
    client.receive(broadcast(2))
    assert client.departed == []
    assert client.state.stored == 2  # the elks are still here
    assert plain(client.state.memory) == {name: herded(ids, 3) for name, ids in rows("owl", "fox").items()}
    assert plain(client.state.data) == plain(rows("elk"))
    client.receive(task_ended(2))
    assert list(client.state.memory) == ["owl", "fox", "elk"]
    assert client.state.stored == 3


def test_a_job_takes_in_data_that_has_left_before_it_trains() -> None:
    client = client_of(REPLAY)
    client.receive(Arrival(rows("owl")))
    client.receive(Arrival(rows("fox")))
    (reply,) = client.receive(job(0))
    assert isinstance(reply, Reply)
    assert reply.samples == 2 * PER_CLASS  # six exemplars beside the new data
    assert client.state.stored == 1


def test_a_client_without_a_memory_keeps_nothing_of_what_has_left() -> None:
    client = client_of({"name": "fedavg"})
    client.receive(Arrival(rows("owl")))
    client.receive(Arrival(rows("fox")))
    assert client.departed == []
    (reply,) = client.receive(job(0))
    assert isinstance(reply, Reply)
    assert reply.samples == PER_CLASS
    client.receive(task_ended(0))
    assert (client.state.memory, client.state.stored) == ({}, 0)


# pixels that outlive the data


def other_folder(*names: str) -> tuple[ImageSet, tuple[str, ...]]:
    """Other images of these classes; their ids begin at 0 again."""
    labels = torch.arange(len(names)).repeat_interleave(PER_CLASS)
    return ImageSet(Images(pixels_of(9, len(labels))), labels), names


def test_a_memory_with_pixels_survives_other_images() -> None:
    client = client_of(REPLAY, keep_pixels=True)
    client.receive(Arrival(rows("owl", "fox")))
    client.receive(task_ended(0))
    expected = {name: all_images().pixels(torch.tensor(herded(ids, 3))) for name, ids in rows("owl", "fox").items()}
    assert all(int(ids.max()) < 0 for ids in client.state.memory.values())
    folder = other_folder("hen", "fox")
    client.receive(Arrival({"hen": torch.arange(6), "fox": torch.arange(6, 12)}, folder))
    assert torch.equal(client.images.pixels(client.state.data["fox"]), folder[0].pixels(torch.arange(6, 12)))
    for name, kept in expected.items():
        ids = client.state.memory[name].long()
        assert torch.equal(client.images.pixels(ids), kept)
        assert [client.images.classes[c] for c in client.images.class_of(ids)] == [name] * 3
    # It trains on them as well: six new foxes and three exemplars of owls; the head does not know hens.
    _, reply = client.receive(job(1))
    assert isinstance(reply, Reply)
    assert reply.samples == 9


def test_data_that_has_left_is_copied_until_it_is_in_the_memory() -> None:
    """As it would be, had all images stayed where they were."""
    client = client_of(REPLAY, keep_pixels=True)
    client.receive(Arrival(rows("owl", "fox")))
    client.receive(Arrival({"elk": torch.arange(6)}, other_folder("elk")))
    (departed,) = client.departed
    assert {name: len(ids) for name, ids in departed.items()} == {"owl": 6, "fox": 6}
    client.receive(Arrival({"elk": torch.arange(6)}, other_folder("elk")))  # the same once more
    client.receive(broadcast(1))
    assert client.departed == []
    source = all_images()
    source.data = ImageSet(
        Images(torch.cat([source.data.images.stored, other_folder("elk")[0].images.stored])),
        torch.cat([source.data.labels, torch.full((6,), 2)]),
    )
    for name, ids in {**rows("owl", "fox"), "elk": torch.arange(24, 30)}.items():
        best = torch.tensor(herded(ids, 2, source=source))
        assert torch.equal(client.images.pixels(client.state.memory[name].long()), source.pixels(best)), name
    assert len(client.images.copies) == 6  # what is in the memory, and nothing else


def test_an_image_that_comes_again_is_in_the_memory_once() -> None:
    client = Client(all_images(), keep_pixels=True)
    client.receive(enrolment_of(REPLAY, memory=8))  # a quota above the number of images
    client.receive(Arrival(rows("owl")))
    client.receive(task_ended(0))
    again = pixels_of(1, PER_CLASS * len(NAMES))[:PER_CLASS].flip(0)  # the same owls under other ids
    client.receive(Arrival({"owl": torch.arange(6)}, (ImageSet(Images(again), torch.zeros(6).long()), ("owl",))))
    client.receive(task_ended(1))
    ids = client.state.memory["owl"].long()
    assert len(ids) == len(ids.unique()) == 6
    assert len(client.images.pixels(ids).flatten(1).unique(dim=0)) == 6


# to a folder and back


def script() -> list[Message | Arrival]:
    """A client's life: it joins, is selected or not, and its data changes with and without a model at hand."""
    everything = KNOWN.grown(("hen",))
    return [
        encoder(),
        Arrival(rows("owl", "fox")),
        TransitionNotice(0),
        broadcast(0),
        RoundClosed(0),
        job(1, seed=3),
        RoundClosed(1),
        Arrival(rows("elk")),
        TransitionNotice(2),
        Broadcast(2, KNOWN),  # no model: what has left waits
        RoundClosed(2),
        Arrival({"owl": torch.arange(3), **rows("hen")}),
        TransitionNotice(3),
        Teachers({0: model_of(6, Registry(NAMES[:2], (2,))).state_dict()}),
        job(3, seed=4, registry=everything),
        job(3, seed=4, registry=everything, phase="finish"),
        RoundClosed(3),
        Arrival({}),
        broadcast(4, seed=5, registry=everything),
        task_ended(4, seed=5),
        job(5, seed=6, registry=everything),
        RoundClosed(5),
    ]


def in_bytes(client: Client) -> tuple[Any, ...]:
    copies = client.images.copies
    history = [(one.mean, one.images.tolist()) for one in client.history]
    departed = [plain(held) for held in client.departed]
    return client.state.to_bytes(), client.teachers.to_bytes(), history, departed, client.alarms, copies.tolist()


@pytest.mark.parametrize(
    ("method", "keep_pixels"), [(ORACLE, False), (AUTO, True), ({**AUTO, "shares": "when_selected"}, False)]
)
def test_a_client_goes_on_from_its_folder_as_if_nothing_had_been(
    tmp_path: Path, method: dict[str, Any], keep_pixels: bool
) -> None:
    """Saved and loaded after every message, in mid-round as well."""
    one, other = client_of(method, keep_pixels), client_of(method, keep_pixels)
    waited = shared = distilled = 0
    for number, message in enumerate(script()):
        other.save(tmp_path / str(number))
        other = Client.load(tmp_path / str(number), all_images())
        assert other.keep_pixels == keep_pixels
        sent, again = one.receive(message), other.receive(message)
        assert [type(m) for m in sent] == [type(m) for m in again]
        assert [m.to_bytes() for m in sent] == [m.to_bytes() for m in again], number
        assert in_bytes(one) == in_bytes(other), number
        waited += len(one.departed)
        shared += shares_of(sent)
        distilled += sum("distillation" in m.losses for m in sent if isinstance(m, Reply))
    assert waited >= 3
    assert shared
    assert distilled
    assert one.alarms
    assert one.state.stored == len(one.state.arrivals) == 4


def test_a_client_is_saved_while_data_waits_and_its_folder_has_moved_on(tmp_path: Path) -> None:
    client = client_of(REPLAY, keep_pixels=True)
    client.receive(Arrival(rows("owl", "fox")))
    folder = other_folder("elk")
    client.receive(Arrival({"elk": torch.arange(6)}, folder))
    client.receive(Broadcast(1, KNOWN))
    client.save(tmp_path)
    loaded = Client.load(tmp_path, ClientImages(*folder))
    assert [plain(held) for held in loaded.departed] == [plain(held) for held in client.departed]
    loaded.receive(broadcast(2))
    assert loaded.departed == []
    for name, ids in rows("owl", "fox").items():
        kept = loaded.images.pixels(loaded.state.memory[name].long())
        assert torch.equal(kept, all_images().pixels(torch.tensor(herded(ids, 3))))
    assert torch.equal(loaded.images.pixels(loaded.state.data["elk"]), folder[0].pixels(torch.arange(6)))


def test_a_debt_is_remembered(tmp_path: Path) -> None:
    """What was noticed, selected and owed in a round, though the client was away in the middle of it."""
    for closed in (False, True):
        client = client_of(ORACLE)
        told(client, 0, "hen")
        if closed:
            client.receive(job(0))  # selected, so it will owe
        client.save(tmp_path / str(closed))
        client = Client.load(tmp_path / str(closed), all_images())
        client.receive(RoundClosed(0))
        assert client.state.shared == (0 if closed else 1)
        told(client, 1, "owl")
        client.save(tmp_path / str(closed))
        client = Client.load(tmp_path / str(closed), all_images())
        client.receive(RoundClosed(1))
        assert client.state.shared == (0 if closed else 2)


def saved(folder: Path) -> Path:
    client = client_of(AUTO)
    for message in script()[:9]:
        client.receive(message)
    client.save(folder)
    return folder / "client.json"


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not JSON": lambda text: "client",
    "a list": lambda text: "[1, 2]",
    "no schema": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "schema"}),
    "another schema": lambda text: json.dumps({**json.loads(text), "schema": 99}),
    "nothing but a schema": lambda text: json.dumps({"schema": json.loads(text)["schema"]}),
    "too few rounds": lambda text: json.dumps({**json.loads(text), "rounds": [1]}),
    "a part that is not named": lambda text: json.dumps({**json.loads(text), "files": {}}),
    "files that are no names": lambda text: json.dumps({**json.loads(text), "files": {"state": 7}}),
    "alarms that are no list": lambda text: json.dumps({**json.loads(text), "alarms": 3}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_client_is_refused_with_a_sentence(tmp_path: Path, damage: str) -> None:
    file = saved(tmp_path)
    Client.load(tmp_path, all_images())
    file.write_text(DAMAGES[damage](file.read_text()))
    with pytest.raises(HoldfastError) as refused:
        Client.load(tmp_path, all_images())
    assert str(tmp_path) in str(refused.value)
    assert "does not hold a client that this version can load" in str(refused.value)
    assert "\n" not in str(refused.value)


def part_of(folder: Path, name: str) -> Path:
    """The file of one part of a saved client."""
    return folder / name if "." in name else folder / json.loads((folder / "client.json").read_text())["files"][name]


PARTS = ["state", "enrolment", "teachers", "pending", "copies"]


@pytest.mark.parametrize("file", ["client.json", *PARTS])
def test_a_client_of_which_a_file_is_missing_is_refused_with_a_sentence(tmp_path: Path, file: str) -> None:
    saved(tmp_path)
    part_of(tmp_path, file).unlink()
    with pytest.raises(HoldfastError) as refused:
        Client.load(tmp_path, all_images())
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("file", [*PARTS, "encoder"])
def test_other_damaged_files_of_a_client_are_refused(tmp_path: Path, file: str) -> None:
    saved(tmp_path)
    path = part_of(tmp_path, file)
    path.write_bytes(path.read_bytes()[:-1] if path.stat().st_size > 400 else b"nothing")
    with pytest.raises(MalformedMessage):
        Client.load(tmp_path, all_images())


def test_names_that_are_not_unicode_are_saved_too(tmp_path: Path) -> None:
    """A folder's name may be any bytes; Python has those that are not UTF-8 as surrogates."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    labels = torch.zeros(6, dtype=torch.int64)
    images = ClientImages(ImageSet(Images(pixels_of(1, 6)), labels), (name,))
    client = client_of(REPLAY, images=images, keep_pixels=True)
    client.receive(Arrival({name: torch.arange(6)}))
    client.receive(Arrival({}))  # its only class waits
    client.save(tmp_path)
    loaded = Client.load(tmp_path, ClientImages(ImageSet(Images(pixels_of(1, 6)), labels), (name,)))
    assert [list(held) for held in loaded.departed] == [[name]]


def test_the_same_data_twice_waits_twice(tmp_path: Path) -> None:
    client = client_of(REPLAY)
    data = rows("owl")
    for _ in range(2):
        client.receive(Arrival(data))
    client.receive(Arrival(rows("fox")))
    client.save(tmp_path)
    loaded = Client.load(tmp_path, all_images())
    assert [plain(held) for held in loaded.departed] == [plain(data)] * 2


def test_a_client_that_is_killed_while_it_is_saved_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file is the last that gets written, the folder holds the old client or the new one."""
    for last in range(8):
        folder = tmp_path / str(last)
        saved(folder)
        before = Client.load(folder, all_images()).state.to_bytes()
        client = Client.load(folder, all_images())
        for message in script()[9:12]:
            client.receive(message)
        written = 0

        def write(path: Path, content: bytes) -> None:
            nonlocal written
            if written == last:  # noqa: B023
                raise KeyboardInterrupt
            written += 1
            path.write_bytes(content)

        with monkeypatch.context() as patch:
            patch.setattr("holdfast.client.client.write_atomic", write)
            with suppress(KeyboardInterrupt):
                client.save(folder)
        assert Client.load(folder, all_images()).state.to_bytes() in (before, client.state.to_bytes())
    assert written < 8  # the last of them was written as a whole


def test_a_model_that_does_not_fit_is_refused_with_a_sentence() -> None:
    """Of another shape, without a tensor, of another registry; as a job, a task's end or a teacher."""
    client = client_of(REPLAY)
    client.receive(Arrival(rows("owl")))
    weights = dict(model_of(2).state_dict())
    name = next(name for name, tensor in weights.items() if tensor.ndim == 4)
    for wrong in (
        {**weights, name: weights[name][:1]},
        {key: tensor for key, tensor in weights.items() if key != name},
        {},
    ):
        for message in (Job(0, 0.0, 0.5, KNOWN, wrong), TaskEnded(0, KNOWN, wrong)):
            with pytest.raises(MalformedMessage, match="does not fit the network of the enrolment") as refused:
                client.receive(message)
            assert "\n" not in str(refused.value)
    [reply] = client.receive(job(0))  # it goes on with the next model that fits
    assert isinstance(reply, Reply)
    assert reply.weights
