"""Weights from a file: what matches, what does not, what is left out, and what is refused."""

import json
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import holdfast
from holdfast import extensions
from holdfast.config import load_config, to_toml
from holdfast.errors import HoldfastError
from holdfast.experiment import resume, run_name, run_to_folder
from holdfast.files import sha256_of
from holdfast.methods import METHODS
from holdfast.models import BACKBONE_TABLE, pretrained
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.pretrained import from_torchvision, start_from
from holdfast.seeding import torch_generator


def resnet(seed: int, size: int = 32, width: int = 8) -> Any:
    return IncrementalModel(ModelSpec("resnet18", "batch", size, width), torch_generator(seed)).trunk


def torchvision_names(width: int = 8, stem: int = 7) -> "OrderedDict[str, Tensor]":
    """A state dict with the names and the shapes of torchvision's ResNet-18, at any width, written down by hand."""
    rng = torch_generator(5)
    found: OrderedDict[str, Tensor] = OrderedDict()

    def conv(name: str, out: int, into: int, size: int) -> None:
        found[f"{name}.weight"] = torch.randn(out, into, size, size, generator=rng)

    def norm(name: str, channels: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.{part}"] = torch.rand(channels, generator=rng)
        found[f"{name}.num_batches_tracked"] = torch.tensor(7)

    conv("conv1", width, 3, stem)
    norm("bn1", width)
    for layer in range(1, 5):
        out = width * 2 ** (layer - 1)
        for block in range(2):
            into = out // 2 if block == 0 and layer > 1 else out
            conv(f"layer{layer}.{block}.conv1", out, into, 3)
            norm(f"layer{layer}.{block}.bn1", out)
            conv(f"layer{layer}.{block}.conv2", out, out, 3)
            norm(f"layer{layer}.{block}.bn2", out)
            if into != out:
                conv(f"layer{layer}.{block}.downsample.0", out, into, 1)
                norm(f"layer{layer}.{block}.downsample.1", out)
    found["fc.weight"], found["fc.bias"] = torch.rand(1000, 8 * width), torch.rand(1000)
    return found


def test_torchvisions_names_are_ours() -> None:
    assert from_torchvision("layer2.0.downsample.1.running_var") == "stages.1.0.shortcut.1.running_var"
    ours = {name: tensor.shape for name, tensor in resnet(0, size=96).state_dict().items()}
    theirs = {from_torchvision(name): tensor.shape for name, tensor in torchvision_names().items()}
    assert {name: shape for name, shape in theirs.items() if not name.startswith("fc.")} == ours


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_dict_of_torchvision_starts_all_but_the_head(tmp_path: Path, prefix: str) -> None:
    stored = torchvision_names()
    torch.save({f"{prefix}{name}": tensor for name, tensor in stored.items()}, tmp_path / "resnet18.pth")
    net = resnet(1, size=96)
    loaded = start_from(net, tmp_path / "resnet18.pth")
    assert (loaded.missing, loaded.other_shape) == ((), ())
    assert {name.removeprefix("module.") for name in loaded.left_out} == {"fc.weight", "fc.bias"}
    assert len(loaded.matched) == len(stored) - 2 == 120
    for name, tensor in stored.items():
        if not name.startswith("fc."):
            assert torch.equal(net.state_dict()[from_torchvision(name)], tensor)


def test_a_large_stem_is_left_out_of_a_small_one_with_its_norm(tmp_path: Path) -> None:
    torch.save({"state_dict": torchvision_names(), "epoch": 3}, tmp_path / "resnet18.pth")
    net, before = resnet(1), resnet(1).state_dict()
    loaded = start_from(net, tmp_path / "resnet18.pth")
    after = net.state_dict()
    stem = [name for name in after if name.startswith("stem")]
    assert all(torch.equal(after[name], before[name]) for name in stem)
    assert not torch.equal(after["stages.0.0.conv1.weight"], before["stages.0.0.conv1.weight"])
    assert "stem.weight (8x3x7x7 there, 8x3x3x3 here)" in loaded.other_shape
    assert {name.split(" ")[0] for name in loaded.other_shape} == set(stem)
    assert re.match(r".*resnet18\.pth: 114 of the backbone's 120 tensors start from it; stem\.weight", loaded.sentence)
    assert "fc.weight, fc.bias of it are left out" in loaded.sentence


def test_a_finished_runs_model_and_a_bare_backbone_match(tmp_path: Path) -> None:
    source = METHODS["icarl"]().build_model(ModelSpec("resnet18", "batch", 32, 8), torch_generator(3))
    source.grow(4, torch_generator(4))
    save_file(
        {name: tensor.contiguous() for name, tensor in source.state_dict().items()}, tmp_path / "model.safetensors"
    )
    bare = {name: tensor.contiguous() for name, tensor in source.backbone.state_dict().items()}
    save_file(bare, tmp_path / "bare.safetensors")
    for name in ("model", "bare"):
        net = resnet(9)
        loaded = start_from(net, tmp_path / f"{name}.safetensors")
        assert all(torch.equal(tensor, bare[key]) for key, tensor in net.state_dict().items())
        assert bool(loaded.left_out) == (name == "model")
        assert loaded.sha256 == sha256_of(tmp_path / f"{name}.safetensors")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 4, 3)  # a child that is called like the adapter's
        self.more = nn.Conv2d(4, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.more(self.net(x))
        return out


def test_an_own_backbone_starts_from_its_own_state_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKBONE_TABLE, "registered", {})
    monkeypatch.setattr(extensions, "_allowed", set())
    holdfast.register_backbone("own", Own)
    ready = Own()
    save_file(
        {name: tensor for name, tensor in ready.state_dict().items() if name != "more.bias"}, tmp_path / "x.safetensors"
    )
    model = IncrementalModel(ModelSpec("own", "batch", 16), torch_generator(0))
    assert model.trunk is not None
    loaded = start_from(model.trunk, tmp_path / "x.safetensors")
    assert loaded.matched == ("net.weight", "net.bias", "more.weight")
    assert loaded.missing == ("more.bias",)
    assert torch.equal(model.state_dict()["backbone.net.more.weight"], ready.more.weight)


