"""Writes the job folder that a FLARE administrator submits: a study and a few lines of configuration.

Sites have feddar installed; the job does not contain it. By default the job has one code file that names the two
classes to run, because FLARE allows a job to run classes that are not FLARE's own only if it brings code, which the
submitter must be allowed to do. If sites allow no code from outside, ``code=False`` writes a job without any; then each
site and the server must list ``ALLOWED`` under ``class_allow_list`` in their ``local/resources.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feddar.errors import UserError

STUDY = "study.toml"
RESULTS = "feddar"
FAILURE = "failure.txt"
ALLOWED = ("nvflare.collab", "feddar.federation.links.nvflare.app")

_CODE = "feddar_job"
_CODE_TEXT = '''"""The two classes of this job. All they do is part of feddar, which every site has installed."""

from feddar.federation.links.nvflare.app import Server, Site

__all__ = ["Server", "Site"]
'''
_START_SECONDS = 300
"""How long FLARE waits for all sites at the start; its default of a minute is short for a busy machine."""


def write_job(
    study: str,
    out: Path,
    sites: Sequence[str] | None = None,
    min_sites: int = 1,
    options: Mapping[str, Any] | None = None,
    code: bool = True,
) -> Path:
    """Write a job for these sites, or for all that are connected when it starts, to a new folder; return the folder.

    FLARE starts it when ``min_sites`` of them are connected. ``options`` are passed on to the coordinator.
    """
    _check(out, sites, min_sites)
    module = _CODE if code else ALLOWED[1]
    name = out.resolve().name
    meta = {
        "name": name,
        "resource_spec": {},
        "min_clients": min_sites,
        "deploy_map": {"app": ["server", *sites] if sites else ["@ALL"]},
    }
    arguments = {"name": name, "options": dict(options or {})}
    server = {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": "nvflare.collab.runtime.controller.CollabController",
                "args": {"server_obj_id": "coordinator", "sync_task_timeout": _START_SECONDS},
            }
        ],
        "components": [{"id": "coordinator", "path": f"{module}.Server", "args": arguments}],
    }
    executor = {"path": "nvflare.collab.runtime.executor.CollabExecutor", "args": {"client_obj_id": "site"}}
    site = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "site", "path": f"{module}.Site", "args": {}}],
    }
    files = {
        "meta.json": _json(meta),
        "app/config/config_fed_server.json": _json(server),
        "app/config/config_fed_client.json": _json(site),
        f"app/{STUDY}": study,
    }
    if code:
        files[f"app/custom/{_CODE}.py"] = _CODE_TEXT
    for path, text in files.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text, encoding="utf-8")
    return out


def _check(out: Path, sites: Sequence[str] | None, min_sites: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already: name a new folder for the job.")
    names = list(sites or [])
    if len(set(names)) < len(names):
        raise UserError(f"a site is named twice ({', '.join(names)}): name each once.")
    reserved = [name for name in names if name.lower() in {"server", "@all"}]
    if reserved:
        raise UserError(f"'{reserved[0]}' cannot be the name of a site: FLARE uses it otherwise.")
    if min_sites < 1 or (names and min_sites > len(names)):
        raise UserError(f"a job cannot wait for {min_sites} of {len(names) or 'all'} sites: ask for 1 or more of them.")


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
