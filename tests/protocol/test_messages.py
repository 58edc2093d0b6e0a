"""Every message comes back as it was sent, and whatever else arrives in its place is refused as malformed."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.models.incremental import ModelSpec
from holdfast.models.transform import Transform
from holdfast.protocol import codec
from holdfast.protocol.codec import MalformedMessage, pack, tensor_bytes
from holdfast.protocol.enrolment import Enrolment, Preset, Training
from holdfast.protocol.messages import (
    COUNT_BYTES,
    MESSAGES,
    Announcement,
    Broadcast,
    Encoder,
    Extras,
    Failure,
    GlobalModel,
    InferenceRequest,
    Job,
    Phase,
    PrototypeShare,
    Reply,
    RoundClosed,
    TaskEnded,
    Teachers,
    TransitionNotice,
    decode,
)
from holdfast.protocol.registry import Registry
from holdfast.protocol.state import ClientState

REGISTRY = Registry(("cat", "owl", "a b/é\udcff"), (2, 1))
WEIGHTS = {"body.0": torch.linspace(-1, 1, 6).view(2, 3), "seen": torch.tensor(7), "mask": torch.tensor([True, False])}
PHASES: tuple[Phase, ...] = ("begin", "train", "finish")
ENROLMENT = Enrolment(
    client=4,
    method={"name": "lga", "iterations": 3, "rate": 0.1, "npb": True, "teacher": None},
    spec=ModelSpec("convnet", "batch", 16),
    transform=Transform((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), flip=True),
    training=Training(2, 16, Preset(0.05, 0.9, 1e-4, "steps", (0.25, 0.5), 0.2)),
    memory=12,
    seed=2**63 - 1,  # the largest that a config allows
)
SHARE = PrototypeShare({"linear.bias": torch.rand(6), "conv.weight": torch.rand(2, 3)}, 9, torch.rand(8))
STATE = ClientState(
    3,
    (("owl", "cat"), (), ("cat", "a b/é\udcff")),
    {"cat": torch.tensor([5, -1, 3]), "a b/é\udcff": torch.empty(0, dtype=torch.int64)},
    {"owl": torch.tensor([4, 2], dtype=torch.int32), "cat": torch.tensor([1], dtype=torch.int32)},
    stored=1,
    noticed=3,
    shared=2,
    notes={"importance.0": torch.rand(2, 2), "prototype.ids": torch.tensor([1])},
)
FULL: dict[str, Any] = {
    "enrolment": ENROLMENT,
    "encoder": Encoder(WEIGHTS),
    "broadcast": Broadcast(3, REGISTRY, WEIGHTS),
    "transition notice": TransitionNotice(5),
    "job": Job(3, 0.25, 0.125, REGISTRY, WEIGHTS, "finish"),
    "task end": TaskEnded(4, REGISTRY, WEIGHTS),
    "round close": RoundClosed(6),
    "announcement": Announcement(2, ("owl", "a b/é\udcff")),
    "reply": Reply(WEIGHTS, 60, {"ce": 0.5, "kd": 0.0}, Extras("class sums", {"sums": torch.rand(2, 4)})),
    "failure": Failure("crash", "out of luck", 3, "finish"),
    "teachers": Teachers({1: WEIGHTS, 12: {"body.0": torch.rand(3)}}),
    "share": SHARE,
    "global model": GlobalModel(7, (2, 1), WEIGHTS),
    "inference request": InferenceRequest("entropies", (2, 1), WEIGHTS, ("round", 3, "observed")),
    "state": STATE,
}
BARE: list[Any] = [
    replace(ENROLMENT, method={}, memory=0, seed=0, client=0),
    Encoder({}),
    Broadcast(0, Registry()),
    Job(0, 0.0, 1.0, Registry(), {}, "begin"),
    TaskEnded(0, Registry(), {}),
    Announcement(0, ()),
    Reply(),
    Failure("timeout", ""),
    Reply(round_index=4, phase="begin"),
    Reply(samples=3, extras=Extras("bias", {})),
    Teachers(),
    PrototypeShare({}, 0, torch.zeros(0)),
    GlobalModel(0, (), {}),
    InferenceRequest("scores", (), {}),
    ClientState(0),
]
KINDS = tuple(FULL)


def test_there_is_an_example_of_every_message() -> None:
    assert {*MESSAGES, "state"} == set(FULL)


def read(kind: str, blob: bytes) -> Any:
    """By the way that a receiver would take: a state is never a message."""
    return ClientState.from_bytes(blob) if kind == "state" else decode(blob)


def type_of(kind: str) -> Any:
    return type(FULL[kind])


def plain(value: Any) -> Any:
    """The value with bytes in place of tensors, so that `==` compares every bit."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if is_dataclass(value):
        return type(value).__name__, {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("message", [*FULL.values(), *BARE], ids=lambda message: type(message).__name__)
def test_every_message_comes_back_to_the_bit(message: Any) -> None:
    blob = message.to_bytes()
    back = type(message).from_bytes(blob)
    assert type(back) is type(message)
    assert plain(back) == plain(message)
    assert back.to_bytes() == blob
    assert message.to_bytes() == blob
    if not isinstance(message, ClientState):
        assert plain(decode(blob)) == plain(message)


@pytest.mark.parametrize("phase", PHASES)
def test_jobs_of_every_phase_come_back(phase: Phase) -> None:
    assert Job.from_bytes(replace(FULL["job"], phase=phase).to_bytes()).phase == phase


def test_a_states_classes_keep_their_order() -> None:
    back = ClientState.from_bytes(STATE.to_bytes())
    assert (list(back.data), list(back.memory)) == (list(STATE.data), list(STATE.memory))
    assert back.images == STATE.images == 6


def test_a_state_is_not_a_message() -> None:
    with pytest.raises(MalformedMessage, match="unknown kind 'state'"):
        decode(STATE.to_bytes())


def test_sizes_are_the_bytes_of_tensors_and_survive_the_way() -> None:
    whole = tensor_bytes(WEIGHTS)
    assert whole == 24 + 8 + 2
    expected = {
        **dict.fromkeys(("encoder", "broadcast", "job", "task end", "reply", "global model"), whole),
        **dict.fromkeys(("transition notice", "round close"), 0),
        "announcement": len("owl") + len("a b/é".encode()) + 1,
        "teachers": whole + 12,
        "share": 24 + 24 + 32 + COUNT_BYTES,
    }
    for kind, size in expected.items():
        assert FULL[kind].size == decode(FULL[kind].to_bytes()).size == size, kind  # type: ignore[union-attr]
    assert FULL["reply"].extra_size == 32
    assert Reply().extra_size == 0


def test_a_share_is_recognised_by_its_gradient_on_both_sides() -> None:
    back = PrototypeShare.from_bytes(SHARE.to_bytes())
    assert back.fingerprint == SHARE.fingerprint
    other = {**SHARE.gradient, "linear.bias": SHARE.gradient["linear.bias"] + 1}
    assert replace(SHARE, gradient=other).fingerprint != SHARE.fingerprint


# what is refused


def refused(kind: str, blob: bytes) -> None:
    """Checks that a message of this kind, and the codec, refuse these bytes as they promise."""
    for how in (lambda: type_of(kind).from_bytes(blob), lambda: read(kind, blob)):
        with pytest.raises(HoldfastError) as error:
            how()
        assert type(error.value) is MalformedMessage
        assert 0 < len(str(error.value)) < 500


def read_or_refused(kind: str, blob: bytes) -> None:
    """Whatever can be read can be counted and written again; everything else is malformed."""
    try:
        message = type_of(kind).from_bytes(blob)
    except MalformedMessage:
        return
    again = message.to_bytes()
    assert type_of(kind).from_bytes(again).to_bytes() == again
    assert getattr(message, "size", 0) >= 0


def split(blob: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Header, facts and data of a message."""
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["holdfast"]), blob[8 + length :]


def joined(header: Mapping[str, Any], facts: Any, data: bytes) -> bytes:
    said = facts if isinstance(facts, str) else json.dumps(facts)
    text = json.dumps({**header, "__metadata__": {"holdfast": said}}).encode()
    return len(text).to_bytes(8, "little") + text + data


Path = tuple[str | int, ...]


def paths(value: Any, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every plain value in these facts, tables and lists included, by the way to it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*above, key), one
        yield from paths(one, (*above, key))


def changed(blob: bytes, path: Path, change: Callable[[Any, Any], None]) -> bytes:
    """The message after `change(container, key)` of the value at this path of its facts."""
    header, facts, data = split(blob)
    inner = facts
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return joined(header, facts, data)


def with_value(blob: bytes, path: Path, value: Any) -> bytes:
    return changed(blob, path, lambda inner, key: inner.__setitem__(key, value))


def own_paths(kind: str) -> list[tuple[Path, Any]]:
    """The facts that the message itself reads; a method's settings are the method's affair."""
    return [(path, value) for path, value in paths(split(FULL[kind].to_bytes())[1]) if path[:1] != ("method",)]


WRONG: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "integer": 1,
    "negative": -1,
    "real": 0.5,
    "text": "text",
    "list": [],
    "table": {},
    "nan": float("nan"),
    "infinite": float("inf"),
    "minus infinite": float("-inf"),
    "beyond any machine": 10**400,
}
ACCEPTED = {bool: {"boolean"}, int: {"integer"}, str: {"text"}, list: {"list"}, dict: {"table"}}


def may_be(kind: str, path: Path, value: Any) -> set[str]:
    """Which of the wrong values are right for this fact."""
    if kind == "inference request" and path[0] == "stream" and len(path) == 2:
        return {"text", "integer", "negative", "beyond any machine"}  # words and numbers of a random stream
    if isinstance(value, float):
        return {"integer", "negative", "real"}
    return ACCEPTED[type(value)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fact_of_a_wrong_type_or_out_of_bounds_is_refused(kind: str) -> None:
    blob = FULL[kind].to_bytes()
    checked = 0
    for path, value in own_paths(kind):
        right = may_be(kind, path, value)
        for name, wrong in WRONG.items():
            if name in right:
                read_or_refused(kind, with_value(blob, path, wrong))
            else:
                refused(kind, with_value(blob, path, wrong))
                checked += 1
    assert checked >= 10  # every message says its kind at least


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_fact_is_refused(kind: str) -> None:
    blob = FULL[kind].to_bytes()
    for path, _ in own_paths(kind):
        if (isinstance(path[-1], str) and path[0] != "losses") or path == ("losses",):
            refused(kind, changed(blob, path, lambda inner, key: inner.pop(key)))
    header, _, data = split(blob)
    for facts in ({}, [], 3, None, "", "{", '"text"'):
        refused(kind, joined(header, facts, data))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("path", [("method", "rate"), ("training", "optimiser", "lr"), ("transform", "mean", 1)])
def test_no_number_of_an_enrolment_is_infinite(path: Path, value: float) -> None:
    refused("enrolment", with_value(ENROLMENT.to_bytes(), path, value))


@pytest.mark.parametrize("depth", [100_000, 3_000, *range(960, 1000, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_facts_with_nested_brackets_are_refused(kind: str, depth: int) -> None:
    header, facts, data = split(FULL[kind].to_bytes())
    nested = "[" * depth + "]" * depth
    for name in facts:
        said = json.dumps({**facts, name: "HERE"}).replace('"HERE"', nested)
        refused(kind, joined(header, said, data))


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_is_refused(kind: str) -> None:
    for other in KINDS:
        if other != kind:
            with pytest.raises(HoldfastError) as error:
                type_of(kind).from_bytes(FULL[other].to_bytes())
            assert type(error.value) is MalformedMessage
    for name in ("", "unknown", kind.upper(), f"{kind} ", "x" * 10_000):
        refused(kind, with_value(FULL[kind].to_bytes(), ("kind",), name))


NAMED = {
    **dict.fromkeys(("broadcast", "job", "task end", "announcement"), ("names",)),
    "state": ("data", "memory"),
}


@pytest.mark.parametrize(("kind", "fact"), [(kind, fact) for kind, facts in NAMED.items() for fact in facts])
def test_a_class_that_is_named_twice_is_refused(kind: str, fact: str) -> None:
    blob = FULL[kind].to_bytes()
    names = split(blob)[1][fact]
    refused(kind, with_value(blob, (fact,), [names[0]] * len(names)))


def test_an_arrival_that_brings_a_class_twice_is_refused() -> None:
    refused("state", with_value(STATE.to_bytes(), ("arrivals", 0), ["cat", "cat"]))


@pytest.mark.parametrize(
    "growths", [[2], [2, 2], [3, 1], [1, 1], [0, 3], [3, 0], [4, -1], [2.0, 1], [2, True], [2**62, 1]]
)
@pytest.mark.parametrize("kind", ["broadcast", "job", "task end"])
def test_growths_that_do_not_add_up_are_refused(kind: str, growths: list[Any]) -> None:
    refused(kind, with_value(FULL[kind].to_bytes(), ("growths",), growths))


@pytest.mark.parametrize("growths", [[0], [2, 0], [-1], [2, -1], [2**40], [2**62], [2**30] * 8])
@pytest.mark.parametrize("kind", ["global model", "inference request"])
def test_growths_without_names_are_positive_and_bounded(kind: str, growths: list[int]) -> None:
    """Whoever gets them makes a head of so many classes."""
    refused(kind, with_value(FULL[kind].to_bytes(), ("growths",), growths))


def test_values_that_are_none_of_those_allowed_are_refused() -> None:
    wrong: list[tuple[str, Path, Any]] = [
        ("job", ("phase",), "pause"),
        ("enrolment", ("spec", "image_size"), 0),
        ("enrolment", ("spec", "image_size"), 10**6),
        ("enrolment", ("training", "epochs"), 0),
        ("enrolment", ("training", "batch"), 0),
        ("enrolment", ("training", "batch"), 2**40),
        ("enrolment", ("transform", "std"), [0.1, 0.0, 0.1]),
        ("enrolment", ("transform", "std"), [0.1, 0.1]),
        ("enrolment", ("transform", "mean"), [0.1] * 4),
    ]
    for kind, path, value in wrong:
        refused(kind, with_value(FULL[kind].to_bytes(), path, value))


def test_teachers_are_named_by_their_growths() -> None:
    header, facts, data = split(FULL["teachers"].to_bytes())
    refused("teachers", joined(header, {**facts, "growths": [1]}, data))
    refused("teachers", joined(header, {**facts, "growths": []}, data))
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    for name in ("x", "", ".x", "-1.x", "1", "²1.x", "+1.x", "1" * 5000 + ".x", "2.x"):
        if name != "1":
            refused("teachers", joined({name: entry}, facts, b"x"))
    read_or_refused("teachers", joined({"1": entry}, facts, b"x"))


def test_a_share_has_a_variance_and_a_state_the_images_that_it_names() -> None:
    refused("share", pack("share", SHARE.gradient, {"count": 3}))
    header, facts, data = split(STATE.to_bytes())
    refused("state", joined(header, {**facts, "data": ["cat", "owl", "more"]}, data))
    refused("state", joined(header, {**facts, "memory": ["cat", "owl", "more"]}, data))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be loaded in this test."""

    def fail(blob: bytes) -> dict[str, Tensor]:
        raise AssertionError("tensors were loaded before their sizes were checked")

    monkeypatch.setattr(codec, "_load_tensors", fail)


HUGE: list[dict[str, Any]] = [
    {"shape": [2**40], "data_offsets": [0, 2**42]},
    {"shape": [2**40]},
    {"shape": [2**31] * 8},
    {"shape": [1] * 9},
    {"data_offsets": [2**62, 2**62 + 8]},
    {"data_offsets": [0, 2**63]},
]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_cannot_be_are_refused_before_anything_is_loaded(kind: str) -> None:
    header, facts, data = split(FULL[kind].to_bytes())
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for lie in HUGE:
        refused(kind, joined({**header, "1.huge": {**entry, **lie}}, facts, data))
    blob = FULL[kind].to_bytes()
    for length in (2**24, 2**32, 2**63, 2**64 - 1):
        refused(kind, length.to_bytes(8, "little") + blob[8:])


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_refused(kind: str) -> None:
    blob = FULL[kind].to_bytes()
    for end in range(len(blob)):
        with pytest.raises(HoldfastError) as error:
            type_of(kind).from_bytes(blob[:end])
        assert type(error.value) is MalformedMessage
    for more in (b"\0", bytes(8), blob):
        refused(kind, blob + more)


@pytest.mark.parametrize("kind", KINDS)
def test_every_flip_of_a_bit_in_the_header_is_read_or_refused(kind: str) -> None:
    blob = FULL[kind].to_bytes()
    end = 8 + int.from_bytes(blob[:8], "little")
    for place in range(end):
        for bit in (0, 1, 4, 5, 6, 7) if place < 8 else (place % 8, (place + 5) % 8):
            flipped = bytearray(blob)
            flipped[place] ^= 1 << bit
            read_or_refused(kind, bytes(flipped))


ANY_KIND = st.sampled_from(KINDS)


@settings(max_examples=200, deadline=None)
@given(ANY_KIND, st.data())
def test_bytes_that_are_changed_anywhere_are_read_or_refused(kind: str, data: st.DataObject) -> None:
    blob = bytearray(FULL[kind].to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(blob) - 1))
        blob[start : start + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    read_or_refused(kind, bytes(blob))


@settings(max_examples=100, deadline=None)
@given(ANY_KIND, st.binary(max_size=300))
def test_random_bytes_are_refused(kind: str, noise: bytes) -> None:
    refused(kind, noise)
    refused(kind, len(noise).to_bytes(8, "little") + noise)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("\ud800")
JSON = st.recursive(
    LEAVES | st.integers(min_value=2**60) | st.just(10**350),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(ANY_KIND, st.data())
def test_facts_of_any_value_are_read_or_refused(kind: str, data: st.DataObject) -> None:
    path, _ = data.draw(st.sampled_from(own_paths(kind)))
    read_or_refused(kind, with_value(FULL[kind].to_bytes(), path, data.draw(JSON)))
