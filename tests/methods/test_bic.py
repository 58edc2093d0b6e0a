"""BiC: facts of its two stages, of who is asked for a correction and of what it is used for."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import client_of, federation_of, grown_federation, model_of
from torch import Tensor

from holdfast.engines.serial import Serial
from holdfast.losses import distillation
from holdfast.methods.bic import BiC, fit_correction
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.protocol.messages import Extras
from holdfast.seeding import torch_generator
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds


def noted_model(growths: tuple[int, ...], scale: list[float], shift: list[float]) -> IncrementalModel:
    """A model whose growths have been corrected so."""
    model = model_of(BiC(), IncrementalModel, growths)
    for name, values in (("scale", scale), ("shift", shift)):
        model.note(name, torch.repeat_interleave(torch.tensor(values), torch.tensor(growths)))
    return model.eval().requires_grad_(False)


IMAGES = torch.randn(9, 3, 16, 16, generator=torch_generator(7))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 3])
LOGITS = 2 * torch.randn(9, 6, generator=torch_generator(8))


def terms(teacher: IncrementalModel | None, logits: Tensor, **method: Any) -> dict[str, Tensor]:
    context: Any = SimpleNamespace(model=lambda _: SimpleNamespace(logits=logits), predecessor=teacher)
    batch: Any = SimpleNamespace(images=IMAGES, labels=LABELS)
    return BiC(**method).loss(context, batch)


def test_the_first_task_is_plain_cross_entropy() -> None:
    found = terms(None, LOGITS)
    assert set(found) == {"classification"}
    torch.testing.assert_close(found["classification"], F.cross_entropy(LOGITS, LABELS))


@pytest.mark.parametrize(("growths", "share"), [((2,), 0.5), ((2, 2), 2 / 3), ((1,), 1 / 3)])
def test_the_terms_are_mixed_by_the_share_of_old_classes(growths: tuple[int, ...], share: float) -> None:
    """Equal tasks: one half in the second task, two thirds in the third."""
    old = sum(growths)
    logits = LOGITS[:, : {2: 4, 4: 6, 1: 3}[old]]
    labels = LABELS.clamp(max=logits.shape[1] - 1)
    teacher = noted_model(growths, [1.0] * len(growths), [0.0] * len(growths))
    context: Any = SimpleNamespace(model=lambda _: SimpleNamespace(logits=logits), predecessor=teacher)
    found = BiC().loss(context, SimpleNamespace(images=IMAGES, labels=labels))  # type: ignore[arg-type]
    torch.testing.assert_close(found["classification"], (1 - share) * F.cross_entropy(logits, labels))
    raw = teacher(IMAGES).logits
    torch.testing.assert_close(found["distillation"], share * distillation(logits, raw, 2.0))


def test_distillation_is_the_cross_entropy_at_temperature_two_less_the_teachers_entropy() -> None:
    student, teacher = LOGITS.double(), 2 * torch.randn(9, 4, generator=torch_generator(9), dtype=torch.float64)
    cross = own = 0.0
    for i in range(9):
        theirs = [math.exp(float(x) / 2) for x in teacher[i]]
        mine = [math.exp(float(x) / 2) for x in student[i, :4]]
        for j in range(4):
            q = theirs[j] / sum(theirs)
            cross -= q * math.log(mine[j] / sum(mine)) / 9
            own -= q * math.log(q) / 9
    assert float(distillation(student, teacher, 2.0)) == pytest.approx(cross - own)
    assert float(distillation(teacher, teacher, 2.0)) == pytest.approx(0, abs=1e-12)


def test_the_slope_of_the_distillation_has_no_factor_of_the_temperature_squared() -> None:
    student = LOGITS.double().requires_grad_()
    teacher = (2 * torch.randn(9, 4, generator=torch_generator(9), dtype=torch.float64)).requires_grad_()
    distillation(student, teacher, 2.0).backward()
    assert student.grad is not None
    assert teacher.grad is None
    difference = (student.detach()[:, :4] / 2).softmax(1) - (teacher.detach() / 2).softmax(1)
    torch.testing.assert_close(student.grad[:, :4], difference / 2 / 9)
    assert not student.grad[:, 4:].any()


def test_the_teachers_newest_task_is_corrected() -> None:
    corrected = noted_model((2, 2), [1.0, 0.5], [0.0, -0.7])
    by_hand = corrected(IMAGES).logits
    by_hand[:, 2:] = 0.5 * by_hand[:, 2:] - 0.7
    expected = 4 / 6 * distillation(LOGITS, by_hand, 2.0)
    torch.testing.assert_close(terms(corrected, LOGITS)["distillation"], expected)
    raw = terms(noted_model((2, 2), [1.0, 1.0], [0.0, 0.0]), LOGITS)["distillation"]
    assert float((raw - expected).abs()) > 1e-3


def test_scale_one_and_shift_zero_are_the_identity_and_every_growth_begins_so() -> None:
    method = BiC()
    model = method.build_model(ModelSpec("convnet", "batch", 16), torch_generator(4)).eval()
    for classes in (2, 3):
        model.grow(classes, torch_generator(5))
        assert torch.equal(method.predict(model, IMAGES), model(IMAGES).logits)


def test_the_newest_outputs_are_scaled_and_shifted() -> None:
    model = noted_model((2, 3), [1.0, 2.5], [0.0, -0.25])
    raw, found = model(IMAGES).logits, BiC().predict(model, IMAGES)
    torch.testing.assert_close(found[:, :2], raw[:, :2])
    torch.testing.assert_close(found[:, 2:], 2.5 * raw[:, 2:] - 0.25)


@pytest.mark.parametrize("keep_all", [False, True])
def test_only_the_newest_correction_is_used_unless_all_are_kept(keep_all: bool) -> None:
    """The authors' code returns to raw outputs for a task that is no longer the newest. That holds from the first round
    of the next on: its student is distilled from corrected outputs and needs no second correction."""
    model = noted_model((2, 2, 2), [1.0, 3.0, 1.0], [0.0, 1.0, 0.0])  # the third task has begun
    raw, found = model(IMAGES).logits, BiC(keep_all=keep_all).predict(model, IMAGES)
    torch.testing.assert_close(found[:, 2:4], 3 * raw[:, 2:4] + 1 if keep_all else raw[:, 2:4])


def calibrated() -> tuple[Tensor, Tensor]:
    """Outputs (N, 4) and labels in exactly the proportions that the outputs' softmax says."""
    counts = torch.tensor([[5, 1, 1, 1], [1, 6, 2, 3], [2, 1, 7, 2], [1, 1, 2, 8], [3, 2, 2, 1]])
    logits, labels = [], []
    for row in counts:
        logits += [row.double().log()] * int(row.sum())
        labels += torch.repeat_interleave(torch.arange(4), row).tolist()
    return torch.stack(logits), torch.tensor(labels)


