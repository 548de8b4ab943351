"""runner=serve: an endpoint as OpenAI's for one model under one system, until it is told to end."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from results.cell import Cell
from runners.checks import BadRequest, at_least
from runners.machine.device import visible
from runners.request.request import Request

from .base import Showing

LARGEST_PORT = 65535


@dataclass(frozen=True)
class ServeOptions:
    """host, port: where to listen; port 0 takes any that is free."""

    host: str
    port: int

    def __post_init__(self) -> None:
        at_least("runner.port", self.port, 0)
        if self.port > LARGEST_PORT:
            raise BadRequest(f"runner.port={self.port} is more than {LARGEST_PORT}")


class Serve(Showing):
    """Serves in the process of the command line, which the signals are sent to."""

    name: ClassVar[str] = "serve"
    Options: ClassVar[type] = ServeOptions
    options: ServeOptions

    def run(self, request: Request) -> int:
        if len(request.cells) > 1:
            raise BadRequest("runner=serve serves one model under one system: ask for no sweep")
        if find_spec("aiohttp") is None:
            raise BadRequest("runner=serve needs aiohttp: pip install 'opweave[serving]'")
        (cell,) = request.cells
        gpus = [visible(gpu) for gpu in (request.options.gpus or (0,))[: request.num_gpus]]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus) if cell.device == "cuda" else ""
        with self._listener() as listener:  # before the model, which may take minutes
            return served(cell, listener)

    def _listener(self) -> socket.socket:
        """Raises BadRequest where nothing can listen."""
        host, port = self.options.host, self.options.port
        try:
            return socket.create_server((host, port))
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)  # Python adds the address
            raise BadRequest(f"runner.port={port}: nothing can listen there on {host}: {why}") from error


def served(cell: Cell, listener: socket.socket) -> int:
    """Serve one cell to its end; returns the exit status. Raises BadRequest."""
    import asyncio

    from models import BadModel
    from models.folder import tokenizer_of
    from models.registry import FOLDER
    from runners.serving.endpoint import Endpoint
    from runners.serving.session import server_of
    from runners.serving.text import Bytes
    from systems.base import BadOption, Unsupported

    told("making the model")
    try:
        server = server_of(cell)
        text = tokenizer_of(Path(str(cell.model.get("path"))).expanduser()) if cell.model.name == FOLDER else None
    except (BadModel, BadOption) as error:
        raise BadRequest(str(error)) from error
    except (Unsupported, MemoryError) as error:
        told(f"{cell.system.choice} on {cell.model.choice}: {error}")
        return int(isinstance(error, MemoryError))
    host, port = listener.getsockname()[:2]
    endpoint = Endpoint(server, cell.model.choice, text or Bytes())
    error_of = asyncio.run(endpoint.run(listener, lambda: told(f"listening on http://{host}:{port}")))
    if error_of is not None:
        told(f"the engine has stopped: {type(error_of).__name__}: {error_of}")
    return int(error_of is not None)


def told(line: str) -> None:
    """Print a line for whoever has started it."""
    print(f"opweave: {line}", file=sys.stderr, flush=True)
