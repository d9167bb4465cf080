"""Requests and replies as bytes: a JSON header and tensors as safetensors, for pipes and networks.

Bytes from elsewhere are not trusted: anything that is not such a message is a ``MessageError``, and no pickle is ever
loaded.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from feddar.algorithm.names import named_weights, reply_from, request_tensors
from feddar.algorithm.protocol import Phase, Reply, Request
from feddar.errors import TrainingError
from feddar.models.parameters import Tensors

_LENGTH = struct.Struct(">Q")
NUMBERS = ("round", "step", "seed", "best", "up_to")
"""The fields of a request that are numbers."""


class MessageError(TrainingError):
    """Raised for bytes that are not a valid message."""


def pack(about: dict[str, Any], tensors: Tensors | None = None) -> bytes:
    """Return a message of a header, which JSON can hold, and tensors."""
    header = json.dumps(about).encode()
    body = save({name: tensor.contiguous() for name, tensor in (tensors or {}).items()})
    return b"".join((_LENGTH.pack(len(header)), header, body))


def unpack(content: bytes) -> tuple[dict[str, Any], Tensors]:
    """Undo ``pack``: return the header and the tensors."""
    try:
        (length,) = _LENGTH.unpack_from(content)
        end = _LENGTH.size + length
        about, tensors = json.loads(content[_LENGTH.size : end]), load(bytes(content[end:]))
    except (struct.error, ValueError, SafetensorError, KeyError, RecursionError) as error:
        raise MessageError(f"a message of {len(content):,} bytes cannot be read: {error}") from None
    if not isinstance(about, dict):
        raise MessageError("a message has no header.")
    return about, tensors


def request_header(request: Request) -> dict[str, Any]:
    """Return the header of a request; its tensors are ``names.named_request``."""
    numbers = {name: getattr(request, name) for name in NUMBERS}
    return {"phase": asdict(request.phase), "withheld": list(request.withheld)} | numbers


def as_request(about: dict[str, Any], tensors: Tensors) -> Request:
    """Make a request from its header and tensors; wrong types in the header are a ``MessageError``."""
    try:
        phase, numbers = Phase(**about["phase"]), {name: about[name] for name in NUMBERS}
    except (KeyError, TypeError) as error:
        raise MessageError(f"a request has no phase, {', '.join(NUMBERS)}: {error}") from None
    if type(phase.epochs) is not int or not all(type(number) is int and number >= 0 for number in numbers.values()):
        raise MessageError(f"a request has a {', '.join(NUMBERS)} or epochs that is no number.")
    withheld = about.get("withheld", [])
    if not isinstance(withheld, list) or not all(type(number) is int and number >= 0 for number in withheld):
        raise MessageError("a request has withheld domains that are no numbers.")
    return Request(phase, **numbers, **request_tensors(tensors), withheld=tuple(withheld))


def reply_header(reply: Reply) -> dict[str, Any]:
    """Return the header of a reply; its tensors are ``names.named_reply``."""
    return {"weights": named_weights(reply), "loss": reply.loss, "samples": reply.samples}


def as_reply(clients: tuple[str, ...], about: dict[str, Any], tensors: Tensors) -> Reply:
    """Make a reply from its header and tensors; wrong types in the header are a ``MessageError``."""
    loss, samples, weights = (about.get(name) for name in ("loss", "samples", "weights"))
    # Floats only: an integer in JSON has no limit, and may be too large to be converted to a float.
    if not isinstance(loss, float) or type(samples) is not int or not isinstance(weights, dict):
        raise MessageError("a reply has no loss, samples and weights.")
    if samples < 0 or not all(isinstance(weight, float) for weight in weights.values()):
        raise MessageError("a reply has samples or weights that are no counts.")
    try:
        return reply_from(clients, tensors, weights, loss, samples)
    except KeyError as error:
        raise MessageError(f"a reply has a weight without its tensors, or tensors without a weight: {error}.") from None
