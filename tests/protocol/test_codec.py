"""The codec: what comes out is what went in, and bytes from outside are checked before anything is allocated."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.protocol import codec
from holdfast.protocol.codec import Facts, MalformedMessage, kind_of, pack, part, prefixed, tensor_bytes, unpack

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FACTS = json.dumps({"kind": "letter", "count": 3})
EVERY_TYPE = [
    torch.tensor([True, False]),
    *(torch.arange(5).to(t) for t in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)),
    *(torch.arange(5).to(t) for t in (torch.uint16, torch.uint32, torch.uint64)),
    *(torch.linspace(-2, 2, 6).to(t).view(2, 3) for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    torch.tensor([float("nan"), float("inf"), -0.0]),
    torch.tensor(7),
    torch.empty(0, 4),
]


def blob_of(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """A blob with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def letter(facts: str = FACTS, data: bytes = bytes(8), **entries: Any) -> bytes:
    return blob_of({"__metadata__": {"holdfast": facts}, **entries}, data)


def refused(blob: bytes) -> str:
    """Checks that this blob is refused as promised; returns what is said."""
    with pytest.raises(HoldfastError) as error:
        unpack("letter", blob)
    assert type(error.value) is MalformedMessage
    said = str(error.value)
    assert said
    assert len(said) < 500
    return said


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be loaded in this test."""

    def fail(blob: bytes) -> dict[str, Tensor]:
        raise AssertionError("tensors were loaded before their sizes were checked")

    monkeypatch.setattr(codec, "_load_tensors", fail)


def test_tensors_of_every_type_and_all_plain_values_come_back() -> None:
    tensors = {f"tensor {i}": tensor for i, tensor in enumerate(EVERY_TYPE)}
    facts = {"whole": -3, "real": 0.1, "flag": True, "none": None, "text": 'é "\\" \n \udcff', "list": [[1], {"a": 2}]}
    blob = pack("letter", tensors, facts)
    back, values = unpack("letter", blob)
    assert values == {"kind": "letter", **facts}
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
    assert kind_of(blob) == "letter"
    assert pack("letter", back, {key: value for key, value in values.items() if key != "kind"}) == blob


def test_views_and_gradients_are_sent_as_plain_values() -> None:
    whole = torch.arange(12.0).view(3, 4).requires_grad_(True)
    back, _ = unpack("letter", pack("letter", {"column": whole[:, 1], "turned": whole.T}, {}))
    assert torch.equal(back["column"], torch.tensor([1.0, 5.0, 9.0]))
    assert torch.equal(back["turned"], whole.detach().T)
    assert not any(tensor.requires_grad for tensor in back.values())


def test_names_get_prefixes_and_lose_them() -> None:
    tensors = {"a.b": torch.zeros(2), "c": torch.zeros(3, dtype=torch.float64)}
    both = {**prefixed("x.", tensors), **prefixed("y.", {"c": torch.ones(1)})}
    assert set(part("x.", both)) == {"a.b", "c"}
    assert torch.equal(part("y.", both)["c"], torch.ones(1))
    assert tensor_bytes(tensors) == 8 + 24


def test_another_kind_is_refused_and_named() -> None:
    assert refused(pack("parcel", {}, {})) == "expected a letter, got a parcel"
    for kind in (None, 3, ["letter"], {"letter": 1}, "letter " * 1000):
        refused(letter(json.dumps({"kind": kind}), b""))
    refused(letter("{}", b""))


HUGE: dict[str, dict[str, Any]] = {
    "elements": {"shape": [2**40], "data_offsets": [0, 2**42]},
    "elements in what is there": {"shape": [2**40], "data_offsets": [0, 8]},
    "axis": {"shape": [2**63], "data_offsets": [0, 8]},
    "axis beyond any machine": {"shape": [10**300], "data_offsets": [0, 8]},
    "axes": {"shape": [2**31] * 8, "data_offsets": [0, 8]},
    "many axes": {"shape": [1] * 10_000 + [2], "data_offsets": [0, 8]},
    "offsets": {"shape": [2], "data_offsets": [2**62, 2**62 + 8]},
    "offsets that wrap around": {"shape": [2], "data_offsets": [2**64 - 8, 2**64]},
    "one byte too many": {"shape": [2], "data_offsets": [1, 9]},
    "reversed": {"shape": [2], "data_offsets": [8, 0]},
    "negative offset": {"shape": [2], "data_offsets": [-8, 0]},
    "negative axes": {"shape": [-1, -2], "data_offsets": [0, 8]},
    "fewer bytes": {"shape": [2], "data_offsets": [0, 4]},
    "unknown type": {"dtype": "F8_E4M3"},
    "no type": {"dtype": None},
    "a list for a type": {"dtype": ["F32"]},
    "one offset": {"data_offsets": [8]},
    "three offsets": {"data_offsets": [0, 8, 8]},
    "no offsets": {"data_offsets": None},
    "offsets as text": {"data_offsets": ["0", "8"]},
    "real offsets": {"data_offsets": [0.0, 8.0]},
    "real axes": {"shape": [2.0]},
    "true axes": {"shape": [True, 2]},
    "no shape": {"shape": None},
    "a number for a shape": {"shape": 2},
    "infinite axes": {"shape": [float("inf")]},
}


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("lie", HUGE)
def test_a_tensor_that_is_described_wrongly_is_refused_before_anything_is_loaded(lie: str) -> None:
    said = refused(letter(x={**GOOD, **HUGE[lie]}))
    assert "'x'" in said or "Infinity" in said


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("entry", [None, 3, "F32", [], [GOOD], True])
def test_a_tensor_that_is_not_described_at_all_is_refused(entry: Any) -> None:
    refused(letter(x=entry))


@pytest.mark.usefixtures("unloaded")
def test_too_many_tensors_too_long_headers_and_too_long_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    monkeypatch.setattr(codec, "MAX_TENSORS", 1000)
    assert "tensors" in refused(letter(data=b"", **{str(i): nothing for i in range(codec.MAX_TENSORS + 1)}))
    assert "header" in refused(blob_of(b" " * (codec.MAX_HEADER + 1)))
    blob = letter(x=GOOD)
    monkeypatch.setattr(codec, "MAX_BYTES", len(blob) - 1)
    assert "too long" in refused(blob)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("more", [1, 2**20, 2**31, 2**32, 2**63, 2**64 - 1])
def test_a_header_that_claims_to_be_longer_than_the_message_is_refused(more: int) -> None:
    header = json.dumps({"__metadata__": {"holdfast": FACTS}}).encode()
    refused(blob_of(header, length=min(2**64 - 1, len(header) + more)))


HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"letter",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "empty": b"{}",
    "no facts": b'{"__metadata__": {}}',
    "facts as null": b'{"__metadata__": {"holdfast": null}}',
    "facts as an object": b'{"__metadata__": {"holdfast": {"kind": "letter"}}}',
    "metadata as a list": b'{"__metadata__": ["holdfast"]}',
    "facts that are no JSON": b'{"__metadata__": {"holdfast": "letter"}}',
    "facts that are a list": b'{"__metadata__": {"holdfast": "[]"}}',
    "facts with half a character": b'{"__metadata__": {"holdfast": "\\ud800"}}',
    "a kind with half a character": b'{"__metadata__": {"holdfast": "{\\"kind\\": \\"\\ud800\\"}"}}',
    "other metadata": b'{"__metadata__": {"holdfast": "{\\"kind\\": \\"letter\\"}", "more": 5}}',
    "not UTF-8": b'{"__metadata__": {"holdfast": "\xff\xfe"}}',
    "UTF-16": '{"__metadata__": {"holdfast": "{\\"kind\\": \\"letter\\"}"}}'.encode("utf-16-le"),
    "5,000 digits": b'{"__metadata__": {"holdfast": "{\\"kind\\": ' + b"1" * 5000 + b'}"}}',
    "a tensor's name with half a character": json.dumps(
        {"__metadata__": {"holdfast": FACTS}, "\ud800": {**GOOD, "shape": [0], "data_offsets": [0, 0]}}
    ).encode(),
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_is_none_is_refused(header: str) -> None:
    refused(blob_of(HEADERS[header]))


@pytest.mark.parametrize("depth", [100_000, 3_000, *range(940, 1000, 2)])
def test_nested_brackets_are_refused_wherever_they_are(depth: int) -> None:
    """Also where they are just shallow enough to be read, but perhaps not to be shown."""
    for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        refused(blob_of(nested.encode()))
        refused(letter(f'{{"kind": {nested}}}', b""))
        facts = json.dumps({"holdfast": FACTS})
        for entry in (f'{{"dtype": {nested}}}', f'{{"dtype": "F32", "shape": {nested}}}', nested):
            refused(blob_of(f'{{"__metadata__": {facts}, "x": {entry}}}'.encode(), bytes(8)))
        try:
            values = unpack("letter", letter(f'{{"kind": "letter", "count": {nested}}}', b""))[1]
        except MalformedMessage:
            continue
        for read in ("integer", "number", "flag", "text", "texts", "integers", "numbers"):
            with pytest.raises(MalformedMessage):
                getattr(Facts("letter", values), read)("count")


def test_tensors_that_overlap_or_leave_holes_are_refused() -> None:
    refused(letter(x=GOOD, y=GOOD))
    refused(letter(data=bytes(16), x={**GOOD, "data_offsets": [8, 16]}))
    refused(letter(data=bytes(12), x=GOOD))
    refused(letter(data=b"", x={**GOOD, "shape": [0] + [2**31] * 7, "data_offsets": [0, 0]}))


def test_facts_have_types_and_bounds() -> None:
    values = {
        "whole": 3,
        "real": 0.5,
        "flag": True,
        "text": "a",
        "texts": ["a", "b"],
        "integers": [1, 2],
        "numbers": [1, 0.5],
        "table": {"a": 1},
    }
    facts = Facts("letter", values)
    assert (facts.integer("whole"), facts.integer("whole", 3, 3)) == (3, 3)
    assert (facts.number("whole"), facts.number("real")) == (3.0, 0.5)
    assert (facts.flag("flag"), facts.text("text"), facts.table("table")) == (True, "a", {"a": 1})
    assert (facts.texts("texts"), facts.integers("integers"), facts.numbers("numbers")) == (
        ("a", "b"),
        (1, 2),
        (1.0, 0.5),
    )
    good = {
        "integer": {"whole"},
        "number": {"whole", "real"},
        "flag": {"flag"},
        "text": {"text"},
        "texts": {"texts"},
        "integers": {"integers"},
        "numbers": {"integers", "numbers"},
        "table": {"table"},
    }
    for read, names in good.items():
        for name in {*values, "missing"} - names:
            with pytest.raises(MalformedMessage):
                getattr(facts, read)(name)
    for least, most in ((4, 9), (0, 2)):
        with pytest.raises(MalformedMessage):
            facts.integer("whole", least, most)
    with pytest.raises(MalformedMessage):
        facts.integers("integers", least=2)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400, "-" + "1" * 400])
@pytest.mark.parametrize("read", ["number", "numbers", "integer", "integers"])
def test_numbers_are_finite(value: str, read: str) -> None:
    text = f'{{"kind": "letter", "count": {f"[{value}]" if read.endswith("s") else value}}}'
    with pytest.raises(HoldfastError) as error:
        getattr(Facts("letter", unpack("letter", letter(text, b""))[1]), read)("count")
    assert type(error.value) is MalformedMessage


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused(noise: bytes, framed: bool) -> None:
    refused(blob_of(noise) if framed else noise)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(["__metadata__", "x", "y"]), JSON, max_size=3), st.binary(max_size=20))
def test_random_headers_are_refused(header: dict[str, Any], data: bytes) -> None:
    refused(blob_of(header, data))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), JSON), st.binary(max_size=20))
def test_random_tensors_are_read_or_refused(entry: dict[str, Any], data: bytes) -> None:
    blob = letter(data=data, x={**GOOD, **entry})
    try:
        tensors, _ = unpack("letter", blob)
    except MalformedMessage:
        return
    assert tensor_bytes(tensors) == len(data)
