"""An endpoint that tests speak to: the real program, and OpenAI's client of it."""

from __future__ import annotations

import contextlib
import http.client
import resource
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import ROOT, command, environment

pytest.importorskip("aiohttp", reason="the endpoint needs aiohttp")
openai = pytest.importorskip("openai", reason="it is tested with OpenAI's client")

START_S, SOON_S = 120.0, 20.0
MODEL = ["model=gpt", "model.layers=1", "model.hidden=64", "model.heads=2", "device=cpu", "precision=fp32"]


class Running:
    """The program, and a client of it. folder: of its model, where it has one."""

    folder: Path

    def __init__(self, folder: Path, model: Sequence[str] = MODEL, limits: tuple[int, int] | None = None):
        """limits: of its open files, if not this process's."""
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command("runner=serve", "runner.port=0", "system=orca", *model),
                cwd=ROOT, env=environment(), stdout=output, stderr=output, start_new_session=True,
                preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, limits) if limits else None,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while "listening on " not in (said := self.output.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)
        self.address = said.partition("listening on ")[2].split()[0]
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=60)

    def get(self, path: str) -> tuple[int, str]:
        status, _, text = self.sent("GET", path)
        return status, text

    def sent(self, method: str, path: str, body: bytes = b"") -> tuple[int, http.client.HTTPMessage, str]:
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=SOON_S)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.headers, response.read().decode()

    def metric(self, name: str) -> float:
        lines = self.get("/metrics")[1].splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"opweave_{name} "))

    def until(self, name: str, value: float) -> None:
        deadline = time.monotonic() + SOON_S
        while self.metric(name) != value:
            assert time.monotonic() < deadline, (name, self.metric(name))
            time.sleep(0.02)

    def tokens(self, **body: object) -> list[int]:
        completion = self.client.completions.create(model="gpt", **body)  # type: ignore[call-overload]
        return list(completion.choices[0].token_ids)
