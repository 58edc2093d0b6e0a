"""METHODS: an explicit table, name -> class."""

from holdfast.methods.base import Method
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.joint import Joint
from holdfast.methods.lga import LGA, LGAPaper
from holdfast.methods.lga_code import LGACode

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (FedAvg, Joint, LGA, LGAPaper, LGACode)}
