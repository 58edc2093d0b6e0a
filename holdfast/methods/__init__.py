"""METHODS: the built-in methods, name -> class; METHOD_TABLE: these and everybody else's."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import PydanticUndefined

from holdfast.errors import HoldfastError
from holdfast.extensions import PLACE, Table
from holdfast.methods.afc import AFC
from holdfast.methods.base import Method
from holdfast.methods.bic import BiC
from holdfast.methods.dde import DDE
from holdfast.methods.dytox import DyTox
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.fedprox import FedProx
from holdfast.methods.geodl import GeoDL
from holdfast.methods.glfc import GLFC
from holdfast.methods.icarl import ICaRL
from holdfast.methods.joint import Joint
from holdfast.methods.kelp import Kelp
from holdfast.methods.lga import LGA, LGAPaper
from holdfast.methods.lga_code import LGACode
from holdfast.methods.podnet import PODNet
from holdfast.methods.ssil import SSIL

METHODS: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (
        *(FedAvg, FedProx, Joint, ICaRL, BiC, PODNet, DDE, GeoDL, SSIL, DyTox, AFC, GLFC),
        *(LGA, LGAPaper, LGACode, Kelp),
    )
}


def check_method(name: str, thing: Any) -> type[Method]:
    """What everybody's method must be; built-in ones are tested for more."""

    def wrong(what: str) -> HoldfastError:
        return HoldfastError(f"the method {name!r} {what}; see docs/adding-a-method.md")

    if not isinstance(thing, type) or not issubclass(thing, Method):
        raise wrong("is not a subclass of holdfast.methods.base.Method")
    cls: type[Method] = thing
    if not is_pydantic_dataclass(thing):
        raise wrong(f"lacks the line @dataclass(frozen=True, config=STRICT) above class {cls.__name__}")
    for key in ("name", "about"):
        text = getattr(cls, key, None)
        if not isinstance(text, str) or not text or "\n" in text:
            raise wrong(f"needs a line of text as its {key}: {key}: ClassVar[str] = ...")
    if METHODS.get(cls.name, cls) is not cls:
        raise wrong(f"has the name of a built-in method, {cls.name!r}; give class {cls.__name__} a name of its own")
    if not PLACE.fullmatch(name) and name != cls.name:
        raise wrong(f"is called {cls.name!r} in its class; use one name")
    for field in fields(cls):
        info = field.default
        default = getattr(info, "default", info)
        if default in (MISSING, PydanticUndefined) and getattr(info, "default_factory", None) is None:
            raise wrong(f"gives its setting {field.name!r} no default")
    try:
        json.dumps(asdict(cls()))
    except (TypeError, ValueError) as error:
        first = str(error).split("\n")[0]
        raise wrong(f"cannot be made with its defaults, or they are not plain values ({first})") from error
    return cls


METHOD_TABLE = Table("method", "holdfast.methods", METHODS, check_method)


def register_method(cls: type[Method]) -> type[Method]:
    """Makes a method known under its name in this process; also a decorator, above `@dataclass`.

    Worker processes, `resume` and `predict` find it if its module can be imported: runs then store it as
    `module:Class`. A method of a script or a notebook itself is known there alone."""
    METHOD_TABLE.register(str(getattr(cls, "name", getattr(cls, "__name__", cls))), cls)
    return cls


def method_of(values: Mapping[str, Any]) -> Method:
    """The method that `values["name"]` names, with the other values as hyper-parameters."""
    settings = dict(values)
    name = settings.pop("name", None)
    cls = METHOD_TABLE.find(str(name))
    try:
        return cls(**settings)
    except (TypeError, ValueError) as error:
        raise HoldfastError(f"the method {name} does not have these settings: {error}") from error
