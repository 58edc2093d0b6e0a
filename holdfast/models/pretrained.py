"""Starting a backbone from a file of weights: safetensors, or a state dict as torchvision publishes them."""

import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.models.backbone import AdaptedBackbone, Backbone
from holdfast.models.resnet import ResNet18

MOST = 2**32  # bytes of a file, and of what it holds
PREFIXES = ("", "module.", "backbone.", "backbone.trunk.", "backbone.net.", "model.", "encoder.")
NAMED = 4  # tensors that a message lists


@dataclass(frozen=True)
class Loaded:
    """What became of a file's tensors, by name."""

    file: str
    sha256: str
    matched: tuple[str, ...]  # of the backbone: started from the file
    missing: tuple[str, ...]  # of the backbone: not in the file, and so left at their initial values
    other_shape: tuple[str, ...]  # in both, but of another shape: left at their initial values
    left_out: tuple[str, ...]  # of the file: the backbone has no such tensor, as of fc.weight

    def to_json(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @property
    def sentence(self) -> str:
        total = len(self.matched) + len(self.missing) + len(self.other_shape)
        parts = [f"{self.file}: {len(self.matched)} of the backbone's {total} tensors start from it"]
        for names, what in (
            (self.other_shape, "have another shape there and start as usual"),
            (self.missing, "are not in it and start as usual"),
            (self.left_out, "of it are left out"),
        ):
            if names:
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                parts.append(f"{', '.join(names[:NAMED])}{more} {what}")
        return "; ".join(parts)


def start_from(backbone: Backbone, file: Path, sha256: str | None = None) -> Loaded:
    """Copies the file's tensors into a backbone. The names and the prefixes of several origins are tried; those count
    that fit most tensors. Raises HoldfastError if the file has changed, cannot be read, or if nothing fits."""
    content = _read(file)
    found = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, found):
        raise HoldfastError(
            f"model.weights={str(file)!r} is another file than this run was started with (model.weights_sha256); "
            "restore it, or start a new run"
        )
    stored = _tensors(file, content)
    net = backbone.net if isinstance(backbone, AdaptedBackbone) else backbone
    wanted = net.state_dict()
    renamed = max(_readings(backbone, stored), key=lambda names: _fitting(names, wanted))
    fits = {name: tensor for name, tensor in renamed.items() if name in wanted and tensor.shape == wanted[name].shape}
    others = [name for name in renamed if name in wanted and name not in fits]
    if isinstance(backbone, ResNet18) and "stem.weight" in others:  # its norm belongs to it
        others += [name for name in fits if name.startswith("stem_norm.")]
        fits = {name: tensor for name, tensor in fits.items() if name not in others}
    if not any(tensor.is_floating_point() for tensor in fits.values()):
        shapes = [f"{name} is {_shape(renamed[name])} there and {_shape(wanted[name])} here" for name in others[:1]]
        raise HoldfastError(
            f"nothing in model.weights={str(file)!r} fits this backbone: "
            + (f"{shapes[0]}; check model.name and model.width" if shapes else "its tensors have other names")
        )
    if not all(bool(tensor.isfinite().all()) for tensor in fits.values()):
        raise HoldfastError(f"model.weights={str(file)!r} has values that are not finite; use another file")
    net.load_state_dict({**wanted, **fits})
    return Loaded(
        str(file),
        found,
        tuple(name for name in wanted if name in fits),
        tuple(name for name in wanted if name not in renamed),
        tuple(f"{name} ({_shape(renamed[name])} there, {_shape(wanted[name])} here)" for name in others),
        tuple(name for name in renamed if name not in wanted),
    )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"


def _readings(backbone: Backbone, stored: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The file's tensors under the names that they may have here."""
    translations: list[Callable[[str], str]] = [str]
    if isinstance(backbone, ResNet18):
        translations.append(from_torchvision)
    return [
        {translate(name.removeprefix(prefix)): tensor for name, tensor in stored.items()}
        for translate in translations
        for prefix in PREFIXES
    ]


def _fitting(names: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many tensors fit, and how many at least have a name that is wanted."""
    known = [name for name in names if name in wanted]
    return sum(names[name].shape == wanted[name].shape for name in known), len(known)


def from_torchvision(name: str) -> str:
    """Our name of a tensor of torchvision's ResNet-18: layer2.0.bn1.weight is stages.1.0.norm1.weight."""
    name = re.sub(r"^conv1\.", "stem.", name)
    name = re.sub(r"^bn1\.", "stem_norm.", name)
    name = re.sub(r"^layer([1-4])\.", lambda match: f"stages.{int(match[1]) - 1}.", name)
    return name.replace(".bn", ".norm").replace(".downsample.", ".shortcut.")


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > MOST:
            raise HoldfastError(f"model.weights={str(file)!r} is larger than {MOST // 2**30} GiB; use another file")
        return file.read_bytes()
    except OSError as error:
        raise HoldfastError(
            f"cannot read model.weights={str(file)!r}: {error.strerror}; give the path of a file"
        ) from error


def _tensors(file: Path, content: bytes) -> dict[str, Tensor]:
    """The tensors of a file, by name."""
    saved_by_torch = zipfile.is_zipfile(io.BytesIO(content))
    try:
        stored: Any = _state_dict(file, content) if saved_by_torch else load_safetensors(content)
    except HoldfastError:
        raise
    except Exception as error:  # PyTorch's reader raises nearly any type on a broken file
        raise HoldfastError(
            f"model.weights={str(file)!r} is neither safetensors nor a state dict that torch.save has written "
            f"({type(error).__name__}); save it again as safetensors"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(stored, Mapping) and isinstance(stored.get(key), Mapping):
            stored = stored[key]
    if not isinstance(stored, Mapping):
        raise HoldfastError(f"model.weights={str(file)!r} holds a {type(stored).__name__}, not a state dict")
    return {str(name): tensor.detach() for name, tensor in stored.items() if _plain(tensor)}


def _state_dict(file: Path, content: bytes) -> Any:
    """What torch.save has written: only tensors and plain values are read. The older format, which is no zip archive,
    is not read, because its sizes cannot be checked beforehand."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(info.file_size for info in archive.infolist()) > MOST:
            raise HoldfastError(f"model.weights={str(file)!r} holds more than {MOST // 2**30} GiB; use another file")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized and not value.is_meta