def test_balanced_outputs_need_no_correction() -> None:
    scale, shift = fit_correction(*calibrated(), 2)
    assert (float(scale), float(shift)) == pytest.approx((1.0, 0.0), abs=1e-4)


@pytest.mark.parametrize("factor", [0.4, 2.0, 5.0])
def test_outputs_of_new_classes_that_were_blown_up_are_brought_back(factor: float) -> None:
    logits, labels = calibrated()
    logits[:, 2:] *= factor
    scale, shift = fit_correction(logits, labels, 2)
    assert (float(scale), float(shift)) == pytest.approx((1 / factor, 0.0), abs=1e-4)


@pytest.mark.parametrize("new", [1, 2, 3])
def test_the_fit_is_where_the_slopes_vanish_with_the_pull_of_the_shift(new: int) -> None:
    """d/d scale = mean sum_new (p - y) o = 0; d/d shift = mean sum_new (p - y) + 0.1 shift = 0."""
    logits, labels = calibrated()
    logits[:, 4 - new :] += 2
    scale, shift = (float(value) for value in fit_correction(logits, labels, new))
    first = second = 0.0
    for i in range(len(labels)):
        outputs = [float(o) if j < 4 - new else scale * float(o) + shift for j, o in enumerate(logits[i])]
        total = sum(math.exp(o) for o in outputs)
        for j in range(4 - new, 4):
            error = math.exp(outputs[j]) / total - float(labels[i] == j)
            first += error * float(logits[i, j]) / len(labels)
            second += error / len(labels)
    assert first == pytest.approx(0, abs=1e-4)
    assert second + 0.1 * shift == pytest.approx(0, abs=1e-4)
    assert -2 < shift < -0.1


def test_no_fit_turns_the_order_of_the_new_classes_round() -> None:
    """Two images whose outputs are the wrong way round would be fitted best by a negative scale."""
    logits = torch.tensor([[0.0, 0.0, 3.0, -3.0], [0.0, 0.0, -3.0, 3.0]])
    scale, _ = fit_correction(logits, torch.tensor([3, 2]), 2)
    assert 0 <= float(scale) < 0.1


