"""The command line: python run.py model=nasnet system=nimble batch=1 (see --help)."""

import os
import sys

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from runners.bad_request import BadRequest, explain
from runners.requests import execute

BAD_REQUEST = 2


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def compose(config: DictConfig) -> None:
    sys.exit(execute([config]))


def main() -> None:
    """Compose and run; whatever is wrong with the request is one line and exit status 2."""
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its exceptions on, rather than printing and exiting
    try:
        compose()
    except (BadRequest, HydraException, OmegaConfBaseException) as error:
        if traceback_wanted:
            raise
        print(f"opweave: {explain(error)}", file=sys.stderr)
        sys.exit(BAD_REQUEST)
    except KeyboardInterrupt:
        print("opweave: interrupted; the same command goes on where this one stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
