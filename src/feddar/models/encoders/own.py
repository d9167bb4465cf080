"""The user's own encoder, given as MODULE:NAME, for example ``my_nets:Chest``."""

from __future__ import annotations

import copy
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import nn

from feddar.errors import UserError, one_line
from feddar.methods import nearest


def own_encoder(name: str) -> nn.Module:
    """Import MODULE:NAME, and return it if it is a torch module, else what it returns when called without arguments."""
    home, _, attribute = name.partition(":")
    if not home or not attribute:
        raise UserError(f"encoder '{name}' must read MODULE:NAME, as in my_nets:Chest.")
    module = _imported(home, name)
    found = getattr(module, attribute, None)
    if found is None:
        public = [known for known in dir(module) if not known.startswith("_")]
        raise UserError(f"encoder '{name}': the module '{home}' has no '{attribute}': {nearest(attribute, public)}")
    if isinstance(found, nn.Module):
        return copy.deepcopy(found)
    if not callable(found):
        raise UserError(f"encoder '{name}' is {type(found).__name__}: name a class, a function or a torch module.")
    try:
        made = found()
    except Exception as error:
        raise UserError(f"encoder '{name}', called without arguments, raised {_message_and_place(error)}.") from error
    if not isinstance(made, nn.Module):
        raise UserError(f"encoder '{name}' gives {type(made).__name__} when called, and not a torch.nn.Module.")
    return made


def _imported(home: str, name: str) -> ModuleType:
    try:
        return import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise UserError(f"encoder '{name}': importing '{home}' raised {_message_and_place(error)}.") from error
        raise UserError(
            f"encoder '{name}': there is no module '{home}': name a file of the current folder without its .py, or an "
            "installed package."
        ) from None
    except (Exception, SystemExit) as error:
        raise UserError(f"encoder '{name}': importing '{home}' raised {_message_and_place(error)}.") from error


def _message_and_place(error: BaseException) -> str:
    """Return an exception's message, with the file and line that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, SyntaxError) else f" ({Path(place.filename).name}, line {place.lineno})"
    return f"{one_line(error)}{where}"
