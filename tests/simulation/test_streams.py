"""The plan of a federated folder, with arrivals.toml and without; and laying such a data set out for processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from holdfast.config import load_config
from holdfast.data.images import DataSet, Images, ImageSet, Stream
from holdfast.data.sources import load_data
from holdfast.errors import HoldfastError
from holdfast.experiment import plan_of
from holdfast.simulation.plan import Plan
from holdfast.simulation.timeline import Arrival

COUNT = 5  # images of a client's class, of which one is drawn for testing
CLIENTS = {"a": "wxyz", "b": "xz", "c": "x", "d": "w"}  # the classes of each
W, X, Y, Z = range(4)
ARRIVALS = """
rounds = {rounds}
[[arrival]]
round = 1
client = "b"
classes = ["x"]
[[arrival]]
round = 1
client = "a"
classes = ["x", "w"]
[[arrival]]
round = 3      # nothing that is new to all
client = "c"
classes = ["x"]
[[arrival]]
round = 4
client = "b"
classes = ["z"]
[[arrival]]
round = 6
client = "a"
classes = ["z", "y"]
[[arrival]]
round = 8
client = "d"
classes = ["w"]
[[arrival]]
round = 9
client = "b"
leaves = ["x"]
"""


def write(top: Path, clients: Mapping[str, str] = CLIENTS, arrivals: str | None = None) -> Path:
    for client, classes in clients.items():
        for name in classes:
            place = top / "clients" / client / name
            place.mkdir(parents=True)
            for i in range(COUNT):
                shade = 16 * list(clients).index(client) + 2 * i + 1
                Image.new("RGB", (16, 16), (shade, ord(name), 0)).save(place / f"{i}.png")
    if arrivals is not None:
        (top / "arrivals.toml").write_text(arrivals)
    return top


def arrival(number: int, client: str, *classes: str, leaves: str = "") -> str:
    return f'[[arrival]]\nround = {number}\nclient = "{client}"\nclasses = {list(classes)}\nleaves = {list(leaves)}\n'


def planned(top: Path, seed: int = 0, data: Mapping[str, Any] | None = None, **plan: Any) -> tuple[Plan, DataSet]:
    settings = {"data": {"name": f"folder:{top}", "size": 16, **(data or {})}, "plan": {"rounds": 3, **plan}}
    config = load_config({**settings, "seed": seed})
    loaded = load_data(config.data)
    return plan_of(config, loaded), loaded


def held(plan: Plan) -> list[list[tuple[int, tuple[int, ...]]]]:
    """What comes to each client when."""
    return [[(arrival.round_index, arrival.classes) for arrival in mine] for mine in plan.arrivals]


def check_images(plan: Plan, data: DataSet) -> None:
    """Every arrival brings all of the client's own images of its classes, and nobody else's."""
    assert data.train.owners is not None
    for client, mine in enumerate(plan.arrivals):
        for one in mine:
            of_class = torch.isin(data.train.labels, torch.tensor(one.classes, dtype=torch.int64))
            rows = torch.nonzero(of_class & (data.train.owners == client))[:, 0].tolist()
            assert one.images == tuple(rows)
            assert bool(rows) == bool(one.classes)
            shades = data.train.images[torch.tensor(rows, dtype=torch.int64)][:, 0, 0, 0]
            assert {shade // 16 for shade in shades.tolist()} <= {client}


def test_without_arrivals_classes_come_as_the_settings_say(tmp_path: Path) -> None:
    plan, data = planned(write(tmp_path / "mine", {**CLIENTS, "e": "z"}), tasks=2, selected=2)
    assert data.clients == ("a", "b", "c", "d", "e")
    assert data.stream is None
    assert plan.tasks == ((W, X), (Y, Z))
    assert plan.starts == (0, 3)
    assert plan.rounds == 6
    assert plan.growths == ((0, (W, X)), (3, (Y, Z)))
    assert held(plan) == [
        [(0, (W, X)), (3, (Y, Z))],
        [(0, (X,)), (3, (Z,))],
        [(0, (X,)), (3, ())],
        [(0, (W,)), (3, ())],
        [(3, (Z,))],
    ]
    assert plan.groups == (("Zn", "Zn", "Zn", "Zn", ""), ("Zn", "Zn", "Zo", "Zo", "Za"))
    check_images(plan, data)
    assert [len(chosen) for chosen in plan.selected] == [2] * 6
    assert all(4 not in chosen for chosen in plan.selected[:3])


def test_without_arrivals_order_sizes_and_stayers_are_the_settings(tmp_path: Path) -> None:
    plan, data = planned(
        write(tmp_path / "mine"), tasks=[1, 3], order=["z", "y", "x", "w"], zo_data="last_task", rounds=2
    )
    assert plan.tasks == ((Z,), (Y, X, W))
    assert plan.starts == (0, 2)
    assert held(plan) == [[(0, (Z,)), (2, (Y, X, W))], [(0, (Z,)), (2, (X,))], [(2, (X,))], [(2, (W,))]]
    check_images(plan, data)
    stays, _ = planned(write(tmp_path / "stays", {"a": "wx", "b": "w"}), tasks=2, zo_data="last_task")
    assert held(stays) == [[(0, (W,)), (3, (X,))], [(0, (W,))]]
    assert stays.groups == (("Zn", "Zn"), ("Zn", "Zo"))


def test_a_task_begins_whenever_something_new_arrives(tmp_path: Path) -> None:
    plan, data = planned(write(tmp_path / "mine", arrivals=ARRIVALS.format(rounds=12)), tasks=7)
    assert plan.tasks == ((X, W), (Z,), (Y,))  # in the order in which they come, client by client
    assert plan.starts == (0, 3, 5)
    assert [plan.rounds_of(task) for task in range(3)] == [range(3), range(3, 5), range(5, 12)]
    assert [round_index for round_index in range(12) if plan.ends_task(round_index)] == [2, 4, 11]
    assert plan.growths == ((0, (X, W)), (3, (Z,)), (5, (Y,)))
    assert held(plan) == [
        [(0, (X, W)), (5, (X, W, Z, Y))],  # what a client has stays its data
        [(0, (X,)), (3, (X, Z)), (8, (Z,))],  # unless it leaves
        [(2, (X,))],
        [(7, (W,))],
    ]
    check_images(plan, data)


def test_groups_of_a_stream(tmp_path: Path) -> None:
    plan, _ = planned(write(tmp_path / "mine", arrivals=ARRIVALS.format(rounds=12)))
    assert plan.groups == (("Zn", "Zn", "Zn", ""), ("Zo", "Zn", "Zo", ""), ("Zn", "Zo", "Zo", "Za"))


def test_who_has_not_joined_is_not_selected_and_all_are_while_they_are_few(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", arrivals=ARRIVALS.format(rounds=20))
    plan, _ = planned(top, selected=3)
    assert [len(chosen) for chosen in plan.selected] == [2, 2] + [3] * 18
    assert plan.selected[0] == (0, 1)
    for round_index, chosen in enumerate(plan.selected):
        assert set(chosen) <= set(plan.present(round_index))
        assert list(chosen) == sorted(set(chosen))
    assert {client for chosen in plan.selected[7:] for client in chosen} == {0, 1, 2, 3}
    assert planned(top, selected=3)[0] == plan
    assert planned(top, selected=3, seed=1)[0].selected != plan.selected
    assert planned(top, selected=100)[0].selected[19] == (0, 1, 2, 3)


def test_the_stream_is_as_long_as_it_says_or_as_its_last_task_wants(tmp_path: Path) -> None:
    text = arrival(1, "a", "w", "x") + arrival(5, "a", "y", "z") + arrival(2, "b", "z", "x")
    top = write(tmp_path / "mine", {"a": "wxyz", "b": "xz"}, text)
    plan, _ = planned(top, rounds=4)
    assert plan.starts == (0, 1, 4)
    assert plan.rounds == 4 + 4
    assert plan.rounds_per_task == 4
    (top / "arrivals.toml").write_text("rounds = 5\n" + text)
    assert planned(top, rounds=4)[0].rounds == 5
    (top / "arrivals.toml").write_text(text + arrival(30, "b", "x"))  # long after the last task began
    assert planned(top, rounds=4)[0].rounds == 30


def test_the_same_data_may_come_back(tmp_path: Path) -> None:
    text = arrival(1, "a", "w") + arrival(2, "a", "x", leaves="w") + arrival(3, "a", "w", leaves="x")
    plan, data = planned(write(tmp_path / "mine", {"a": "wx"}, text))
    assert held(plan) == [[(0, (W,)), (1, (X,)), (2, (W,))]]
    assert plan.arrivals[0][0].images == plan.arrivals[0][2].images
    assert plan.starts == (0, 1)
    check_images(plan, data)


def test_a_part_of_the_classes(tmp_path: Path) -> None:
    text = arrival(1, "a", "x", "w") + arrival(1, "b", "x") + arrival(4, "b", "z") + arrival(3, "c", "x")
    top = write(tmp_path / "mine", {key: CLIENTS[key] for key in "abc"}, text + arrival(6, "a", "z", "y"))
    plan, data = planned(top, data={"classes": 2, "first_class": 1})
    assert data.classes == ("x", "y")
    assert plan.tasks == ((0,), (1,))
    assert plan.starts == (0, 5)
    assert held(plan) == [[(0, (0,)), (5, (0, 1))], [(0, (0,))], [(2, (0,))]]
    check_images(plan, data)


def test_a_client_that_has_none_of_the_classes_is_named(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", arrivals=ARRIVALS.format(rounds=12))
    with pytest.raises(HoldfastError, match=r"^client 'd' has no images of the classes that are used; remove its"):
        planned(top, data={"first_class": 1})
    (top / "arrivals.toml").unlink()
    with pytest.raises(HoldfastError, match=r"^client 'd' has no images of the classes that are used; remove its"):
        planned(top, data={"first_class": 1}, tasks=3)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_part_of_the_images(tmp_path: Path, streamed: bool) -> None:
    """Of a class that two have, the first few images are taken from each."""
    text = arrival(1, "a", "x") + arrival(1, "b", "x", "y")
    top = write(tmp_path / "mine", {"a": "x", "b": "xy"}, text if streamed else None)
    plan, data = planned(top, data={"train_per_class": 4}, tasks=1)
    assert held(plan) == [[(0, (0,))], [(0, (0, 1))]]
    assert [len(mine[0].images or ()) for mine in plan.arrivals] == [4, 4 + 4]
    check_images(plan, data)
    fewer, data = planned(top, data={"train_per_class": 1}, tasks=1)
    assert [len(mine[0].images or ()) for mine in fewer.arrivals] == [1, 1 + 1]
    check_images(fewer, data)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_class_of_a_client_that_cannot_be_read_is_not_its_class(tmp_path: Path, streamed: bool) -> None:
    text = arrival(1, "a", "x") + arrival(1, "b", "x", "y")
    top = write(tmp_path / "mine", {"a": "x", "b": "xy"}, text if streamed else None)
    for file in (top / "clients" / "b" / "x").iterdir():
        file.write_bytes(b"not an image")
    plan, data = planned(top, data={"corrupt": "skip"}, tasks=1)
    assert held(plan) == [[(0, (0,))], [(0, (1,))]]
    check_images(plan, data)


def test_an_unreadable_image_is_nobodys(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", {"a": "x", "b": "xy"})
    (top / "clients" / "a" / "x" / "2.png").write_bytes(b"not an image")
    plan, data = planned(top, data={"corrupt": "skip"}, tasks=1)
    assert len(data.unreadable) == 1
    assert len(data.train) + len(data.test) == 3 * COUNT - 1
    check_images(plan, data)


def test_something_has_to_arrive_in_the_first_round(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", {"a": "x", "b": "x"}, arrival(3, "a", "x") + arrival(2, "b", "x"))
    with pytest.raises(HoldfastError, match=r"^nobody has data before round 2; let something arrive in round 1$"):
        planned(top)


def test_an_arrival_brings_what_was_not_there_and_may_take_away(tmp_path: Path) -> None:
    """Only what is new counts as brought; everything can leave; a class that is there already changes nothing."""
    text = arrival(1, "a", "w", "x") + arrival(2, "a", "x", "y") + arrival(3, "a", leaves="w") + arrival(4, "a", "x")
    text += arrival(5, "a", "w", leaves="xy") + arrival(6, "a", leaves="w") + arrival(7, "a", "z")
    plan, data = planned(write(tmp_path / "mine", {"a": "wxyz"}, text))
    now = [(one.round_index, one.classes, one.brought) for one in plan.arrivals[0]]
    assert now == [
        (0, (W, X), (W, X)),
        (1, (W, X, Y), (Y,)),
        (2, (X, Y), ()),
        (4, (W,), (W,)),
        (5, (), ()),
        (6, (Z,), (Z,)),
    ]
    assert plan.timeline.brings.tolist() == [True, True, False, True, False, True]
    assert plan.tasks == ((W, X), (Y,), (Z,))
    assert plan.held(0, 4) == {W, X, Y}
    assert "new" not in plan.to_json(data.classes)["arrivals"][0][0]
    assert plan.to_json(data.classes)["arrivals"][0][1]["new"] == [Y]
    check_images(plan, data)


def test_a_client_without_a_class_is_named(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", {"a": "xy"})
    (top / "clients" / "empty").mkdir()
    with pytest.raises(HoldfastError, match=r"^client 'empty' has no images of the classes that are used; remove its"):
        planned(top, tasks=1)


def same(mapped: DataSet, data: DataSet) -> None:
    for key in ("name", "classes", "mean", "std", "flip", "clients", "stream"):
        assert getattr(mapped, key) == getattr(data, key)
    for one, other in ((mapped.train, data.train), (mapped.test, data.test)):
        assert torch.equal(one.images[:], other.images[:])
        assert torch.equal(one.labels, other.labels)
    if data.train.owners is None:
        assert mapped.train.owners is None
    else:
        assert mapped.train.owners is not None
        assert torch.equal(mapped.train.owners, data.train.owners)


def test_a_federated_folder_is_laid_out_without_a_copy_of_its_images(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", arrivals=ARRIVALS.format(rounds=12))
    plan, data = planned(top, data={"train_per_class": 11})
    assert data.stream is not None
    assert data.stream.rounds == 12
    out = tmp_path / "out"
    out.mkdir()
    data.lay_out(out)
    assert not list(out.glob("*_images.npy"))
    mapped = DataSet.mapped(out)
    same(mapped, data)
    assert mapped.train.images.file == data.train.images.file
    assert mapped.train.images.file is not None
    assert "holdfast" in mapped.train.images.file.parts  # in the cache
    config = load_config({"data": {"name": f"folder:{top}", "size": 16}, "plan": {"rounds": 3}, "seed": 0})
    assert plan_of(config, mapped) == plan


@pytest.mark.parametrize("owners", [None, torch.tensor([1, 0, 1, 1])])
def test_images_in_memory_are_laid_out_once(tmp_path: Path, owners: torch.Tensor | None) -> None:
    images = torch.arange(6 * 3 * 16 * 16).view(6, 3, 16, 16).to(torch.uint8)
    train = ImageSet(Images(images).take(torch.tensor([5, 0, 2, 2])), torch.tensor([0, 1, 1, 0]), owners)
    test = ImageSet(Images(images), torch.tensor([0, 1] * 3))
    stream = Stream(((0, 0, ("a", "b"), ()), (4, 1, (), ("a",))), None) if owners is not None else None
    data = DataSet("x", ("a", "b"), train, test, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), True, ("p", "q"), stream)
    data.lay_out(tmp_path)
    assert {file.name for file in tmp_path.glob("*_images.npy")} == {"train_images.npy", "test_images.npy"}
    same(DataSet.mapped(tmp_path), data)


def test_an_arrival_of_the_plan_is_a_plain_value(tmp_path: Path) -> None:
    plan, data = planned(write(tmp_path / "mine", {"a": "x", "b": "xy"}), tasks=1)
    assert plan.arrivals[0] == (Arrival(0, (0,), (0, 1, 2, 3)),)
    written = plan.to_json(data.classes)
    assert written["arrivals"][0] == [{"round": 1, "classes": [0], "images": [0, 1, 2, 3]}]
    assert written["starts"] == [1]
