"""One profiled call of a cell, to be run under Nsight Compute: python -m runners.cell.profiled CELL_JSON"""

import json
import os
import sys

import torch

from results.document import cell_from_json
from runners.machine.tether import die_with_parent

from .session import Session

WARM_UP_CALLS = 5


def main() -> None:
    session = Session(cell_from_json(json.loads(sys.argv[1])), "0", lambda _: None)
    session.prepare()
    for _ in range(WARM_UP_CALLS):
        session.call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    session.call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    main()
