"""Makes flags from settings, and settings from flags.

Every option of `run` is a field of ``Settings`` or of a source's options, and is turned into a flag here; so its name,
default, bounds and help are defined in one place. The settings also check the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from feddar.cli.console import allow
from feddar.cli.help import FEW, HelpAll
from feddar.data.sources import BUILT_IN, SOURCES, find_source, resolve_options, sources_with
from feddar.data.sources.source import Source, flag_of
from feddar.data.table_options import learned_domains
from feddar.errors import UserError
from feddar.methods import LEARNING
from feddar.settings import DataSettings, Flag, Settings, checked, overridden, read_config

Command = Callable[..., None]


def with_options(
    *models: type[BaseModel], of_sources: bool = False, without: tuple[str, ...] = (), default: str | None = None
) -> Callable[[Command], Command]:
    """Add a flag for every field of the models and, if ``of_sources``, for every option of a source.

    The command gets the values that were given as one dict, ``given``. Help says that fields of the models have this
    ``default``, where the command takes it from elsewhere.
    """

    def decorate(command: Command) -> Command:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        taken = {p.name for p in own}
        fields = [
            (model, name, _help(model, name, of_sources, default)) for model in models for name in model.model_fields
        ]
        fields += _fields_of_sources() if of_sources else []
        flags = [_flag(*each) for each in fields if each[1] not in taken.union(without)]

        if len(own) + len(flags) > FEW:
            flags.append(
                inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=HelpAll)
            )

        def call(**values: Any) -> None:
            mine = {name: values.pop(name) for name in list(values) if name in taken}
            command(**mine, given={name: value for name, value in values.items() if value is not None})

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
        return call

    return decorate


def _flag(model: type[BaseModel], name: str, help_text: str) -> inspect.Parameter:
    flag, field, shown = flag_of(name), model.model_fields[name], _shown(model, name)
    more: Any = {"help": help_text, "rich_help_panel": shown.panel, "hidden": not shown.first}
    kinds = kinds_of(field)
    if kinds == [bool]:
        annotation: Any = Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", **more)]
    else:
        chosen = not isinstance(kinds[0], type)
        metavar = "|".join(map(str, kinds)) if chosen else kinds[0].__name__.upper()
        names = completing(*map(str, kinds)) if chosen else completing(*shown.names) if shown.names else None
        annotation = Annotated[str | None, typer.Option(flag, metavar=metavar, autocompletion=names, **more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def kinds_of(field: FieldInfo) -> list[Any]:
    """Return the types that a field's value may have but None, or the choices there are.

    >>> from feddar.settings import Settings
    >>> kinds_of(Settings.model_fields["lr"]), kinds_of(Settings.model_fields["optimizer"])
    ([<class 'float'>], ['adam', 'sgd'])
    """
    given_as = get_args(field.annotation) or (field.annotation,)
    return [one for kind in given_as if kind is not NoneType for one in get_args(kind) or (kind,)]


def _shown(model: Any, name: str) -> Flag:
    """Return how a field is shown: as it says itself, or else as its model says."""
    own = [each for each in model.model_fields[name].metadata if isinstance(each, Flag)]
    return own[0] if own else model.flag_of_fields


def completing(*names: str) -> Callable[[str], list[str]]:
    """Return what completes one of these names, or the last of several that are separated by commas."""

    def complete(incomplete: str) -> list[str]:
        before = incomplete[: incomplete.rfind(",") + 1]
        return [before + name for name in names]

    return complete


def completing_data(incomplete: str) -> list[str]:
    """Return the built-in cohorts that may be meant, beside files; where there is none, the shell completes files."""
    names = [name for name in BUILT_IN if name.startswith(incomplete)]
    files = [path.name for path in Path().glob(f"{incomplete}*") if not path.name.startswith(".")]
    return names + files if names else []


def _help(model: type[BaseModel], name: str, of_sources: bool = False, default: str | None = None) -> str:
    """Return the description of an option with its default; commands and sources have some defaults of their own."""
    field = model.model_fields[name]
    default = default or _shown(model, name).default or _in_words(field.default)
    by_source = {source.name: source.settings[name] for source in SOURCES if of_sources and name in source.settings}
    listed = "; ".join(each for each in (default, _listed(by_source)) if each)
    return f"{field.description} [default: {listed}]" if listed else f"{field.description}"


def _listed(by_source: dict[str, Any]) -> str:
    """Return defaults with the sources that have them, as '0.001 (exam), 0.03 (eicu)'."""
    values = list(dict.fromkeys(by_source.values()))
    having = [", ".join(source for source, each in by_source.items() if each == value) for value in values]
    return ", ".join(f"{_in_words(value)} ({names})" for value, names in zip(values, having, strict=True))


def _in_words(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "" if default is None else str(default)


def _fields_of_sources() -> list[tuple[type[BaseModel], str, str]]:
    """Return the model, name and help of every option that any source has."""
    models = {name: source.options for source in SOURCES for name in source.options.model_fields}
    return [(model, name, _help_of_sources(model, name)) for name, model in models.items()]


def _help_of_sources(model: type[BaseModel], name: str) -> str:
    """Return an option's help, with its sources if not all have it, and with each default if they differ."""
    having = sources_with(name)
    defaults = {source.name: source.options.model_fields[name].default for source in having}
    prefix = "" if len(having) == len(SOURCES) else f"{', '.join(source.name for source in having)}: "
    same = len(set(defaults.values())) == 1
    return f"{prefix}{_help(model, name, default=None if same else _listed(defaults))}"


def given_for(model: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """Return the given values that are fields of the model."""
    return {name: value for name, value in given.items() if name in model.model_fields}


def _learning(asked: dict[str, Any], domain: str | None) -> dict[str, Any]:
    """Return settings of training with as many components, and a method that learns them, as ``domain`` asks for."""
    count = learned_domains(domain)
    if count is None:
        return asked
    if asked.get("components", count) != count:
        raise UserError(f"--domain {domain} and --components {asked['components']} say two numbers: leave out one.")
    return {"method": LEARNING} | asked | {"components": count}


class Chosen(NamedTuple):
    """The data source, its options, and the settings of training."""

    source: Source
    options: DataSettings
    settings: Settings


def choose(data: str, config: Path | None, given: dict[str, Any]) -> Chosen:
    """Combine options; each of these overrides those before it: defaults, the source's defaults, the file, flags.

    An encoder that is code is allowed by its flag, and not by the file.
    """
    from feddar.models.devices import default_jobs
    from feddar.models.encoders.own import require_allowed

    source, tables = find_source(data), read_config(config) if config else {}
    training = given_for(Settings, given)
    others = {name: value for name, value in given.items() if name not in training}
    options = resolve_options(source, data, others, tables.get("data"))
    asked = overridden(source.settings | tables.get("training", {}), training)
    settings = checked(Settings, _learning(asked, getattr(options, "domain", None)))
    if not {"threads", "jobs"} & asked.keys():
        settings = settings.model_copy(update={"jobs": default_jobs(settings.device)})
    allow([training["encoder"]] if "encoder" in training else None)
    require_allowed(settings.encoder)
    return Chosen(source, options, settings)
