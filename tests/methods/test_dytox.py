"""DyTox: three losses, what is frozen, and the balanced fine-tuning."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clients import client_of, federation_of, grown_federation
from torch import Tensor

from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.methods.dytox import DyTox
from holdfast.models.convit import TokenModel
from holdfast.models.incremental import ModelSpec, grow_to
from holdfast.protocol.messages import Extras, Reply
from holdfast.seeding import torch_generator
from holdfast.server.server import Server
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds

SMALL: dict[str, Any] = {"width": 16, "heads": 4, "depth": 1}
METHOD = DyTox(**SMALL)
SPEC = ModelSpec("convnet", "batch", 16)
IMAGES = torch.randn(6, 3, 16, 16, generator=torch_generator(1))
LABELS = torch.tensor([0, 4, 1, 3, 2, 4])


def quick_federation(settings: dict[str, Any], **method: Any) -> Federation:
    return federation_of("dytox", settings, **{**SMALL, "tune_epochs": 1, **method})


def net(growths: tuple[int, ...], seed: int = 0, method: DyTox = METHOD) -> TokenModel:
    model = method.build_model(SPEC, torch_generator(seed))
    assert isinstance(model, TokenModel)
    grow_to(model, growths, torch_generator(seed, "growths"))
    return model


def terms(
    method: DyTox, model: TokenModel, teacher: TokenModel | None, images: Tensor = IMAGES, labels: Tensor = LABELS
) -> dict[str, Tensor]:
    context: Any = SimpleNamespace(model=model, predecessor=teacher)
    batch: Any = SimpleNamespace(images=images, labels=labels)
    return method.loss(context, batch)


def bce(logits: Tensor, label: int) -> float:
    """The sum over outputs of -ln of what each says of its own truth."""
    return sum(math.log(1 + math.exp(-float(o) if c == label else float(o))) for c, o in enumerate(logits))


def test_zero_logits_cost_ln_2() -> None:
    model = net((5,))
    torch.nn.init.zeros_(model.blocks[0][1].weight)  # type: ignore[index]
    torch.nn.init.zeros_(model.blocks[0][1].bias)  # type: ignore[index]
    found = terms(METHOD, model, None)
    assert set(found) == {"classification"}
    assert float(found["classification"].detach()) == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_three_losses_by_loops(temperature: float) -> None:
    """(1 - l) BCE + l tau^2 KL / (B Co) + 0.1 BCE of the divergence head, l = Co / C = 3 / 5."""
    model, teacher = net((2, 1, 2), seed=2), net((2, 1), seed=3)
    found = terms(DyTox(**SMALL, temperature=temperature), model, teacher)
    output = model(IMAGES)
    old, logits = teacher(IMAGES).logits.detach(), output.logits.detach()
    apart = model.divergence(output.features[:, 32:]).detach()  # type: ignore[misc]
    assert apart.shape == (6, 3)
    first = kl = third = 0.0
    for i in range(6):
        first += bce(logits[i], int(LABELS[i])) / 30
        q, p = ([math.exp(float(o[i, c]) / temperature) for c in range(3)] for o in (old, logits))
        kl += sum(a / sum(q) * math.log(a / sum(q) / (b / sum(p))) for a, b in zip(q, p, strict=True)) / 18
        third += bce(apart[i], max(0, int(LABELS[i]) - 2)) / 18  # old classes are number 0
    assert kl > 1e-3
    assert set(found) == {"classification", "distillation", "divergence"}
    assert float(found["classification"].detach()) == pytest.approx(0.4 * first, rel=1e-4)
    assert float(found["distillation"].detach()) == pytest.approx(0.6 * temperature**2 * kl, rel=1e-3)
    assert float(found["divergence"].detach()) == pytest.approx(0.1 * third, rel=1e-4)


def test_a_student_that_is_its_teacher_loses_nothing_by_distillation() -> None:
    teacher = net((2, 1), seed=3)
    model = net((2, 1, 2), seed=2)
    model.load_state_dict({n: t for n, t in teacher.state_dict().items() if "divergence" not in n}, strict=False)
    assert float(terms(METHOD, model, teacher)["distillation"].detach()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "labels", [[0, 1, 2, 0], [3, 4, 3, 3], [1], [4]], ids=["stayer", "newcomer", "one old", "one new"]
)
def test_every_kind_of_client_has_a_loss(labels: list[int]) -> None:
    found = terms(METHOD, net((2, 1, 2), 2), net((2, 1), 3), IMAGES[: len(labels)], torch.tensor(labels))
    sum(found.values()).backward()  # type: ignore[union-attr]
    assert all(bool(value.isfinite()) for value in found.values())


@pytest.mark.parametrize("tasks", [1, 2, 3, 11, 12, 21])
def test_tokens_and_heads_of_all_old_tasks_are_fixed_and_nothing_else(tasks: int) -> None:
    model = net((1,) * tasks)
    expected = set()
    for i in range(tasks - 1):
        expected |= {f"tokens.{i}"} | {f"blocks.{i}.{layer}.{part}" for layer in (0, 1) for part in ("weight", "bias")}
    assert expected <= set(model.state_dict())
    assert METHOD.fixed(model) == expected


def context_of(model: TokenModel, rows: Tensor | None = None, batch: int = 64, lr: float = 1e-3) -> Any:
    """What `stages` and `finish_task` need of a ClientContext."""
    chosen = torch.arange(6) if rows is None else rows
    preset = replace(METHOD.preset, lr=lr)

    def batches(some: Tensor, epoch: int) -> Any:
        yield from (SimpleNamespace(images=IMAGES[part], labels=LABELS[part], ids=part) for part in some.split(batch))

    return SimpleNamespace(
        model=model,
        everything=chosen,
        exemplars=chosen,
        has_old_and_new=len(chosen) > 0 and len(model.growths) > 1,
        batches=batches,
        stage=lambda some: SimpleNamespace(epochs=1, batches=lambda epoch: batches(some, epoch), rate=lambda epoch: lr),
        registry=SimpleNamespace(growths=tuple(model.growths)),
        training=SimpleNamespace(batch=batch, optimiser=preset),
    )


def test_old_tokens_and_heads_have_no_gradient_in_training() -> None:
    model = net((2, 1, 2), seed=2)
    (stage,) = METHOD.stages(context_of(model))
    assert isinstance(stage.optimiser, torch.optim.AdamW)
    sum(terms(METHOD, model, net((2, 1), 3)).values()).backward()  # type: ignore[union-attr]
    for i in (0, 1):
        assert model.tokens[i].grad is None
        assert all(parameter.grad is None for parameter in model.blocks[i].parameters())
    rest = [
        n for n, _ in model.named_parameters() if not n.startswith(("tokens.0", "tokens.1", "blocks.0", "blocks.1"))
    ]
    assert all(model.get_parameter(name).grad is not None for name in rest)
    optimised = {id(p) for group in stage.optimiser.param_groups for p in group["params"]}
    assert optimised == {id(model.get_parameter(name)) for name in rest}
    assert {group["weight_decay"] for group in stage.optimiser.param_groups} == {1e-6}


def test_the_official_rates_are_for_512_images() -> None:
    """5e-4 and 5e-5 times batch / 512, with the protocol's batch of 128; no momentum of SGD's; a cosine."""
    preset = DyTox().preset
    assert preset.lr == pytest.approx(1.25e-4)
    assert (preset.weight_decay, preset.schedule) == (1e-6, "cosine")
    assert DyTox().tune_rate == 5e-5
    assert (DyTox().width, DyTox().heads, DyTox().depth, DyTox().tune_epochs) == (384, 12, 5, 20)
    assert (DyTox().divergence, DyTox().temperature) == (0.1, 1.0)


def test_fine_tuning_moves_all_but_the_encoder_at_its_own_rate() -> None:
    """Adam's first step is as long as its rate, in every entry whose gradient is not tiny."""
    method = DyTox(**SMALL, tune_epochs=1, tune_rate=0.05)
    model = net((2, 1, 2), seed=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    extras = method.finish_task(context_of(model))
    assert extras is not None
    assert int(extras.tensors["images"]) == 6
    names = set(extras.tensors) - {"images"}
    assert names == {n for n in before if not n.startswith(("backbone.", "divergence."))}
    for name, value in before.items():
        if name not in names:
            assert torch.equal(model.get_parameter(name), value), name
    steps = {name: float((extras.tensors[name] - before[name]).abs().max()) for name in names}
    rate = 0.05 * 64 / 512
    for name in ("tokens.0", "tokens.1", "tokens.2", "blocks.0.1.weight", "blocks.2.1.weight", "decoder.mlp.0.weight"):
        assert steps[name] == pytest.approx(rate, rel=1e-2), name


def test_fine_tuning_needs_exemplars_and_a_second_task() -> None:
    method = DyTox(**SMALL, tune_epochs=1)
    assert method.finish_task(context_of(net((5,)))) is None
    assert method.finish_task(context_of(net((2, 3)), rows=torch.arange(0))) is None
    assert DyTox(**SMALL, tune_epochs=0).finish_task(context_of(net((2, 3)))) is None


def test_the_server_averages_what_was_tuned_by_exemplars() -> None:
    model = net((2, 1))
    others = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "tokens.0"}
    shape = model.tokens[0].shape
    extras = [
        Extras("tuned", {"tokens.0": torch.full(shape, value), "images": torch.tensor(images)})
        for value, images in ((1.0, 30), (5.0, 10))
    ]
    METHOD.merge(model, extras, seed=0, round_index=0)
    torch.testing.assert_close(model.tokens[0].detach(), torch.full(shape, 2.0))
    for name, tensor in others.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    METHOD.merge(model, [], seed=0, round_index=1)


