"""From the arguments of the command line to an exit status."""

import io
import math
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from importlib.metadata import version
from types import FrameType

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig

from conf import FOLDER, GROUPS, folders
from runners.checks import BadRequest
from runners.execute import execute, is_recorded
from runners.request.composition import NULL, Composition, composing, current
from runners.request.explain import check_arguments, check_files, explain
from runners.request.help import register
from runners.request.request import Request
from runners.request.resolve import resolve

# conf/hydra/launcher/ has presets under the names that the launchers' own plugins gave their schemas. To be held to those is
# what Hydra warns of, and what is wanted.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")

register()

BAD_REQUEST = 2
INTERRUPTED = 130
TOGETHER_S = 1.0  # two interrupts in it are one press
SWEEP = ("-m", "--multirun")
SINGLE = (bool, int, float, str, QuotedString, type(None))
EMPTY = "''"
NULL_ALONE = f"tag({NULL},choice({EMPTY}))"


@hydra.main(version_base="1.3", config_path=str(FOLDER), config_name="config")
def compose(config: DictConfig) -> None:
    """Hydra's task for a single cell. It only resolves; the request runs outside of Hydra, so that errors there are ours."""
    current().requests.append(resolve(config, HydraConfig.get().runtime.choices).decided())


def swept(arguments: list[str]) -> list[str]:
    """Of a sweep each single value of a model's, system's or runner's option as a sweep over that one value.

    Hydra applies what is no sweep before the swept file is chosen, which may be the only one that has the option.
    """
    if not any(argument in SWEEP or argument.startswith("experiment=") for argument in arguments):
        return arguments
    parser = OverridesParser.create()
    rewritten = []
    for argument in arguments:
        key, _, text = argument.partition("=")
        rewritten.append(argument)
        if "." in key and key.partition(".")[0] in GROUPS:
            with suppress(HydraException):  # what is wrong with it is told of what was written
                value = parser.parse_override(argument).value()
                if isinstance(value, SINGLE):
                    rewritten[-1] = f"{key}={NULL_ALONE if value is None else f'choice({text or EMPTY})'}"
    return rewritten


def listed(arguments: list[str]) -> list[str]:
    """GPUs with commas between them as one list: a sweep is spread over them and does not go through them."""
    return [re.sub(r"^gpus=(\d+(?:,\d+)+)$", r"gpus=[\1]", argument) for argument in arguments]


def search_path(arguments: list[str]) -> list[str]:
    """The override by which Hydra looks into the user's own folder of configs too. Raises BadRequest."""
    own = [str(folder) for folder in folders()[1:]]
    if not own or any(argument.startswith("hydra.searchpath=") for argument in arguments):
        return []
    if not os.path.isdir(own[0]):
        raise BadRequest(f"OPWEAVE_CONF={own[0]} is no folder")
    check_files(folders()[1])
    quoted = own[0].replace("\\", "\\\\").replace('"', '\\"')
    return [f'hydra.searchpath=["file://{quoted}"]']


def composed() -> Composition:
    """What the command line asks for; nothing to run where it asks Hydra for something else. Raises BadRequest."""
    if "--version" in sys.argv[1:]:
        print(f"opweave {version('opweave')}")
        sys.exit(0)
    check_arguments(sys.argv[1:])
    # argparse takes overrides on one side of a flag alone, so the flag goes first wherever it was written.
    overrides = swept(listed(sys.argv[1:])) + search_path(sys.argv[1:])
    sys.argv[1:] = sorted(overrides, key=lambda argument: argument not in SWEEP)
    errors = io.StringIO()
    try:
        with redirect_stderr(errors), composing() as composition:
            compose()
    except (BadRequest, BrokenPipeError):  # the latter where nobody reads the help
        raise
    except Exception as error:  # only composing went on in there, so whatever it is, it is about the request
        raise BadRequest(explain(error, sys.argv[1:])) from error
    except SystemExit as end:
        if end.code:  # argparse has printed its usage and then what is wrong
            raise BadRequest(errors.getvalue().rpartition("error: ")[2] or "see --help") from end
        raise
    sys.stderr.write(errors.getvalue())
    return composition


def given(arguments: list[str]) -> set[str]:
    """The keys of conf/config.yaml to which the arguments give a value, or to one that lies within."""
    keys = {re.split(r"[.@/=]", argument.lstrip("+~"))[0] for argument in arguments if not argument.startswith("-")}
    return keys - {"hydra"}


def run(composition: Composition) -> int:
    """Run what was composed; returns the exit status. Raises BadRequest."""
    if composition.run_elsewhere is not None:
        return composition.run_elsewhere()
    if not composition.requests:
        return 0
    if any(re.match("hydra/launcher=(?!basic)", argument) for argument in sys.argv):
        raise BadRequest("hydra/launcher is for sweeps: add -m")
    return execute(Request.joined(composition.requests), given(sys.argv[1:]))


class Interrupts:
    """What interrupts do while a request runs: the first ends it in order, a later one at once.

    One press may come twice, from the terminal and from the program that has begun this one: within TOGETHER_S it is one.
    """

    def __init__(self) -> None:
        self.first = math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt."""
        now = time.monotonic()
        if self.first == math.inf:
            self.first = now
            raise KeyboardInterrupt
        if now > self.first + TOGETHER_S:
            os._exit(INTERRUPTED)

    @classmethod
    @contextmanager
    def heeded(cls) -> Iterator[None]:
        """Nothing changes where interrupts are ignored, as in a shell's background."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        signal.signal(signal.SIGINT, cls())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_until_interrupted(composition: Composition) -> int:
    """The exit status. Raises BadRequest."""
    try:
        return run(composition)
    except KeyboardInterrupt:
        keeps_records = composition.run_elsewhere is not None or is_recorded(composition.requests)
        goes_on = "; the same command goes on where this one stopped" if keeps_records else ""
        print(f"opweave: interrupted{goes_on}", file=sys.stderr)
        return INTERRUPTED


def main() -> None:
    """Compose and run; whatever is wrong with the request is one line and exit status 2.

    So is an interrupt of a run, with exit status 130. One that comes before it runs is the caller's.
    """
    is_traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its exceptions on, rather than printing and exiting
    try:
        composition = composed()
        with Interrupts.heeded():
            sys.exit(_run_until_interrupted(composition))
    except BadRequest as error:
        if is_traceback_wanted:
            traceback.print_exc()
        else:
            print(f"opweave: {error}", file=sys.stderr)
        sys.exit(BAD_REQUEST)
