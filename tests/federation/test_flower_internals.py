"""What feddar knows of Flower's internals still holds: where a new version breaks it, a test here says what to do."""

from __future__ import annotations

import inspect
import re
import time
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import feddar
from feddar.errors import UserError
from feddar.federation.links.flower import internals
from feddar.federation.links.flower.programs import free_port
from helpers.gates import serving

PUBLIC = {"app", "clientapp", "serverapp", "simulation"}

SIGNATURES = {
    "flwr.supernode.cli.flower_supernode.flower_supernode": "",
    "flwr.supernode.runtime.run_clientapp.pull_task_input": "client",
    "flwr.supernode.runtime.run_clientapp.push_message": "client message context",
    "flwr.supernode.runtime.run_clientapp.push_task_output": "client context sub_status details",
    "flwr.supercore.inflatable.inflatable_utils.pull_objects": "object_ids pull_object_fn max_concurrent_pulls "
    "max_time max_tries_per_object initial_backoff backoff_cap",
    "flwr.supercore.inflatable.inflatable_utils.pull_and_inflate_object_from_tree": "object_tree pull_object_fn "
    "confirm_object_received_fn return_type max_concurrent_pulls max_time max_tries_per_object initial_backoff "
    "backoff_cap",
    "flwr.supercore.interceptors.RuntimeTokenHttpInterceptor": "token",
    "flwr.supercore.interceptors.RuntimeVersionHttpInterceptor": "component_name",
    "flwr.supercore.interceptors.SuperExecAuthHttpInterceptor": "master_secret protected_methods",
    "flwr.supercore.protobuf.client.ProtobufClient": "base_url interceptors verify timeout retry_invoker",
    "flwr.supercore.runtime.RuntimeHttpClient.AcquireTask": "self request",
    "flwr.supercore.runtime.RuntimeHttpClient.SendTaskHeartbeat": "self request",
    "flwr.supercore.control.ControlHttpClient.RegisterNode": "self request",
    "flwr.supercore.control.ControlHttpClient.StartRun": "self request",
    "flwr.cli.build.build_fab_from_disk": "app",
    "flwr.common.serde.user_config_to_proto": "user_config",
    "flwr.supercore.fab.Fab": "hash_str content verifications",
    "flwr.superlink.cli.flower_superlink._parse_superlink_lifespan_config": "",
    "flwr.superlink.main.create_app": "config superlink_lifespan_class",
    "flwr.superlink.grid.http_grid.HttpGrid._connect": "self",
    "flwr.superlink.runtime.run_serverapp": "runtime_api_address log_queue token insecure certificates parent_pid "
    "runtime_dependency_install",
}

FIELDS = {
    "flwr.proto.runtime_pb2.AcquireTaskRequest": {"supported_task_types"},
    "flwr.proto.runtime_pb2.AcquireTaskResponse": {"token"},
    "flwr.proto.runtime_pb2.SendTaskHeartbeatRequest": set(),
    "flwr.proto.control_pb2.RegisterNodeRequest": {"public_key", "name"},
    "flwr.proto.control_pb2.StartRunRequest": {"fab", "override_config"},
}

VALUES = {
    "flwr.common.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION": internals.CLIENT_APP_FAILED,
    "flwr.common.constant.ErrorCode.MESSAGE_UNAVAILABLE": internals.HALF_SENT,
    "flwr.common.constant.ErrorCode.NODE_UNAVAILABLE": internals.NODE_UNAVAILABLE,
    "flwr.common.constant.SubStatus.COMPLETED": "completed",
    "flwr.supercore.constant.TaskType.CLIENT_APP": "flwr-clientapp",
    "flwr.supercore.constant.TaskType.SERVER_APP": "flwr-serverapp",
    "flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER": internals.PUBLIC_KEY_HEADER,
    "flwr.superlink.routers.fleet.router.router.prefix": internals.FLEET_CALLS,
    "flwr.supercore.error.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED": int(internals.ALREADY_CONNECTED[-5:-1]),
}

WORDS = {
    "flwr.supernode.start_client_internal": [
        internals.CONNECTED,
        internals.RECEIVING,
        internals.SENT,
        *internals.NOT_SENT,
    ],
    "flwr.supernode.cli.flower_supernode": [internals.BAD_PRIVATE_KEY],
    "flwr.supernode.fleet_http_connection": ['f"[code: {flower_error.code}]', "FleetHttpClient.from_server_address("],
    "flwr.supercore.retry.http_retry": [
        internals.CONNECTED_AGAIN,
        internals.NO_CONNECTION,
        internals.NO_TLS,
        "lambda: exponential(max_delay=MAX_RETRY_DELAY)",
    ],
    "flwr.supercore.protobuf.client": ["self._client = httpx.Client(", "verify=verify,"],
    "flwr.superlink.grid.http_grid": ["self._connect()", "cast(RuntimeHttpClient, self._client)"],
    "flwr.supercore.telemetry": ["FLWR_TELEMETRY_ENABLED"],
    "flwr.supercore.update_check": ["FLWR_DISABLE_UPDATE_CHECK"],
    "flwr.supercore.superexec.run_superexec": ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"],
}