def bias(scale: float, shift: float, images: int) -> Extras:
    values = {"scale": torch.tensor(scale), "shift": torch.tensor(shift), "images": torch.tensor(images)}
    return Extras("bias", values)


def test_the_server_weights_corrections_by_their_validation_images() -> None:
    model = noted_model((2, 2, 3), [1.0, 3.0, 1.0], [0.0, 1.0, 0.0])
    BiC().merge(model, [bias(0.5, -1.0, 30), bias(0.9, 0.2, 10)], 0, 0)
    torch.testing.assert_close(model.noted("scale"), torch.tensor([1, 1, 1, 1, 0.6, 0.6, 0.6]))
    torch.testing.assert_close(model.noted("shift"), torch.tensor([0, 0, 0, 0, -0.7, -0.7, -0.7]))
    kept = noted_model((2, 2, 3), [1.0, 3.0, 1.0], [0.0, 1.0, 0.0])
    BiC(keep_all=True).merge(kept, [bias(0.5, -1.0, 30), bias(0.9, 0.2, 10)], 0, 0)
    torch.testing.assert_close(kept.noted("scale"), torch.tensor([1, 1, 3, 3, 0.6, 0.6, 0.6]))
    torch.testing.assert_close(kept.noted("shift"), torch.tensor([0, 0, 1, 1, -0.7, -0.7, -0.7]))


def test_without_anybody_to_ask_nothing_is_corrected() -> None:
    model = noted_model((2, 2), [1.0, 3.0], [0.0, 1.0])
    BiC().merge(model, [], 0, 0)
    assert model.noted("scale").tolist() == [1.0] * 4
    assert model.noted("shift").tolist() == [0.0] * 4


@pytest.fixture
def grown(small: dict[str, Any]) -> Federation:
    """Forty images a class, and a head of two growths, of classes 0 to 2 and 3 to 5."""
    settings = {**small, "data": {**small["data"], "train_per_class": 40}, "plan": {**small["plan"], "memory": 240}}
    return grown_federation("bic", settings, (3, 3))


def test_validation_is_balanced_and_never_trained_on(grown: Federation) -> None:
    """A tenth of the 30 exemplars of each old class, and as many images of each new one."""
    rows, labels = grown.data.train.by_class, grown.data.train.labels
    memory = {c: rows[c][torch.randperm(40, generator=torch_generator(c))[:30]].int() for c in (0, 1)}
    context = client_of(grown, (3, 4, 5), memory)
    held = BiC().validation(context)
    assert torch.bincount(labels[held], minlength=6).tolist() == [3, 3, 0, 3, 3, 3]
    assert set(held[labels[held] < 3].tolist()) <= set(torch.cat(list(memory.values())).tolist())
    assert torch.equal(BiC().validation(client_of(grown, (3, 4, 5), memory)), held)
    [stage] = BiC().stages(context)
    trained = [row for batch in stage.batches(0) for row in batch.ids.tolist()]
    assert sorted([*trained, *held.tolist()]) == sorted(context.everything.tolist())
    assert len(set(trained)) == len(trained)


def test_classes_with_different_memories_give_the_same_number_each(grown: Federation) -> None:
    rows, labels = grown.data.train.by_class, grown.data.train.labels
    held = BiC(held_out=0.2).validation(client_of(grown, (3,), {0: rows[0][:25], 1: rows[1][:11]}))
    assert torch.bincount(labels[held], minlength=6).tolist() == [2, 2, 0, 2, 0, 0]


def test_newcomers_stayers_and_clients_with_one_image_take_no_part(grown: Federation) -> None:
    rows = grown.data.train.by_class
    kept = {0: rows[0][:10], 1: rows[1][:10]}
    newcomer, stayer = client_of(grown, (3, 4), {}), client_of(grown, (), kept)
    one = client_of(grown, (3,), kept, images=(int(rows[3][0]),))
    lonely = client_of(grown, (3, 4), {0: rows[0][:1]})
    for context in (newcomer, stayer, one, lonely):
        assert not len(BiC().validation(context))
        assert BiC().finish_task(context) is None
        [stage] = BiC().stages(context)
        trained = [row for batch in stage.batches(0) for row in batch.ids.tolist()]
        assert sorted(trained) == sorted(context.everything.tolist())
    assert BiC().finish_task(client_of(grown, (3, 4), kept)) is not None


