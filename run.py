"""The command line: python run.py model=nasnet system=nimble batch=1 (see --help)."""

import io
import os
import re
import sys
from contextlib import redirect_stderr

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig

from runners.request.bad_request import GROUPS, BadRequest, check_arguments, explain
from runners.request.requests import execute
from runners.sweep.launch import Launch

BAD_REQUEST = 2
INTERRUPTED = 130
SWEEP = ("-m", "--multirun")
SINGLE = (bool, int, float, str, QuotedString, type(None))
EMPTY = "''"

cells: list[DictConfig] = []


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def compose(config: DictConfig) -> None:
    """Hydra's task: it only composes. What it composed runs outside of it, so that an error there is ours to tell."""
    cells.append(config)


def swept(arguments: list[str]) -> list[str]:
    """Of a sweep each single value of a model's, system's or runner's option as a sweep over that one value.

    Hydra applies what is no sweep before the swept file is chosen, which may be the only one that has the option.
    """
    if not any(argument in SWEEP or argument.startswith("experiment=") for argument in arguments):
        return arguments
    parser = OverridesParser.create()
    found = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            option = (
                "." in key
                and key.partition(".")[0] in GROUPS
                and isinstance(parser.parse_override(argument).value(), SINGLE)
            )
        except HydraException:  # what is wrong with it is told of what was written
            option = False
        found.append(f"{key}=choice({value or EMPTY})" if option else argument)
    return found


def request() -> list[DictConfig]:
    """The cells that the command line asks for, none if it asks Hydra for something else. Raises BadRequest."""
    check_arguments(sys.argv[1:])
    # argparse takes overrides on one side of a flag alone, so the flag goes first wherever it was written.
    sys.argv[1:] = sorted(swept(sys.argv[1:]), key=lambda argument: argument not in SWEEP)
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            compose()
    except BadRequest:
        raise
    except Exception as error:  # only composing went on in there, so whatever it is, it is about the request
        raise BadRequest(explain(error)) from error
    except SystemExit as end:
        if end.code:  # argparse has printed its usage and then what is wrong
            raise BadRequest(told.getvalue().rpartition("error: ")[2] or "see --help") from end
        raise
    sys.stderr.write(told.getvalue())
    return cells


def main() -> None:
    """Compose and run; whatever is wrong with the request is one line and exit status 2."""
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its exceptions on, rather than printing and exiting
    try:
        composed = request()
        if composed and isinstance(composed[0], Launch):
            sys.exit(composed[0].run())
        if composed and any(re.match("hydra/launcher=(?!basic)", argument) for argument in sys.argv):
            raise BadRequest("hydra/launcher is for sweeps: add -m")
        sys.exit(execute(composed) if composed else 0)
    except BadRequest as error:
        if traceback_wanted:
            raise
        print(f"opweave: {error}", file=sys.stderr)
        sys.exit(BAD_REQUEST)
    except KeyboardInterrupt:
        print("opweave: interrupted; the same command goes on where this one stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
