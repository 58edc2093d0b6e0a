"""The transformer with a token and a head a task: growth, gated attention, class attention."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from holdfast.models.convit import (
    ClassAttention,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    GatedAttention,
    TokenModel,
    relative_places,
)
from holdfast.models.incremental import ModelSpec, grow_to
from holdfast.models.layers import materialise
from holdfast.seeding import torch_generator

IMAGES = torch.randn(3, 3, 16, 16, generator=torch_generator(3))


def net(
    growths: tuple[int, ...] = (),
    seed: int = 0,
    convolutional: bool = False,
    width: int = 16,
    size: int = 16,
    blocks: int = 2,
) -> TokenModel:
    spec = ModelSpec("convnet", "batch", size)
    model = TokenModel(spec, torch_generator(seed), width=width, heads=4, blocks=blocks, convolutional=convolutional)
    for i, classes in enumerate(growths):
        model.grow(classes, torch_generator(seed, "growth", i))
    return model.eval()


def attention(heads: int = 4, width: int = 16) -> GatedAttention:
    with torch.device("meta"):
        module = GatedAttention(width, heads)
    materialise(module, torch_generator(5))
    return module


@pytest.mark.parametrize("convolutional", [False, True])
def test_there_are_as_many_tokens_and_heads_as_tasks(convolutional: bool) -> None:
    model = net(convolutional=convolutional)
    classes = 0
    for tasks, new in enumerate((3, 2, 4), start=1):
        model.grow(new, torch_generator(tasks))
        classes += new
        output = model(IMAGES)
        assert len(model.tokens) == len(model.blocks) == tasks
        assert output.logits.shape == (3, classes)
        assert output.features.shape == (3, 16 * tasks)
        assert model.divergence[1].out_features == new + 1  # type: ignore[index]
    assert model.growths == [3, 2, 4]


def test_a_model_without_classes_has_no_logits() -> None:
    assert net()(IMAGES).logits.shape == (3, 0)


def test_growth_keeps_old_logits_and_answers_to_the_bit() -> None:
    model = net((3, 2))
    before = model(IMAGES)
    first = model.divergence
    model.grow(4, torch_generator(9))
    after = model(IMAGES)
    assert torch.equal(after.logits[:, :5], before.logits)
    assert torch.equal(after.features[:, :32], before.features)
    assert model.divergence is not first


def test_each_head_reads_the_answer_to_its_own_token_alone() -> None:
    model = net((3, 2))
    before = model(IMAGES).logits.detach()
    with torch.no_grad():
        model.tokens[1].normal_(generator=torch_generator(4))
    after = model(IMAGES).logits.detach()
    assert torch.equal(after[:, :3], before[:, :3])
    assert float((after[:, 3:] - before[:, 3:]).abs().min()) > 1e-6


def test_logits_are_a_norm_and_a_linear_layer_of_the_answer() -> None:
    model = net((3, 2)).requires_grad_(False)
    output = model(IMAGES)
    answer = output.features[:, 16:]
    state = model.state_dict()
    unit = (answer - answer.mean(1, keepdim=True)) / (answer.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    scaled = unit * state["blocks.1.0.weight"] + state["blocks.1.0.bias"]
    torch.testing.assert_close(
        output.logits[:, 3:], scaled @ state["blocks.1.1.weight"].T + state["blocks.1.1.bias"], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(model.classify(output.features), output.logits)


def test_grow_to_and_state_carry_a_model_over() -> None:
    model, other = net((3, 2, 4)), net(seed=8)
    grow_to(other, [3, 2, 4], torch_generator(1))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(IMAGES).logits, model(IMAGES).logits)


def test_initial_weights_come_from_the_given_generator_alone() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    first, again, other = net((3, 2)), net((3, 2)), net((3, 2), seed=1)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
        assert bool(tensor.isfinite().all()), name
    assert not torch.equal(first.tokens[1], other.tokens[1])
    assert not torch.equal(first.tokens[0], first.tokens[1])
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("size", [16, 32])
def test_a_patch_has_four_by_four_pixels(size: int) -> None:
    model = net(size=size)
    assert model.backbone(torch.zeros(2, 3, size, size)).shape == (2, (size // 4) ** 2, 16)
    moved = torch.zeros(1, 3, 16, 16)
    moved[:, :, 4:8, 8:12] = 1.0  # the second row's third patch
    patches = model.backbone.get_submodule("patches")
    grid = patches(moved) - patches(torch.zeros_like(moved))
    assert torch.nonzero(grid.detach().abs().sum(dim=1)[0]).tolist() == [[1, 2]]


def test_the_papers_size_by_hand() -> None:
    """Patch 4, width 384, 12 heads, 5 + 1 blocks; a task of 10 classes brings a token, a norm, a head and a test."""
    d, h = 384, 12
    model = TokenModel(ModelSpec("convnet", "batch", 32), torch_generator(0), d, h, 5, convolutional=False)
    mlp, norms = 4 * d * d + 4 * d + 4 * d * d + d, 4 * d
    encoder = 5 * (2 * d * d + d * d + d * d + d + 4 * h + h + mlp + norms) + 4 * 4 * 3 * d + d + 8 * 8 * d
    decoder = d * d + 2 * d * d + d * d + d + mlp + norms
    assert sum(p.numel() for p in model.parameters()) == encoder + decoder
    model.grow(10, torch_generator(1))
    assert sum(p.numel() for p in model.parameters()) - encoder - decoder == 5 * d + 10 * d + 10 + 11 * d + 11


def test_every_patch_has_a_learned_number_for_its_place() -> None:
    """Without blocks an equal picture everywhere differs by them alone."""
    model = net(blocks=0)
    found = model.backbone(torch.ones(1, 3, 16, 16))[0]
    table = model.backbone.get_submodule("positions").weight
    torch.testing.assert_close(found - found[0], table - table[0])
    assert 0.01 < float(table.detach().std()) < 0.03


def test_on_a_network_tokens_ask_its_last_maps_directly() -> None:
    model = net(convolutional=True)
    maps = model.backbone.get_submodule("trunk")(IMAGES)[1][-1].relu()
    weight = model.backbone.get_submodule("patches").weight[:, :, 0, 0]
    bias = model.backbone.get_submodule("patches").bias
    torch.testing.assert_close(model.backbone(IMAGES), maps.flatten(2).transpose(1, 2) @ weight.T + bias)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (4, 4)])
def test_places_are_steps_from_the_asking_patch(height: int, width: int) -> None:
    places = relative_places(height, width)
    assert places.shape == (height * width, height * width, 3)
    for i in range(height * width):
        for j in range(height * width):
            across, down = j % width - i % width, j // width - i // width
            assert places[i, j].tolist() == [across, down, across**2 + down**2]


@pytest.mark.parametrize("heads", [1, 4, 9, 12])
def test_at_first_each_head_looks_at_one_place_around_the_patch(heads: int) -> None:
    """softmax of -|step - h|^2: by exponentials of squared distances, patch by patch."""
    module = attention(heads, width=36)
    places = relative_places(5, 5)
    found = module.place(places).permute(2, 0, 1).softmax(dim=-1).detach()
    side = math.isqrt(heads)
    offsets = [(c - (side - 1) / 2, r - (side - 1) / 2) for r in range(side) for c in range(side)]
    centre = 12
    for head, (across, down) in enumerate(offsets):
        weights = [math.exp(-((j % 5 - 2 - across) ** 2) - (j // 5 - 2 - down) ** 2) for j in range(25)]
        assert found[head, centre].tolist() == pytest.approx([w / sum(weights) for w in weights], rel=1e-4)
    assert torch.sigmoid(module.gate).tolist() == pytest.approx([1 / (1 + math.exp(-1))] * heads)
    assert torch.equal(module.values.weight, torch.eye(36))


def test_gated_attention_by_loops() -> None:
    module = attention().requires_grad_(False)
    module.gate.copy_(torch.tensor([-1.0, 0.0, 0.5, 2.0]))
    x, places = torch.randn(2, 6, 16, generator=torch_generator(6)), relative_places(2, 3)
    qk, v = x @ module.queries_keys.weight.T, x @ module.values.weight.T
    expected = torch.zeros(2, 6, 16)
    for b in range(2):
        for head in range(4):
            part = slice(4 * head, 4 * head + 4)
            queries, keys = qk[b, :, :16][:, part], qk[b, :, 16:][:, part]
            g = 1 / (1 + math.exp(-float(module.gate[head])))
            for i in range(6):
                content = torch.stack([queries[i] @ keys[j] / 2 for j in range(6)]).softmax(0)
                where = module.place.weight[head]
                place = torch.stack([places[i, j] @ where + module.place.bias[head] for j in range(6)]).softmax(0)
                expected[b, i, part] = ((1 - g) * content + g * place) @ v[b, :, part]
    expected = expected @ module.out.weight.T + module.out.bias
    torch.testing.assert_close(module(x, places), expected, atol=1e-5, rtol=1e-4)


def test_an_open_gate_sees_places_only_and_a_closed_one_content_only() -> None:
    module = attention().requires_grad_(False)
    x, places = torch.randn(2, 9, 16, generator=torch_generator(7)), relative_places(3, 3)
    module.gate.fill_(-100.0)
    order = torch.randperm(9, generator=torch_generator(8))
    torch.testing.assert_close(module(x[:, order], places), module(x, places)[:, order])
    module.gate.fill_(100.0)
    doubled = module(2 * x, places) - module.out.bias
    torch.testing.assert_close(doubled, 2 * (module(x, places) - module.out.bias), atol=1e-5, rtol=1e-4)  # linear


def test_class_attention_by_loops() -> None:
    """Every token for itself: it and the patches, but no other token."""
    module = ClassAttention(16, 4).requires_grad_(False)
    tokens = torch.randn(3, 16, generator=torch_generator(9))
    patches = torch.randn(2, 5, 16, generator=torch_generator(10))
    expected = torch.zeros(2, 3, 16)
    for b in range(2):
        for number, token in enumerate(tokens):
            q, kv = module.queries.weight @ token, torch.cat([token[None], patches[b]]) @ module.keys_values.weight.T
            for head in range(4):
                part = slice(4 * head, 4 * head + 4)
                keys, values = kv[:, :16][:, part], kv[:, 16:][:, part]
                weights = torch.stack([q[part] @ key / 2 for key in keys]).softmax(0)
                expected[b, number, part] = weights @ values
    torch.testing.assert_close(
        module(tokens, patches), expected @ module.out.weight.T + module.out.bias, atol=1e-5, rtol=1e-4
    )


def test_blocks_add_to_what_they_are_given() -> None:
    """With their last layers at zero they change nothing."""
    with torch.device("meta"):
        encoder, decoder = EncoderBlock(16, 4), DecoderBlock(16, 4)
    for block in (encoder, decoder):
        materialise(block, torch_generator(11))
        with torch.no_grad():
            for name in ("attention.out", "mlp.2"):
                block.get_parameter(f"{name}.weight").zero_()
                block.get_parameter(f"{name}.bias").zero_()
    x = torch.randn(2, 4, 16, generator=torch_generator(12))
    assert torch.equal(encoder(x, relative_places(2, 2)), x)
    assert torch.equal(decoder(x[0], x), x[:1].expand(2, -1, -1))


def test_a_token_sees_itself_and_patches_in_any_order() -> None:
    with torch.device("meta"):
        decoder = DecoderBlock(16, 4)
    materialise(decoder, torch_generator(11))
    token = torch.randn(1, 16, generator=torch_generator(12))
    patches = torch.randn(2, 5, 16, generator=torch_generator(14))
    order = torch.randperm(5, generator=torch_generator(13))
    torch.testing.assert_close(decoder(token, patches), decoder(token, patches[:, order]))
    alone = decoder(token, patches[:1, :0])[0]
    own = decoder.attention.out(decoder.norm1(token) @ decoder.attention.keys_values.weight[16:].T)
    middle = token + own
    torch.testing.assert_close(alone, middle + decoder.mlp(decoder.norm2(middle)), atol=1e-5, rtol=1e-4)


def test_every_part_learns() -> None:
    model = net((3, 2)).train()
    output = model(IMAGES)
    last = model.divergence(output.features[:, 16:])  # type: ignore[misc]
    (F.cross_entropy(output.logits, torch.tensor([0, 3, 4])) + last.square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) or name.endswith("place.bias"), name  # a constant that softmax does not see


@pytest.mark.parametrize(("size", "patch", "patches"), [(32, 4, 64), (64, 8, 64), (84, 8, 121), (224, 16, 196)])
def test_patches_grow_with_the_image(size: int, patch: int, patches: int) -> None:
    encoder = net(size=size).backbone
    assert isinstance(encoder, Encoder)
    assert encoder.patches.kernel_size == (patch, patch)
    images = torch.rand(1, 3, size, size, generator=torch_generator(3), requires_grad=True)
    found = encoder(images)
    assert found.shape[1] == patches
    found.square().sum().backward()
    assert images.grad is not None
    assert bool((images.grad != 0).all())  # no pixel is left out, though 84 is not a multiple of 8


def test_linear_layers_start_as_published() -> None:
    model = net(width=64)
    for part in (model.backbone, model.decoder):
        for name, layer in part.named_modules():
            if isinstance(layer, torch.nn.Linear) and not name.endswith((".values", ".place")):  # these are particular
                assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.15), name
                assert layer.bias is None or not layer.bias.any()
    model.grow(20, torch_generator(1))
    head = model.blocks[-1][1].weight.detach()  # type: ignore[index]
    assert float(head.abs().max()) == pytest.approx(1 / 8, rel=0.05)  # uniform, 1 / sqrt(64)
