"""runner=serve: an endpoint as OpenAI's for one model under one system, until it is told to end."""

from __future__ import annotations

import os
import resource
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from conf.text import first_line
from results.cell import Cell
from runners.cell.messages import Show, decoded, encoded
from runners.checks import BadRequest, at_least
from runners.machine.device import visible
from runners.machine.installation import IMPORT_PATH
from runners.request.request import Request

from .base import Showing

LARGEST_PORT = 65535
BAD_REQUEST, INTERRUPTED = 2, 130  # exit statuses, as of any command


@dataclass(frozen=True)
class ServeOptions:
    """host, port: where to listen; port 0 takes any that is free."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host:
            raise BadRequest("runner.host= names no address: 0.0.0.0 is every one of this machine")
        at_least("runner.port", self.port, 0)
        if self.port > LARGEST_PORT:
            raise BadRequest(f"runner.port={self.port} is more than {LARGEST_PORT}")


class Serve(Showing):
    """Serves as the process of the command line, which the signals are sent to.

    Its program begins anew: CUDA has read which devices are visible when they were counted.
    """

    name: ClassVar[str] = "serve"
    Options: ClassVar[type] = ServeOptions
    options: ServeOptions

    def run(self, request: Request) -> int:
        if len(request.cells) > 1:
            raise BadRequest("runner=serve serves one model under one system: ask for no sweep")
        if find_spec("aiohttp") is None:
            raise BadRequest("runner=serve needs aiohttp: pip install 'opweave[serving]'")
        (cell,) = request.cells
        if cell.batch != 1:
            raise BadRequest(f"batch={cell.batch} is of calls: what a server batches is system.max_batch_size")
        gpus = [visible(gpu) for gpu in (request.options.gpus or (0,))[: request.num_gpus]]
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | dict(os.environ)  # as for any cell's process
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus) if cell.device == "cuda" else ""
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*IMPORT_PATH, environment.get("PYTHONPATH")]))
        with self._listener() as listener:  # before the model, which may take minutes
            listener.set_inheritable(True)
            arguments = [str(listener.fileno()), encoded(Show(cell))]
            sys.stdout.flush()
            sys.stderr.flush()
            os.execve(sys.executable, [sys.executable, "-P", "-m", __name__, *arguments], environment)

    def _listener(self) -> socket.socket:
        """Raises BadRequest where nothing can listen."""
        host, port = self.options.host, self.options.port
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            is_six = all(family == socket.AF_INET6 for family, *_ in places)
            family, has_both = (socket.AF_INET6, socket.has_dualstack_ipv6()) if is_six else (socket.AF_INET, False)
            return socket.create_server((host, port), family=family, dualstack_ipv6=has_both)  # :: is of both
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)  # Python adds the address
            is_unknown = error.errno is not None and error.errno < 0  # a name's error, not the system's
            key = f"runner.host={host}" if is_unknown else f"runner.port={port}"
            raise BadRequest(f"{key}: nothing can listen at {_address(host, port)}: {why}") from error


def served(cell: Cell, listener: socket.socket) -> int:
    """Serve one cell to its end; returns the exit status. Raises BadRequest."""
    import asyncio

    from models import BadModel
    from models.folder import ends_of, tokenizer_of
    from models.registry import FOLDER
    from runners.serving.endpoint import Endpoint
    from runners.serving.session import server_of
    from runners.serving.text import Bytes
    from systems.base import BadOption, Unsupported
    from systems.preparing import lacks_memory
    from systems.serving.parallel import EngineEnded

    folder = Path(str(cell.model.get("path"))).expanduser() if cell.model.name == FOLDER else None
    told("making the model")
    try:
        server = server_of(cell)
        text = Bytes() if folder is None else tokenizer_of(folder) or Bytes(ends_of(folder))
    except (BadModel, BadOption) as error:
        raise BadRequest(str(error)) from error
    except (Unsupported, MemoryError, RuntimeError) as error:
        if not isinstance(error, Unsupported | EngineEnded) and not lacks_memory(error):
            raise
        told(f"{cell.system.choice} on {cell.model.choice}: {first_line(error)}")
        return BAD_REQUEST if isinstance(error, Unsupported) else 1
    raise_file_limit()
    host, port = listener.getsockname()[:2]
    name = cell.model.choice if folder is None else folder.resolve().name
    endpoint = Endpoint(server, name, text, told)
    error_of = asyncio.run(endpoint.run(listener, lambda: told(f"listening on http://{_address(host, port)}")))
    if error_of is not None:
        told(f"the engine has stopped: {type(error_of).__name__}: {first_line(error_of)}")
    return int(error_of is not None)


def raise_file_limit() -> None:
    """Let this process have as many files, and so connections, as the system lets it have."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if few == most:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:  # without a limit, some systems have one of their own
        told(f"{few} files may be open at once, a connection is one: {error}")
    else:
        told(f"{most} files may be open at once in place of {few}: a connection is one")


def _address(host: str, port: int) -> str:
    """As URLs have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def told(line: str) -> None:
    """Print a line for whoever has started it."""
    print(f"opweave: {line}", file=sys.stderr, flush=True)


def main(descriptor: int, message: str) -> int:
    """Serve the cell of a message to its end; returns the exit status. descriptor: of the socket that listens."""
    command = decoded(message)
    assert isinstance(command, Show)
    try:
        with socket.socket(fileno=descriptor) as listener:
            listener.set_inheritable(False)
            return served(command.cell, listener)
    except BadRequest as error:
        told(str(error))
        return BAD_REQUEST
    except KeyboardInterrupt:
        told("interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
