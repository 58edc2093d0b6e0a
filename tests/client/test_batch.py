"""The batch size `auto`: chosen by each client from the number of its images."""

import math
from typing import Any

import pytest

from holdfast.config import CONFIGS, load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of, run_name
from holdfast.protocol.enrolment import AUTO, Enrolment, Preset, Training
from holdfast.protocol.messages import Inbox
from holdfast.simulation.rounds import run_rounds

SGD = Preset(0.1, 0.9, 0.0, "cosine")


@pytest.mark.parametrize(
    ("images", "batch"),
    # 300 images: 10 steps with 32, but 5 with 64.
    [
        (1, 8),
        (56, 8),
        (112, 8),
        (113, 16),
        (224, 16),
        (225, 32),
        (300, 32),
        (449, 64),
        (896, 64),
        (897, 128),
        (10**6, 128),
    ],
)
def test_the_rule(images: int, batch: int) -> None:
    auto, fixed = Training(2, AUTO, SGD), Training(2, 100, SGD)
    assert auto.for_images(images).batch == batch
    assert fixed.for_images(images) == fixed
    if images > 56:
        assert math.ceil(images / batch) >= 8
        assert batch == 128 or math.ceil(images / (2 * batch)) < 8  # and no larger one does


def test_every_client_takes_batches_of_its_own_size(small: dict[str, Any]) -> None:
    """Of all its images, exemplars included, in every round."""
    settings = {**small, "data": {**small["data"], "train_per_class": 60}, "train": {"epochs": 1}}
    config = load_config({**settings, "plan": {**small["plan"], "partition": "dirichlet:0.5", "class_share": 1.0}})
    assert config.train.batch == "auto"
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    assert federation.enrolment.training.batch == AUTO
    assert Enrolment.from_bytes(federation.enrolment.to_bytes()).training == federation.enrolment.training
    seen: dict[int, set[int]] = {}

    class Looking(Serial):
        def map(self, work: Any, states: Any, inboxes: Any) -> Any:
            inboxes = list(inboxes)
            for state, inbox in zip(states, inboxes, strict=True):
                assert isinstance(inbox, Inbox)
                context = work.context(state, inbox)
                ids = context.everything
                sizes = [len(batch.ids) for batch in context.stage(ids).batches(0)]
                if sizes:
                    assert sizes[0] == min(len(ids), Training(1, AUTO, SGD).for_images(len(ids)).batch)
                    seen.setdefault(sizes[0], set()).add(state.client)
            return super().map(work, states, inboxes)

    for _ in run_rounds(federation, Looking()):
        pass
    assert len(seen) > 1


def test_fixed_protocols_say_their_batch_and_old_runs_keep_their_names() -> None:
    for file in CONFIGS.glob("*.toml"):
        assert load_config(file).train.batch == (16 if file.stem == "demo" else 128)
    assert load_config({"train": {"batch": 64}}).train.batch == 64
    # The name that this run had when 128 was the default.
    assert run_name(load_config({"train": {"batch": 128}})) == "glyphs-fedavg-seed2021-b43cdcde"
    with pytest.raises(HoldfastError, match=r"^train.batch = 0 is not possible"):
        load_config({"train": {"batch": 0}})
