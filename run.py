"""The command line: python run.py model=nasnet system=nimble batch=1 (see --help)."""

import io
import os
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from runners.bad_request import BadRequest, explain
from runners.requests import execute

BAD_REQUEST = 2
INTERRUPTED = 130
SWEEP_FOLDER = "OPWEAVE_SWEEP_FOLDER"

cells: list[DictConfig] = []


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def compose(config: DictConfig) -> None:
    """Hydra's task: it only composes. What it composed runs outside of it, so that an error there is ours to tell."""
    cells.append(config)


def request() -> list[DictConfig]:
    """The cells that the command line asks for, none if it asks Hydra for something else. Raises BadRequest."""
    if any(argument.startswith("--e") for argument in sys.argv):
        raise BadRequest("--experimental-rerun reads a pickle, which can run code: write the overrides instead")
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            compose()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise BadRequest(explain(error, sys.argv[1:])) from error
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
    # A sweep leaves a note of itself in Hydra's sweep folder; it has no place in the user's.
    os.environ.setdefault(SWEEP_FOLDER, str(Path(tempfile.gettempdir()) / f"opweave-{os.getuid()}"))
    try:
        composed = request()
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
