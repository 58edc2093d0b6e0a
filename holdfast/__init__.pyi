from holdfast.data.sources import register_dataset as register_dataset
from holdfast.errors import HoldfastError as HoldfastError
from holdfast.experiment import run as run
from holdfast.methods import register_method as register_method
from holdfast.models import register_backbone as register_backbone
from holdfast.results.record import Result as Result

__version__: str
