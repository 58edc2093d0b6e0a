"""What travels between server and site, or to and from the proxy: plain facts, and protocol messages as bytes. Sizes
are checked before anything is read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.files import parse_json
from holdfast.protocol.codec import MAX_BYTES, Facts, MalformedMessage

MAGIC = b"HFE1"
MAX_HEAD = 1 << 22
MAX_PARTS = 100_000


@dataclass(frozen=True)
class Envelope:
    """Facts, and named parts."""

    facts: Mapping[str, Any]
    parts: Mapping[str, bytes] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        head = json.dumps({"facts": dict(self.facts), "parts": [[k, len(v)] for k, v in self.parts.items()]}).encode()
        return b"".join([MAGIC, len(head).to_bytes(4, "little"), head, *self.parts.values()])

    @staticmethod
    def from_bytes(blob: bytes) -> "Envelope":
        if len(blob) > MAX_BYTES or blob[:4] != MAGIC:
            raise MalformedMessage("these bytes are no envelope of this version")
        length = int.from_bytes(blob[4:8], "little")
        if length > MAX_HEAD or len(blob) < 8 + length:
            raise MalformedMessage("an envelope is cut short, or its head is too long")
        try:
            head = parse_json(blob[8 : 8 + length])
            facts, sizes = head["facts"], head["parts"]
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedMessage("an envelope has a head that cannot be read") from error
        if not isinstance(facts, dict) or not isinstance(sizes, list) or len(sizes) > MAX_PARTS:
            raise MalformedMessage("an envelope has a head that cannot be read")
        place, parts = 8 + length, {}
        for one in sizes:
            if not isinstance(one, list) or len(one) != 2 or not isinstance(one[0], str):
                raise MalformedMessage("an envelope names its parts wrongly")
            name, size = one
            if type(size) is not int or not 0 <= size <= len(blob) - place or name in parts:
                raise MalformedMessage("an envelope names its parts wrongly")
            parts[name] = blob[place : place + size]
            place += size
        if place != len(blob):
            raise MalformedMessage("an envelope has bytes that belong to no part")
        return Envelope(facts, parts)

    @property
    def checked(self) -> Facts:
        return Facts("envelope", self.facts)