def test_what_is_frozen_survives_a_round_to_the_bit_and_the_rest_moves(small: dict[str, Any]) -> None:
    """Thirds do not add up to one in floating point: averaging three equal tensors might change them."""
    federation = quick_federation({**small, "train": {"epochs": 1, "batch": 16, "lr": 1e-3}})
    rounds = run_rounds(federation, Serial())
    for _ in range(2):
        next(rounds)
    before = {name: tensor.clone() for name, tensor in federation.server.weights.items()}
    next(rounds)
    after = {name: tensor.clone() for name, tensor in federation.server.weights.items()}
    old = [name for name in before if name.startswith(("tokens.0", "blocks.0."))]
    assert len(old) == 5
    assert all(torch.equal(after[name], before[name]) for name in old)
    assert not torch.equal(after["backbone.patches.weight"], before["backbone.patches.weight"])
    line = next(rounds).line  # the task's last: fine-tuning, of old tokens too
    assert line["bytes"]["server"]["extras"] > 0
    assert not torch.equal(federation.server.weights["tokens.0"], before["tokens.0"])
    assert len(federation.server.model.tokens) == len(federation.server.registry.growths) == 2  # type: ignore[arg-type]


def test_the_newest_token_of_the_eleventh_task_is_learned() -> None:
    """Not only the first ten: names of tokens begin like one another."""
    model = net((1,) * 11)
    server = Server(model, seed=0)
    (stage,) = METHOD.stages(context_of(model))
    sum(terms(METHOD, model, net((1,) * 10, 3), labels=torch.tensor([0, 10, 1, 3, 2, 10])).values()).backward()  # type: ignore[union-attr]
    before = model.tokens[10].detach().clone()
    stage.optimiser.step()
    assert not torch.equal(model.tokens[10], before)
    sent = {n: t.clone() for n, t in model.state_dict().items() if n not in METHOD.fixed(model)}
    sent["tokens.10"] = torch.full_like(before, 7.0)
    server.aggregate([(0, Reply(sent, 6))])
    assert float(server.weights["tokens.10"].mean()) == 7