class Evil:
    """Its pickle would make a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def refused(file: Path, says: str, net: Any = None, **given: str) -> None:
    with pytest.raises(HoldfastError, match=says) as error:
        start_from(net or resnet(0), file, **given)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_used_are_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.pth"
    refused(file, "cannot read model.weights=.*: No such file")
    file.write_bytes(b"nonsense" * 100)
    refused(file, "neither safetensors nor a state dict that torch.save has written")
    torch.save({"a": Evil(tmp_path / "made")}, file)
    refused(file, "neither safetensors nor a state dict")
    assert not (tmp_path / "made").exists()
    torch.save(torchvision_names(), file, _use_new_zipfile_serialization=False)
    refused(file, "neither safetensors nor a state dict")
    torch.save([1, 2], file)
    refused(file, "holds a list, not a state dict")
    torch.save({"w": torch.zeros(3)}, file)
    refused(file, "nothing in model.weights=.* fits this backbone: its tensors have other names")
    torch.save(torchvision_names(width=16), file)
    refused(file, r"stem.weight is 16x3x7x7 there and 8x3x3x3 here; check model.name and model.width")
    torch.save(torchvision_names(), file)
    refused(file, "is another file than this run was started with", sha256="0" * 64)
    stored = torchvision_names()
    stored["layer1.0.conv1.weight"][0, 0, 0, 0] = float("nan")
    torch.save(stored, file)
    refused(file, "values that are not finite")
    monkeypatch.setattr(pretrained, "MOST", 10_000)
    refused(file, "is larger than 0 GiB")
    monkeypatch.setattr(pretrained, "MOST", 50_000)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bomb:  # small here, large once it is unpacked
        bomb.writestr("archive/data.pkl", b"\0" * 100_000)
    assert file.stat().st_size < 1000
    refused(file, "holds more than 0 GiB")


def test_a_run_starts_from_the_weights_says_so_and_knows_them_by_their_hash(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in ((1, "a"), (2, "b")):
        model = IncrementalModel(ModelSpec("convnet", "batch", 16, 16), torch_generator(seed))
        save_file({n: t.contiguous() for n, t in model.backbone.state_dict().items()}, tmp_path / f"{name}.safetensors")
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    model = {"width": 16, "freeze": 1}

    def config(name: str) -> Any:
        return load_config({**small, "model": {**model, "weights": str(tmp_path / f"{name}.safetensors")}})

    assert run_name(config("a")) == run_name(config("copy")) != run_name(config("b"))
    assert run_name(config("a")) != run_name(load_config({**small, "model": model}))
    done = run_to_folder(config("a"), tmp_path / "run")
    assert "a.safetensors: 24 of the backbone's 24 tensors start from it" in capsys.readouterr().err.replace("\n", "")
    stored = json.loads((tmp_path / "run" / "result.json").read_text())["weights"]
    assert stored["sha256"] == sha256_of(tmp_path / "a.safetensors")
    assert len(stored["matched"]) == 24
    assert done.result.weights == stored
    final = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(final["backbone.convs.0.weight"], load_file(tmp_path / "a.safetensors")["convs.0.weight"])
    assert not run_to_folder(config("copy"), tmp_path / "run").fresh
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text(to_toml(config("a")))
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes())
    with pytest.raises(HoldfastError, match="is another file than this run was started with"):
        resume(tmp_path / "other")
    assert resume(tmp_path / "run").result == done.result  # a finished run needs no weights
    assert load_config(dict(small)).model.weights_sha256 is None


def test_a_network_without_the_backbone_says_so(small: dict[str, Any], tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    tiny = {"name": "dytox", "width": 16, "heads": 4, "depth": 1}
    with pytest.raises(HoldfastError, match=r"does not use the backbone convnet; leave model\.weights out"):
        run_to_folder(
            load_config({**small, "method": tiny, "model": {"weights": str(tmp_path / "x.safetensors")}}),
            tmp_path / "run",
        )
    with pytest.raises(HoldfastError, match=r"cannot read model\.weights='nowhere\.pth'"):
        load_config({**small, "model": {"weights": "nowhere.pth"}})