def wrong(what: str) -> str:
    """Return what to do where something has changed."""
    return (
        f"{what}. feddar relies on internals of flwr {internals.VERSION}, and flwr {version('flwr')} is installed: "
        f"read what changed there, adapt {internals.__file__} and this test, run `make test test-more` and `python -m "
        "benchmarks flower_overhead`, and then set VERSION there and the pins in pyproject.toml and requirements.lock."
    )


def found(path: str) -> Any:
    """Return what has this dotted name; a failure says that it is gone."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            if not hasattr(value, name):
                pytest.fail(wrong(f"there is no {path} any more"))
            value = getattr(value, name)
        return value
    return pytest.fail(wrong(f"there is no {path} any more"))


def test_the_version_is_the_one_that_was_read() -> None:
    assert version("flwr") == internals.VERSION, wrong("the installed version is another one")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    assert f"flwr=={internals.VERSION}" in extras["flower"]
    assert f"flwr[simulation]=={internals.VERSION}" in extras["simulation"]


@pytest.mark.parametrize(("path", "expected"), SIGNATURES.items())
def test_functions_take_what_they_took(path: str, expected: str) -> None:
    taken = list(inspect.signature(found(path)).parameters)
    assert taken == expected.split(), wrong(f"{path} now takes {taken}")


@pytest.mark.parametrize(("path", "expected"), FIELDS.items())
def test_messages_have_the_fields_they_had(path: str, expected: set[str]) -> None:
    fields = set(found(path).DESCRIPTOR.fields_by_name)
    assert expected <= fields, wrong(f"{path} now has the fields {sorted(fields)}")


@pytest.mark.parametrize(("path", "expected"), VALUES.items())
def test_values_are_what_they_were(path: str, expected: object) -> None:
    assert found(path) == expected, wrong(f"{path} is now {found(path)!r}")


@pytest.mark.parametrize(("module", "words"), WORDS.items())
def test_programs_say_what_they_said(module: str, words: list[str]) -> None:
    try:
        source = inspect.getsource(import_module(module))
    except ModuleNotFoundError:
        pytest.fail(wrong(f"there is no {module} any more"))
    for each in words:
        assert each in source, wrong(f"{each!r} is no longer in {module}")


def test_a_supernode_sleeps_where_it_did() -> None:
    source = inspect.getsource(import_module("flwr.supernode.start_client_internal"))
    naps = re.findall(r"\btime\.\w+\([^)]*\)", source)
    assert naps == ["time.sleep(3)", "time.sleep(0.5)", "time.sleep(0.5)"], wrong(f"a SuperNode's loop has now {naps}")


def test_nothing_else_of_feddar_uses_internals() -> None:
    root, here = Path(feddar.__file__).parent, Path(internals.__file__)
    used = {
        (str(file.relative_to(root)), name)
        for file in root.rglob("*.py")
        if file != here
        for name in re.findall(r"^\s*(?:from|import) flwr\.?(\w*)", file.read_text(), flags=re.M)
        if name not in PUBLIC
    }
    assert used == set(), "what is not public of Flower belongs into internals.py"


def test_another_version_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.require_version()
    monkeypatch.setattr(internals, "version", lambda name: "9.9.9")
    with pytest.raises(UserError, match=rf"works with Flower {internals.VERSION}, not 9\.9\.9: pip install"):
        internals.require_version()


def test_pieces_of_a_message_are_looked_for_soon() -> None:
    from flwr.supercore.inflatable import inflatable_utils

    internals.hasten_pulls()
    missing = {"a", "b"}

    def pull(piece: str) -> bytes:
        if piece in missing:
            missing.remove(piece)
            raise inflatable_utils.ObjectUnavailableError(piece)
        return piece.encode()

    assert inflatable_utils.pull_objects(["a", "b"], pull) == {"a": b"a", "b": b"b"}
    defaults = inflatable_utils.pull_objects.__kwdefaults__
    assert defaults is not None
    assert (defaults["initial_backoff"], defaults["max_time"]) == (0.05, 7200)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Let time pass only by sleeping, and give how long each sleep was."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    yield slept
    monkeypatch.undo()


def test_a_supernode_asks_often_at_first_and_seldom_later(naps: list[float]) -> None:
    clock = internals._Clock()
    while sum(naps) < 60:
        clock.sleep(3)
    assert naps[:10] == [0.1] * 10
    assert sorted(naps) == naps
    assert naps[-1] == 3
    # A message came, and is worked on for long; its reply is looked for as often as Flower would at least.
    del naps[:]
    while sum(naps) < 60:
        clock.sleep(0.5)
    assert (naps[0], naps[-1]) == (0.1, 0.5)
    # It was sent, and the next one may come soon.
    clock.sleep(3)
    assert naps[-1] == 0.1


def test_a_proxy_is_not_asked_for_programs_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.proto.runtime_pb2 import AcquireTaskResponse
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def acquire(request: Request) -> Response:
        return Response(AcquireTaskResponse(token="ticket").SerializeToString())

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    app = Starlette(routes=[Route("/v1/runtime/acquire-task", acquire, methods=["POST"])])
    port = free_port()
    with serving(app, host="127.0.0.1", port=port), internals.messages_of(f"127.0.0.1:{port}", b"secret" * 8) as client:
        assert internals.acquire(client) == "ticket"
