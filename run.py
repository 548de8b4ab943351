"""The command line: python run.py model=nasnet system=nimble batch=1 (see --help)."""

import os
import sys
import tempfile
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from runners.bad_request import BadRequest, explain
from runners.requests import execute

BAD_REQUEST = 2
TRACEBACK_WANTED = "OPWEAVE_TRACEBACK"
SWEEP_FOLDER = "OPWEAVE_SWEEP_FOLDER"


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def compose(config: DictConfig) -> None:
    try:
        sys.exit(execute([config]))
    except BadRequest as error:  # told here, since Hydra announces what its task raises
        refuse(error)


def refuse(error: Exception) -> None:
    """Say in one line what is wrong with the request, and end."""
    if os.environ.get(TRACEBACK_WANTED):
        raise error
    print(f"opweave: {explain(error)}", file=sys.stderr)
    sys.exit(BAD_REQUEST)


def main() -> None:
    """Compose and run; whatever is wrong with the request is one line and exit status 2."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        os.environ[TRACEBACK_WANTED] = "1"
    # A sweep leaves a note of itself in Hydra's sweep folder; it has no place in the user's.
    os.environ.setdefault(SWEEP_FOLDER, str(Path(tempfile.gettempdir()) / f"opweave-{os.getuid()}"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its exceptions on, rather than printing and exiting
    try:
        compose()
    except (BadRequest, HydraException, OmegaConfBaseException) as error:
        refuse(error)
    except KeyboardInterrupt:
        print("opweave: interrupted; the same command goes on where this one stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
