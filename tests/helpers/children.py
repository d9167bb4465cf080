"""Tasks of children that are spawned, which must be found by their names."""

import multiprocessing
import warnings

from torch import Tensor

from feddar.errors import Notice, UserError
from feddar.simulation.processes import Send


def say(numbers: Tensor, send: Send) -> None:
    warnings.warn("three numbers", Notice, stacklevel=2)
    send({"sum": int(numbers.sum()), "spawned": multiprocessing.get_start_method(allow_none=True) == "spawn"})


def fail(_: Send) -> None:
    raise UserError("this task is wrong")
