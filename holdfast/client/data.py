"""The images of one client, by ids of its own: those on its disk, and copies that its memory keeps."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.data.images import ImageSet
from holdfast.protocol.codec import Facts, MalformedMessage, pack, unpack
from holdfast.protocol.state import Holdings


class ClientImages:
    """An `ImageSource`. Ids from 0 on are images of the client's data, wherever they are; negative ids are copies that
    the client has made of its own images and keeps when these are gone."""

    def __init__(self, data: ImageSet, classes: Sequence[str]) -> None:
        self.data = data
        self.classes: list[str] = list(classes)
        self.copies = torch.empty((0, 3, data.images.size, data.images.size), dtype=torch.uint8)
        self.copied = torch.empty(0, dtype=torch.int64)  # the class of each copy

    def class_of(self, ids: Tensor) -> Tensor:
        return self._choose(ids, self.data.class_of, self.copied)

    def pixels(self, ids: Tensor) -> Tensor:
        return self._choose(ids, self.data.pixels, self.copies)

    def identity(self, ids: Tensor) -> Tensor:
        """The same ids, but for copies of images that are in the data now: these get the data's."""
        copies = ids < 0
        if not bool(copies.any()):
            return ids
        found: dict[tuple[int, bytes], int] = {}
        for c in set(self.copied[-1 - ids[copies]].tolist()):
            for row in self.data.by_class.get(c, []):
                found.setdefault((c, _digest(self.data.pixels(row))), int(row))
        out = ids.clone()
        for place in copies.nonzero()[:, 0].tolist():
            copy = -1 - int(ids[place])
            key = int(self.copied[copy]), _digest(self.copies[copy])
            out[place] = found.get(key, int(ids[place]))
        return out

    @staticmethod
    def _choose(ids: Tensor, data: Callable[[Tensor], Tensor], copies: Tensor) -> Tensor:
        is_copy = ids < 0
        if not bool(is_copy.any()):
            return data(ids)
        out = copies.new_empty((len(ids), *copies.shape[1:]))
        out[is_copy] = copies[-1 - ids[is_copy]]
        out[~is_copy] = data(ids[~is_copy])
        return out

    def replace_data(self, data: ImageSet, classes: Sequence[str]) -> None:
        """The client's data has moved on: ids from 0 on are these images now; copies stay."""
        names = list(dict.fromkeys([*classes, *(self.classes[c] for c in self.copied.tolist())]))
        self.copied = torch.tensor([names.index(self.classes[c]) for c in self.copied.tolist()], dtype=torch.int64)
        self.data, self.classes = data, names

    def copy(self, *held: Holdings) -> list[dict[str, Tensor]]:
        """Copies everything in `held` that is not a copy yet, forgets all other copies, and gives the new ids."""
        names = [name for holdings in held for name, ids in holdings.items() for _ in ids]
        every = torch.cat([*(ids.long() for one in held for ids in one.values()), self.copied[:0]])
        pixels = self.pixels(every)
        place: dict[tuple[str, bytes], int] = {}  # an image that is held twice is copied once
        firsts: list[int] = []  # where each copy is first
        fresh = []
        for i, name in enumerate(names):
            key = name, _digest(pixels[i])
            if key not in place:
                place[key] = -1 - len(firsts)
                firsts.append(i)
            fresh.append(place[key])
        self.copies = pixels[firsts].clone()
        index = {name: i for i, name in enumerate(self.classes)}
        self.copied = torch.tensor([index[names[i]] for i in firsts], dtype=torch.int64)
        numbers = iter(fresh)
        return [
            {name: torch.tensor([next(numbers) for _ in ids], dtype=torch.int64) for name, ids in holdings.items()}
            for holdings in held
        ]

    def to_bytes(self) -> bytes:
        """The copies; the data itself stays where it is."""
        return pack("copies", {"copies": self.copies, "copied": self.copied}, {"classes": self.classes})

    def take_copies(self, blob: bytes) -> None:
        """Takes in the copies that `to_bytes` wrote."""
        tensors, values = unpack("copies", blob)
        names = Facts("copies", values).texts("classes")
        copies, copied = tensors.get("copies"), tensors.get("copied")
        if (
            copies is None
            or copied is None
            or (copies.dtype, copied.dtype) != (torch.uint8, torch.int64)
            or copies.shape[1:] != self.copies.shape[1:]
            or copied.shape != copies.shape[:1]
        ):
            raise MalformedMessage("copies are not images of this client's size, each with a class")
        if any(not 0 <= c < len(names) for c in copied.tolist()):
            raise MalformedMessage("copies are of classes that are not named")
        used = [names[c] for c in copied.tolist()]
        self.classes = list(dict.fromkeys([*self.classes, *used]))
        self.copies = copies
        self.copied = torch.tensor([self.classes.index(name) for name in used], dtype=torch.int64)


def _digest(pixels: Tensor) -> bytes:
    return hashlib.sha256(pixels.numpy().tobytes()).digest()