def test_a_stayer_that_still_has_old_data_takes_no_part(grown: Federation) -> None:
    """With plan.zo_data=last_task a client has images and exemplars and nothing of the newest classes: a fit to that
    drives the correction to extremes."""
    rows = grown.data.train.by_class
    assert BiC().finish_task(client_of(grown, (1, 2), {0: rows[0][:20]})) is None


def test_a_client_fits_its_validation_images_under_the_broadcast_model_which_stays_as_it_is(grown: Federation) -> None:
    rows, fed = grown.data.train.by_class, grown
    context = client_of(grown, (3, 4, 5), {0: rows[0][:30], 2: rows[2][:30]})
    before = {name: tensor.clone() for name, tensor in context.model.state_dict().items()}
    found = BiC().finish_task(context)
    assert found is not None
    held = BiC().validation(context)
    with torch.no_grad():
        logits = context.model.eval()(fed.enrolment.transform.plain(fed.data.train.images[held])).logits
    scale, shift = fit_correction(logits, fed.data.train.labels[held], 3)
    assert found.tensors["images"] == 15 == len(held)
    torch.testing.assert_close(found.tensors["scale"], scale)
    torch.testing.assert_close(found.tensors["shift"], shift)
    assert all(torch.equal(tensor, before[name]) for name, tensor in context.model.state_dict().items())


def test_a_correction_is_fitted_to_the_outputs_that_it_is_used_with(grown: Federation) -> None:
    """With all corrections kept, the old outputs beside which the new ones are fitted are corrected ones."""
    model, rows, fed = grown.server.model, grown.data.train.by_class, grown
    method = BiC(keep_all=True)
    method.merge(model, [], 0, 0)
    model.note("scale", torch.tensor([4.0, 4.0, 4.0, 1.0, 1.0, 1.0]))
    model.note("shift", torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0, 0.0]))
    context = client_of(grown, (3, 4, 5), {0: rows[0][:30], 2: rows[2][:30]})
    found = method.finish_task(context)
    assert found is not None
    held = method.validation(context)
    with torch.no_grad():
        used = method.predict(context.model.eval(), fed.enrolment.transform.plain(fed.data.train.images[held]))  # type: ignore[arg-type]
    scale, shift = fit_correction(used, fed.data.train.labels[held], 3)
    torch.testing.assert_close(found.tensors["scale"], scale)
    torch.testing.assert_close(found.tensors["shift"], shift)


def test_what_is_fitted_to_after_a_task_was_held_out_during_it(small: dict[str, Any]) -> None:
    """Every client's validation images, when its correction is fitted, against all that it trained on in the task."""
    data, plan = {**small["data"], "train_per_class": 30}, {**small["plan"], "memory": 60}
    federation = federation_of("bic", {**small, "data": data, "plan": {**plan, "class_share": 1.0}})
    trained: dict[tuple[int, int], set[int]] = {}
    fitted: list[int] = []

    class Watching(BiC):
        def loss(self, context: Any, batch: Any) -> Any:
            task = federation.plan.task_of_round(context.job.round_index)
            trained.setdefault((task, context.state.client), set()).update(batch.ids.tolist())
            return super().loss(context, batch)

        def finish_task(self, context: Any) -> Any:
            task, held = federation.plan.task_of_round(context.job.round_index), self.validation(context)
            if len(held):
                fitted.append(context.state.client)
                overlap = trained.get((task, context.state.client), set()) & set(held.tolist())
                assert not overlap, f"client {context.state.client} was trained on {len(overlap)} of {len(held)}"
            return super().finish_task(context)

    federation.method = Watching()
    for _ in run_rounds(federation, Serial()):
        pass
    assert fitted


def test_a_run_corrects_its_newest_task_alone_and_clients_do_not_send_it(small: dict[str, Any]) -> None:
    settings = {**small, "plan": {**small["plan"], "class_share": 1.0, "selected": 5, "memory": 24}}
    federation = federation_of("bic", settings)
    model = federation.server.model
    for done in run_rounds(federation, Serial()):
        task, ends = done.line["task"], federation.plan.ends_task(done.line["round"] - 1)
        scale = model.noted("scale")
        corrected = [bool((scale[2 * t : 2 * t + 2] != 1).any()) for t in range(task)]
        if ends:
            assert corrected == [False] * (task - 1) + [task > 1]
            assert bool(done.line["bytes"]["server"]["extras"]) == (task > 1)
        assert float(scale[-2]) == float(scale[-1])
    assert BiC().fixed(model) == {f"notes.{g}.{name}" for g in range(3) for name in ("scale", "shift")}
