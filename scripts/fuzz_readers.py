"""The readers of bytes from outside for scripts/fuzz.py, each with whole inputs and with mutations that fit them."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.io
import torch
from fuzz_mutations import Mutation, mutated, mutated_json, mutated_png, mutated_tar, mutated_tensors
from PIL import Image
from safetensors.torch import save

from holdfast.checkpoint import Checkpoints
from holdfast.client.client import Arrival, Client, encoder_of
from holdfast.client.data import ClientImages
from holdfast.compare import parse_specs
from holdfast.config import load_config, parse_setting, to_toml
from holdfast.data import cache, cifar100, folder, imagenet, mini_imagenet, tiny_imagenet
from holdfast.data.decode import decode_image
from holdfast.data.images import Images, ImageSet
from holdfast.data.sources import load_data
from holdfast.data.tree import Tree, open_tree
from holdfast.data.unpickled import read_pickle
from holdfast.deploy.envelope import Envelope
from holdfast.deploy.settings import read_federation
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of
from holdfast.methods import method_of
from holdfast.models.encoder import GradientEncoder
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.pretrained import start_from
from holdfast.models.stored import write_model
from holdfast.models.transform import Transform
from holdfast.predict import predict
from holdfast.protocol import messages
from holdfast.protocol.enrolment import Enrolment, Preset, Training
from holdfast.protocol.messages import decode
from holdfast.protocol.registry import Registry
from holdfast.protocol.state import ClientState
from holdfast.results import archive, checksums
from holdfast.results.details import read_view
from holdfast.results.export import write_csv, write_events
from holdfast.results.report import page
from holdfast.results.runs import packed, runs_in
from holdfast.results.tables import result_lines, result_table
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds

OLD = Path(__file__).parents[1] / "tests" / "results" / "old_run"
REGISTRY = Registry(("cat", "owl", "é"), (2, 1))
SPEC = ModelSpec("convnet", "batch", 16, 8)


@dataclass(frozen=True)
class Reader:
    """What takes bytes, whole examples of them, and mutations beside those of plain bytes."""

    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    mutations: Sequence[Mutation] = ()

    def input(self, chance: random.Random) -> bytes:
        seed = chance.choice(self.seeds)
        if self.mutations and chance.random() < 0.6:
            return chance.choice(self.mutations)(chance, seed)
        return mutated(chance, seed, self.seeds)


def model_of() -> IncrementalModel:
    model = IncrementalModel(SPEC, torch_generator(0))
    for classes in REGISTRY.growths:
        model.grow(classes, torch_generator(1))
    return model


def enrolment() -> Enrolment:
    preset = Preset(0.05, 0.9, 1e-4, "steps", (0.25, 0.5), 0.2)
    transform = Transform((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), flip=True)
    return Enrolment(4, {"name": "lga", "iterations": 3}, SPEC, transform, Training(2, 16, preset), 12, 5)


def state() -> ClientState:
    held = {"cat": torch.tensor([5, 3]), "é": torch.tensor([1])}
    return ClientState(
        3, (("owl", "cat"), ("é",)), held, {"owl": torch.tensor([4, 2])}, 1, 1, 0, {"note": torch.ones(3)}
    )


def all_messages() -> list[bytes]:
    weights, small = model_of().state_dict(), {"w": torch.ones(2, 3)}
    made = [
        enrolment(),
        messages.Encoder(GradientEncoder(16, 3, torch_generator(0)).state_dict()),
        messages.Broadcast(1, REGISTRY, weights),
        messages.TransitionNotice(2),
        messages.Job(1, 0.5, 0.1, REGISTRY, weights),
        messages.TaskEnded(1, REGISTRY, small),
        messages.RoundClosed(1),
        messages.Announcement(1, ("cat", "dog")),
        messages.Reply(small, 12, {"loss": 0.5}, messages.Extras("class sums", {"sums": torch.ones(3, 2)})),
        messages.Teachers({0: small, 1: small}),
        messages.PrototypeShare({"linear.bias": torch.ones(3)}, 9, torch.ones(8)),
        messages.GlobalModel(1, (2, 1), small),
        messages.InferenceRequest("scores", (2, 1), small, ("round", 3)),
    ]
    return [message.to_bytes() for message in made]


def read_message(blob: bytes) -> None:
    message = decode(blob)
    if isinstance(message, Enrolment):
        method_of(message.method)
    elif isinstance(message, messages.Encoder):
        encoder_of(message, 16)


def client_images() -> ClientImages:
    pixels = torch.zeros(4, 3, 16, 16, dtype=torch.uint8)
    return ClientImages(ImageSet(Images(pixels), torch.tensor([0, 0, 1, 1])), ["cat", "owl"])


class Files:
    """A folder with whole files, one of which is replaced by an input before each reading."""

    def __init__(self, top: Path, whole: Path, names: Sequence[str], read: Callable[[Path], object]) -> None:
        self.whole, self.place, self.names, self.reader = whole, top / f"{whole.name}-harmed", names, read

    def seeds(self) -> list[bytes]:
        return [i.to_bytes() + (self.whole / name).read_bytes() for i, name in enumerate(self.names)]

    def read(self, blob: bytes) -> None:
        name = self.names[blob[0] % len(self.names)] if blob else self.names[0]
        shutil.copytree(self.whole, self.place)
        try:
            (self.place / name).write_bytes(blob[1:])
            self.reader(self.place)
        finally:
            shutil.rmtree(self.place)


def after_first(mutation: Mutation) -> Mutation:
    """The mutation of all but the first byte, which says which file it is."""

    def changed(chance: random.Random, blob: bytes) -> bytes:
        try:
            return blob[:1] + mutation(chance, blob[1:])
        except (ValueError, KeyError):  # a file of another kind
            return blob[:1] + mutated(chance, blob[1:], [blob])

    return changed


def record_lines(chance: random.Random, blob: bytes) -> bytes:
    lines = blob.splitlines()
    place = chance.randrange(len(lines))
    lines[place] = mutated_json(chance, lines[place])
    return b"\n".join(lines) + b"\n"


def client_folder(top: Path) -> Files:
    whole = top / "client"
    client = Client(client_images(), keep_pixels=True)
    client.receive(enrolment())
    client.receive(messages.Encoder(GradientEncoder(16, 3, torch_generator(0)).state_dict()))
    client.receive(Arrival({"cat": torch.tensor([0, 1])}))
    client.receive(messages.TaskEnded(1, REGISTRY, model_of().state_dict()))
    client.save(whole)
    names = sorted(file.name for file in whole.iterdir())
    return Files(top, whole, names, lambda place: Client.load(place, client_images()))


def model_folder(top: Path) -> Files:
    whole = top / "model"
    whole.mkdir()
    facts = {"method": {"name": "fedavg"}, "backbone": "convnet", "norm": "batch", "image_size": 16, "width": 8}
    facts |= {"classes": REGISTRY.names, "growths": REGISTRY.growths, "mean": [0.5] * 3, "std": [0.5] * 3}
    write_model(whole / checksums.MODEL, model_of().state_dict(), facts)
    Image.new("RGB", (16, 16)).save(whole / "x.png")
    return Files(top, whole, [checksums.MODEL], lambda place: predict(place, [place / "x.png"]))


def show(run: Path, top: Path) -> None:
    """Everything that the commands make of a run."""
    view = read_view(run)
    page([view])
    result_table(view.result)
    result_lines(view.result, view.clients.names if view.clients else ())
    write_csv(run, top / "out.csv")
    write_events(run, top / "events")


def run_folder(top: Path) -> Files:
    whole = top / "run"
    shutil.copytree(OLD, whole)
    return Files(top, whole, ["result.json", "record.jsonl", "plan.json", "config.toml"], lambda run: show(run, top))


def summed_folder(top: Path) -> Files:
    whole = top / "summed"
    shutil.copytree(OLD, whole)
    checksums.write_sums(whole, (whole / "result.json").read_bytes())
    return Files(top, whole, [checksums.NAME, "result.json"], read_view)


def archive_file(top: Path) -> Reader:
    line = json.dumps(packed(OLD, "a/b")).encode() + b"\n"
    file = top / "a.jsonl.gz"
    seeds = [gzip.compress(line), gzip.compress(line + json.dumps({**json.loads(line), "name": "c"}).encode())]

    def read(blob: bytes) -> None:
        archive._read_lines.cache_clear()
        file.write_bytes(blob)
        for run in runs_in([file]):
            show(run, top)

    def inside(chance: random.Random, blob: bytes) -> bytes:
        return gzip.compress(record_lines(chance, gzip.decompress(blob)), 1)

    def text(chance: random.Random, blob: bytes) -> bytes:
        return gzip.compress(mutated(chance, gzip.decompress(blob), [blob]), 1)

    return Reader(read, seeds, [inside, inside, text])


def checkpoint_folder(top: Path) -> Files:
    small = {"data": {"classes": 4, "train_per_class": 4, "test_per_class": 2, "size": 16}, "model": {"width": 8}}
    plan = {"tasks": 2, "clients": 2, "join_per_task": 0, "selected": 2, "rounds": 1, "memory": 4, "class_share": 1.0}
    small["plan"] = {**plan, "move_on": 1.0}
    config = load_config({**small, "train": {"epochs": 1}, "method": {"name": "fedavg", "replay": True}})
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    whole = top / "checkpointed"
    whole.mkdir()
    checkpoints = Checkpoints(whole, {})
    for number, done in enumerate(run_rounds(federation, Serial()), 1):
        checkpoints.save(number, federation, done.counts)
    names = sorted(f"checkpoint/{file.name}" for file in checkpoints.folder.iterdir())

    def read(place: Path) -> None:
        Checkpoints(place, {}).restore(build_federation(config, data, federation.plan))

    return Files(top, whole, names, read)


def pictures() -> list[bytes]:
    pixels = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (9, 11, 3), np.uint8)
    image, made = Image.fromarray(pixels), []
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE)
    for kind in ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "JPEG2000"):
        made.append(saved(image, kind))
    made += [saved(palette, "PNG", transparency=3), saved(palette, "GIF", transparency=3)]
    made += [saved(image.convert(mode), "PNG") for mode in ("L", "LA", "RGBA", "1")]
    made += [saved(image, "TIFF", compression=way) for way in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")]
    return made


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def only_png(chance: random.Random, blob: bytes) -> bytes:
    return mutated_png(chance, blob) if blob.startswith(b"\x89PNG") else mutated(chance, blob, [blob])


def image_zip(top: Path) -> Reader:
    png = saved(Image.new("RGB", (8, 8)), "PNG")
    file = top / "mine.zip"
    arrivals = b'[[arrival]]\nround = 1\nclient = "a"\nclasses = ["x", "y"]\n'
    own = {f"clients/a/{kind}/{i}.png": png for kind in "xy" for i in range(3)} | {"arrivals.toml": arrivals}
    tiny = {"wnids.txt": b"n1\n", "words.txt": b"n1\tone\n", "val/val_annotations.txt": b"v.JPEG\tn1\n"}
    tiny |= {"train/n1/images/n1_0.JPEG": png, "val/images/v.JPEG": png}

    def read(blob: bytes) -> None:
        file.write_bytes(blob)
        try:
            with suppress(HoldfastError):
                tiny_imagenet.load(file, 16, top / "cache")
                return
            folder.load(file, 16, top / "cache", 0.2, 0)
        finally:
            shutil.rmtree(top / "cache", ignore_errors=True)

    def inside(chance: random.Random, blob: bytes) -> bytes:
        content = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(blob)) as given, zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as made:
            chosen = chance.choice(given.namelist())
            for name in given.namelist():
                part = given.read(name)
                if name == chosen and chance.random() < 0.5:
                    name = mutated(chance, name.encode(), [b"../"]).decode("utf-8", "replace")[:60_000]
                elif name == chosen:
                    part = mutated(chance, part, [part])
                made.writestr(zipfile.ZipInfo(name), part)
        return content.getvalue()

    return Reader(read, [zip_of(own), zip_of(tiny)], [inside])


def zip_of(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as made:
        for name, part in files.items():
            made.writestr(zipfile.ZipInfo(name), part)
    return content.getvalue()


def zip_directory(top: Path) -> Reader:
    """The same without decoding, many times as often."""
    file = top / "listed.zip"
    seeds = [
        zip_of({"train/a/1.png": b"", "train/b/1.png": b"x" * 50, "wnids.txt": b"n1"}),
        zip_of({"a/b/c.txt": b"c"}),
    ]

    def read(blob: bytes) -> None:
        file.write_bytes(blob)
        with open_tree(file) as tree:
            for name in tree.names:
                tree.read(name)

    return Reader(read, seeds)


def lists(top: Path) -> Reader:
    """The text files of data sets, in a folder that has everything else."""
    names = ["arrivals.toml", "train.csv", "wnids.txt", "words.txt", "val/val_annotations.txt", "val_map.txt"]
    texts = [
        b"rounds = 3\n"
        + b"".join(b'[[arrival]]\nround = 1\nclient = "a"\nclasses = ["%c"]\n' % kind for kind in b"xy"),
        b"filename,label\na.jpg,x\nb.jpg,y\n",
        b"n01\nn02\n",
        b"n01\tone, two\nn02\tone\n",
        b"v1.JPEG\tn01\t0\t0\t1\t1\nv2.JPEG\tn02\n",
        b"v1.JPEG n00000001\nv2.JPEG n00000002\n",
    ]

    def tree(name: str, text: bytes, *files: str) -> Tree:
        others = {"wnids.txt": texts[2], "val/val_annotations.txt": texts[4]}
        where = Path("somewhere")
        there = tuple(sorted({name, *files}))
        return Tree(where, {}, there, frozenset(), lambda one: text if one == name else others[one], where, "")

    def read(blob: bytes) -> None:
        if not blob:
            return
        place, text = blob[0] % len(names), blob[1:]
        name = names[place]
        if place == 0:
            folder._stream(tree(name, text), {"a": {"x": [], "y": []}})
        elif place == 1:
            mini_imagenet._classes(tree(name, text, "images/a.jpg", "images/b.jpg"))
        elif place <= 4:
            given = tree(name, text, "wnids.txt", "val/val_annotations.txt", "val/images/v1.JPEG", "val/images/v2.JPEG")
            wnids = tiny_imagenet.read_wnids(given)
            tiny_imagenet.validation_split(given, wnids)
            if place == 3:
                tiny_imagenet.class_names(wnids, given.text(name))
        else:
            imagenet._mapped(tree(name, text), ["val/v1.JPEG", "val/v2.JPEG"])

    return Reader(read, [i.to_bytes() + text for i, text in enumerate(texts)])


def matlab(top: Path) -> Reader:
    synsets = np.zeros((3, 1), [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)])
    for row in range(3):
        synsets[row, 0] = (float(row), f"n0000000{row}", "a word")
    seeds = []
    for pack in (False, True):
        file = io.BytesIO()
        scipy.io.savemat(file, {"synsets": synsets}, do_compression=pack)
        seeds.append(file.getvalue())

    def read(blob: bytes) -> None:
        where = Path("somewhere")
        imagenet._numbered(Tree(where, {}, ("meta.mat",), frozenset(), lambda _: blob, where, ""))

    return Reader(read, seeds)


def pickles() -> list[bytes]:
    table = {
        "data": np.zeros((2, 3072), np.uint8),
        "fine_labels": [0, 1],
        "filenames": [b"a.png"] * 2,
        "x": (1.5, None),
    }
    return [pickle.dumps({key.encode(): value for key, value in table.items()}, way) for way in (1, 2, 3, 4)]


def cifar(top: Path) -> Reader:
    """Both forms of CIFAR-100, packed in several ways."""
    file = top / "cifar.tar.gz"
    images = {"train": 2, "test": 2}
    python = {"meta": pickle.dumps({b"fine_label_names": [b"a", b"b"]}, 2)}
    binary = {"fine_label_names.txt": b"a\nb\n"}
    for part, count in images.items():
        table = {b"data": np.zeros((count, 3072), np.uint8), b"fine_labels": list(range(count))}
        python[part] = pickle.dumps(table, 2)
        binary[f"{part}.bin"] = b"".join(bytes([0, i]) + bytes(3072) for i in range(count))

    def tar_of(files: dict[str, bytes]) -> bytes:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as made:
            for name, part in files.items():
                entry = tarfile.TarInfo(f"cifar/{name}")
                entry.size = len(part)
                made.addfile(entry, io.BytesIO(part))
        return content.getvalue()

    def read(blob: bytes) -> None:
        file.write_bytes(blob)
        try:
            cifar100.load(file, 32, top / "cache")
        finally:
            shutil.rmtree(top / "cache", ignore_errors=True)

    def inside(chance: random.Random, blob: bytes) -> bytes:
        plain = gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob
        changed = mutated_tar(chance, plain) if chance.random() < 0.6 else mutated(chance, plain, [plain])
        return chance.choice([gzip.compress, bz2.compress, lzma.compress, bytes])(changed)

    seeds = [gzip.compress(tar_of(files)) for files in (python, binary)] + [tar_of(binary)]
    return Reader(read, seeds, [inside])


def cache_entry(top: Path) -> Files:
    key = {"name": "x", "seed": 1}
    cache.cached(top / "cached", key, lambda: {"images": np.zeros((2, 3, 4, 4), np.uint8), "labels": np.arange(2)})
    (whole,) = (place for place in (top / "cached").iterdir() if place.is_dir())
    names = sorted(file.name for file in whole.iterdir())
    return Files(top, whole, names, lambda place: cache._read(place, key))


FEDERATION = b"""
name = "example"
sites = ["north", "south"]
classes = 20
server.address = "127.0.0.1:9092"
proxy.address = "127.0.0.1:9093"
[rounds]
total = 3
deadline = 120.0
[experiment]
seed = 7
method = {name = "lga", capacity = 20}
"""


def envelope() -> bytes:
    return Envelope({"kind": "job", "round": 3, "names": ["a"]}, {"job": b"x" * 20, "model": b""}).to_bytes()


def mutated_head(chance: random.Random, blob: bytes) -> bytes:
    """An envelope with another head, whose length is right."""
    length = int.from_bytes(blob[4:8], "little")
    head = mutated_json(chance, blob[8 : 8 + length])
    return blob[:4] + len(head).to_bytes(4, "little") + head + blob[8 + length :]


def federation(top: Path) -> Reader:
    file = top / "federation.toml"

    def read(blob: bytes) -> None:
        file.write_bytes(blob)
        read_federation(file)

    return Reader(read, [FEDERATION])


def pretrained(top: Path) -> Reader:
    """Weights that a backbone starts from, as safetensors and as torch.save writes them."""
    file = top / "weights"
    weights = SPEC.build_backbone(torch_generator(0)).state_dict()
    saved = io.BytesIO()
    torch.save({"state_dict": weights}, saved)

    def read(blob: bytes) -> None:
        file.write_bytes(blob)
        start_from(SPEC.build_backbone(torch_generator(0)), file)

    def inside(chance: random.Random, blob: bytes) -> bytes:
        """What torch.save has written with another pickle, whose checksum is right."""
        if blob[:2] != b"PK":
            return mutated(chance, blob, [blob])
        content = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(blob)) as given, zipfile.ZipFile(content, "w") as made:
            for name in given.namelist():
                part = given.read(name)
                made.writestr(name, mutated(chance, part, [part]) if name.endswith("data.pkl") else part)
        return content.getvalue()

    return Reader(read, [save(weights), saved.getvalue()], [inside])


def settings(blob: bytes) -> None:
    text = blob.decode("utf-8", "replace")
    with suppress(HoldfastError):
        parse_specs(text)
        return
    load_config(None, [parse_setting(text)])


def readers(top: Path) -> dict[str, Reader]:
    """Every reader by its name; files are written below `top`."""
    files = {
        "client folder": (client_folder, [mutated_json, mutated_tensors]),
        "model": (model_folder, [mutated_tensors]),
        "run folder": (run_folder, [mutated_json, record_lines]),
        "checksums": (summed_folder, []),
        "checkpoint": (checkpoint_folder, [mutated_json, mutated_tensors]),
        "cache entry": (cache_entry, [mutated_json]),
    }
    found = {
        "message": Reader(read_message, all_messages(), [mutated_tensors]),
        "client state": Reader(ClientState.from_bytes, [state().to_bytes()], [mutated_tensors]),
        "image": Reader(lambda blob: decode_image(io.BytesIO(blob), 16, "x"), pictures(), [only_png]),
        "pickle": Reader(lambda blob: read_pickle(blob, "x"), pickles()),
        "archive": archive_file(top),
        "zip of images": image_zip(top),
        "zip": zip_directory(top),
        "lists": lists(top),
        "matlab": matlab(top),
        "envelope": Reader(Envelope.from_bytes, [envelope()], [mutated_head]),
        "federation": federation(top),
        "pretrained weights": pretrained(top),
        "cifar archive": cifar(top),
        "setting": Reader(settings, [b"train.lr=0.1", b"plan.tasks=[1,2]", b"lga[cbl=false],fedavg"]),
    }
    for name, (make, mutations) in files.items():
        given = make(top)
        found[name] = Reader(given.read, given.seeds(), [after_first(one) for one in mutations])
    text = to_toml(load_config(None)).encode()
    config = top / "config.toml"

    def read_config(blob: bytes) -> None:
        config.write_bytes(blob)
        load_config(config)

    found["config"] = Reader(read_config, [text, b"[method]\nname = 'lga'\n[for.lga.train]\nlr = 0.1\n"])
    return found
