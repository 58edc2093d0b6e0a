"""Replies that do not fit the server's own model are refused, each for its reason."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.methods import METHODS
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.protocol.checks import LARGEST
from holdfast.protocol.codec import tensor_bytes
from holdfast.protocol.messages import Extras, Failure, Reply
from holdfast.seeding import torch_generator
from holdfast.server.validation import EXTRA_BYTES, ReplyCheck, reply_check

SMALL: dict[str, dict[str, Any]] = {"dytox": {"width": 32, "heads": 4, "depth": 2}}
MOST = 1000


def built(name: str, **fields: Any) -> tuple[Any, IncrementalModel]:
    method = METHODS[name](**{**SMALL.get(name, {}), **fields})
    model = method.build_model(ModelSpec("convnet", "batch", 16), torch_generator(0))
    for growth, classes in enumerate((2, 3)):
        model.grow(classes, torch_generator(0, growth))
    return method, model


def check_of(name: str = "fedavg", phase: Any = "train", **fields: Any) -> tuple[ReplyCheck, IncrementalModel]:
    method, model = built(name, **fields)
    return reply_check(method, model, 4, phase, MOST), model


def good(model: IncrementalModel) -> Reply:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Reply(weights, 10, {"classification": 0.5}, round_index=4)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Reply], Reply]:
    return lambda reply: replace(reply, weights={**reply.weights, name: change(reply.weights[name])})


def with_last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


BIAS, COUNTER, VARIANCE = "blocks.1.bias", "backbone.norms.0.num_batches_tracked", "backbone.norms.0.running_var"
WRONG: dict[str, tuple[str, Callable[[Reply], Reply]]] = {
    "nan": ("not finite", changed(BIAS, with_last(float("nan")))),
    "infinity": ("not finite", changed(BIAS, with_last(float("inf")))),
    "minus infinity": ("not finite", changed(BIAS, with_last(-float("inf")))),
    "times 1e30": ("range", changed("blocks.0.weight", lambda tensor: tensor * 1e30)),
    "negative variance": ("range", changed(VARIANCE, with_last(-1e-3))),
    "counter goes back": ("range", changed(COUNTER, lambda tensor: tensor - 1)),
    "counter runs away": ("range", changed(COUNTER, lambda tensor: tensor + 2**40)),
    "shape": ("shape", changed(BIAS, lambda tensor: tensor[None])),
    "int64": ("type", changed(BIAS, lambda tensor: tensor.long())),
    "float64": ("type", changed(BIAS, lambda tensor: tensor.double())),
    "sparse": ("type", changed(BIAS, lambda tensor: tensor.to_sparse())),
    "unknown key": ("names", lambda reply: replace(reply, weights={**reply.weights, "more": torch.zeros(1)})),
    "missing key": ("names", lambda reply: replace(reply, weights={BIAS: reply.weights[BIAS]})),
    "no weights": ("names", lambda reply: replace(reply, weights={})),
    "a million million samples": ("samples", lambda reply: replace(reply, samples=10**12)),
    "no samples": ("samples", lambda reply: replace(reply, samples=0)),
    "negative samples": ("samples", lambda reply: replace(reply, samples=-5)),
    "half a sample": ("samples", lambda reply: replace(reply, samples=2.5)),  # type: ignore[arg-type]
    "nan loss": ("losses", lambda reply: replace(reply, losses={"a": float("nan")})),
    "many losses": ("losses", lambda reply: replace(reply, losses={str(i): 0.0 for i in range(1000)})),
    "of the round before": ("late", lambda reply: replace(reply, round_index=3)),
    "of another phase": ("late", lambda reply: replace(reply, phase="finish")),
    "extras": ("names", lambda reply: replace(reply, extras=Extras("bias", {"scale": torch.ones(())}))),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_kind_of_bad_model_is_refused_for_its_reason(name: str) -> None:
    check, model = check_of()
    kind, spoil = WRONG[name]
    assert check(good(model)) is None
    problem = check(spoil(good(model)))
    assert problem is not None
    assert problem.kind == kind
    assert problem.reason


def test_values_up_to_the_limit_and_clients_without_data_are_fine() -> None:
    check, model = check_of()
    assert check(changed(BIAS, with_last(LARGEST))(good(model))) is None
    assert check(changed(BIAS, with_last(2 * LARGEST))(good(model))) is not None
    assert check(changed(COUNTER, lambda tensor: tensor + 7)(good(model))) is None
    assert check(Reply(round_index=4)) is None


def test_a_failure_is_refused_with_its_own_words() -> None:
    check, _ = check_of()
    problem = check(Failure("crash", "ZeroDivisionError", 4))
    assert problem == ("crash", "ZeroDivisionError")


def test_what_clients_do_not_send_is_no_part_of_the_form() -> None:
    """The old blocks of DyTox are fixed: a client that sends one is refused."""
    method, model = built("dytox")
    check, fixed = reply_check(method, model, 4, "train", MOST), method.fixed(model)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in fixed}
    assert fixed
    assert check(Reply(weights, 5, round_index=4)) is None
    everything = check(good(model))
    assert everything is not None
    assert everything.kind == "names"


def extras_of(name: str, model: Any) -> dict[str, torch.Tensor]:
    """What honest clients of each method send after a task."""
    classes, features = sum(model.growths), model.features
    sums = {"sums": torch.ones(classes, features), "counts": torch.full((classes,), 3)}
    images = {"images": torch.tensor(4)}
    match name:
        case "icarl":
            return sums
        case "bic":
            return {"scale": torch.tensor(0.5), "shift": torch.tensor(-1.0), **images}
        case "dde":
            return {"direction": torch.ones(features), "steps": torch.tensor(2)}
        case "podnet":
            tuned = {f"blocks.{i}.weight": block.weight.detach() for i, block in enumerate(model.blocks)}
            return {**sums, **tuned, **images}
        case "afc":
            return {f"importance{i}": torch.ones(channels) for i, channels in enumerate(model.channels)}
        case _:
            apart = ("backbone.", "divergence.")
            return {n: p.detach() for n, p in model.named_parameters() if not n.startswith(apart)} | images


COLLECTING: dict[str, dict[str, Any]] = {
    "icarl": {"inference": "nme"},
    "bic": {},
    "dde": {},
    "podnet": {"inference": "nme"},
    "afc": {"inference": "head"},
    "dytox": {},
}


@pytest.mark.parametrize("name", COLLECTING)
def test_extras_are_checked_against_what_the_method_expects(name: str) -> None:
    check, model = check_of(name, "finish", **COLLECTING[name])
    tensors = extras_of(name, model)
    first = next(iter(tensors))

    def kind_of(tensors: dict[str, torch.Tensor], samples: int = 5) -> str | None:
        problem = check(Reply({}, samples, {}, Extras(name, tensors), 4, "finish"))
        return problem.kind if problem else None

    assert kind_of(tensors) is None
    assert kind_of(tensors, 10**12) == "samples"
    assert kind_of({**tensors, first: torch.full_like(tensors[first], float("nan"))}) == "not finite"
    assert kind_of({**tensors, first: tensors[first] * 1e30}) == "range"
    assert kind_of({**tensors, first: tensors[first][None]}) == "shape"
    assert kind_of({**tensors, first: tensors[first].long()}) == "type"
    assert kind_of({**tensors, "more": torch.ones(1)}) == "names"
    assert kind_of({}) == "names"
    counts = [key for key, tensor in tensors.items() if not tensor.is_floating_point()]
    for key in counts:
        assert kind_of({**tensors, key: torch.full_like(tensors[key], -1)}) == "range"
        assert kind_of({**tensors, key: torch.full_like(tensors[key], 10**12)}) == "range"


def test_optional_extras_come_all_or_not_at_all() -> None:
    check, model = check_of("podnet", "finish")
    tensors = extras_of("podnet", model)
    bare = {"images": tensors["images"]}
    both = {name: tensor for name, tensor in tensors.items() if name.startswith("blocks.")}
    for some, fits in (
        (bare, True),
        ({**bare, **both}, True),
        ({**bare, "blocks.0.weight": both["blocks.0.weight"]}, False),
    ):
        assert (check(Reply({}, 5, {}, Extras("classifier", some), 4, "finish")) is None) == fits


def test_extras_of_an_unknown_form_are_bounded_and_finite() -> None:
    method, model = built("bic")
    check = replace(reply_check(method, model, 4, "finish", MOST), extras=None)

    def kind_of(tensor: torch.Tensor) -> str | None:
        problem = check(Reply({}, 5, {}, Extras("own", {"x": tensor}), 4, "finish"))
        return problem.kind if problem else None

    assert kind_of(torch.ones(3)) is None
    assert kind_of(torch.tensor([1.0, float("nan")])) == "not finite"
    assert kind_of(torch.tensor(10**12)) == "range"
    assert kind_of(torch.tensor(-1)) == "range"
    most = 4 * tensor_bytes(model.state_dict()) + EXTRA_BYTES
    assert kind_of(torch.zeros(most // 4 + 1)) == "size"
    assert check(Reply(good(model).weights, 5, {}, None, 4, "finish")) is not None
