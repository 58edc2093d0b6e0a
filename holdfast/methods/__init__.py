"""METHODS: the table of methods, name -> class."""

from collections.abc import Mapping
from typing import Any

from holdfast.errors import HoldfastError, nearest
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
from holdfast.methods.lga import LGA, LGAPaper
from holdfast.methods.lga_code import LGACode
from holdfast.methods.podnet import PODNet
from holdfast.methods.ssil import SSIL

METHODS: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (FedAvg, FedProx, Joint, ICaRL, BiC, PODNet, DDE, GeoDL, SSIL, DyTox, AFC, GLFC, LGA, LGAPaper, LGACode)
}


def method_of(fields: Mapping[str, Any]) -> Method:
    """The method that `fields["name"]` names, with the other fields as hyper-parameters."""
    values = dict(fields)
    name = values.pop("name", None)
    if not isinstance(name, str) or name not in METHODS:
        raise HoldfastError(f"unknown method {name!r:.80}; {nearest(str(name), METHODS)}")
    try:
        return METHODS[name](**values)
    except (TypeError, ValueError) as error:
        raise HoldfastError(f"the method {name} does not have these settings: {error}") from error
