"""The user's own encoder, given as MODULE:NAME, for example ``my_nets:Chest``.

Importing a module runs it, and the name may stand in a file of somebody else's: a study, a configuration, a run. So
nothing is imported here that whoever runs the command has not allowed by its name (``allow_code``). Giving the name as
an argument, ``--encoder`` or ``encoder=``, allows it.
"""

from __future__ import annotations

import copy
import os
import re
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import nn

from feddar.errors import UserError, one_line
from feddar.methods import nearest

PERMITTED = "FEDDAR_ALLOW_CODE"
"""The environment variable with the names that are allowed, so that processes which are started from here know them."""
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


def allow_code(*names: str | None) -> None:
    """Allow these encoders, each by its name MODULE:NAME, to be imported from now on; other names are left out."""
    new = [_without_flip(name) for name in names if name is not None and ":" in name]
    if new:
        os.environ[PERMITTED] = ",".join(dict.fromkeys([*_permitted(), *new]))


def require_allowed(name: str | None) -> None:
    """Refuse an encoder that is code, and that nobody here has allowed."""
    if name is None or ":" not in name:
        return
    code = _without_flip(name)
    if not _NAME.fullmatch(code):  # also so that nobody is told to copy a command that is more than a name
        raise UserError(f"encoder {name!r:.100} must read MODULE:NAME, as in my_nets:Chest.")
    if code not in _permitted():
        raise UserError(
            f"the encoder {code} is code, which importing it runs: read it first, and if you trust it, allow it with "
            f"--allow-code {code} (in Python, feddar.allow_code('{code}'))."
        )


def _permitted() -> list[str]:
    return [name.strip() for name in os.environ.get(PERMITTED, "").split(",") if name.strip()]


def _without_flip(name: str) -> str:
    return name.partition("+")[0]


def own_encoder(name: str) -> nn.Module:
    """Import MODULE:NAME, and return it if it is a torch module, else what it returns when called without arguments."""
    require_allowed(name)
    home, _, attribute = name.partition(":")
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
