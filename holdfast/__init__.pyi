from holdfast.errors import HoldfastError as HoldfastError
from holdfast.experiment import run as run
from holdfast.results.record import Result as Result

__version__: str
