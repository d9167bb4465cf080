"""The code of a FLARE job for tests: sites that compute on bytes, and a server that writes down what it gets.

It takes the place of the job's own file, as a FLARE user would change a job; nothing of the engine is replaced.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from feddar.errors import TrainingError
from feddar.federation.links.link import Handler
from feddar.federation.links.nvflare import app

FAULTY = "site-2"
LARGE = 50_000_000


class Site(app.Site):
    def open(self, options: dict[str, str]) -> Handler:
        content = Path(options["data"]).read_bytes()

        def handle(message: bytes) -> bytes:
            fault = message if options["name"] == FAULTY else b""
            if fault == b"raise":
                raise ValueError("patient 17 is called Smith")
            if fault in {b"hang", b"long"}:
                time.sleep(4 if fault == b"hang" else 7)
            if fault == b"die":
                os._exit(1)
            return content + message[::-1]

        return handle


class Server(app.Server):
    def run(self, link: app.SiteLink, options: dict[str, Any]) -> None:
        out = Path(options["out"])
        (out / "study.toml").write_bytes(Path(options["study"]).read_bytes())
        if "fail" in options:
            raise TrainingError(options["fail"])
        record: dict[str, Any] = {"options": options, "sites": link.sites()}
        asked = {
            "echo": (b"abc\x00\xff", 30),
            "raise": (b"raise", 30),
            "hang": (b"hang", 2),
            "after": (b"abc", 30),
            "long": (b"long", 30),
            "large": (bytes(LARGE), 120),
            "die": (b"die", 600),
            "dead": (b"abc", 30),
        }
        for name in options.get("ask", asked):
            message, timeout = asked[name]
            started = time.monotonic()
            record[name] = {}
            for answer in link.ask(message, [*link.proxies, "nobody"], timeout):
                content = len(answer.content) if name == "large" else answer.content.hex()
                record[name][answer.site] = [content, answer.problem, time.monotonic() - started]
        record["left"] = link.sites()
        (out / "record.json").write_text(json.dumps(record))