def test_heads_that_do_not_divide_the_width_are_refused(small: dict[str, Any]) -> None:
    with pytest.raises(HoldfastError, match="heads"):
        next(run_rounds(quick_federation(small, width=16, heads=5), Serial()))


def test_newcomers_stayers_and_clients_with_one_image_take_part(small: dict[str, Any]) -> None:
    """For the transformer on patches: tests/methods/test_contract.py."""
    plan = {**small["plan"], "partition": "dirichlet:0.3", "selected": 5, "move_on": 0.5, "zo_data": "memory"}
    settings = {**small, "plan": {**plan, "rounds": 1}, "train": {"epochs": 1, "batch": 3}}
    lines = [done.line for done in run_rounds(quick_federation(settings, encoder="network"), Serial())]
    assert {"classification", "distillation", "divergence"} == set(lines[-1]["losses"])


def test_a_warm_up_raises_the_rate(small: dict[str, Any]) -> None:
    """From 1e-6, linearly in the course of the task; the schedule's own rate afterwards."""
    context = client_of(grown_federation("dytox", small, (3, 3), **SMALL), (3,), {}, epochs=10)
    context.job = replace(context.job, progress=0.0, step=0.1)
    [plain], [warm] = (list(DyTox(**SMALL, warmup=w).stages(context)) for w in (0.0, 0.05))
    for epoch in range(10):
        progress, full = epoch / 100, plain.rate(epoch)
        expected = full if progress >= 0.05 else 1e-6 + (full - 1e-6) * progress / 0.05
        assert warm.rate(epoch) == pytest.approx(expected)
    assert warm.rate(0) == pytest.approx(1e-6)
    assert warm.rate(1) < plain.rate(1)


def test_on_a_networks_maps_it_is_called_what_it_is() -> None:
    assert DyTox(encoder="network", width=64, heads=4).title("convnet") == "dytox on convnet maps width=64 heads=4"
    assert DyTox(width=64, heads=4).title("convnet") == "dytox width=64 heads=4"
