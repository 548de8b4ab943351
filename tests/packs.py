"""The committed packs of records, kept once read: many tests go by the same ones, and their files do not change.

So with the points of the committed costs, which are simulated.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from filelock import FileLock

from results import store
from results.agreement import Point
from results.pack import Pack, read_pack
from scripts import agreement

REFERENCE = Path(__file__).parent.parent / "results" / "reference"

read_once = lru_cache(maxsize=16)(read_pack)


def keep_committed_packs() -> None:
    """Records do not change either, so that those who read a pack may share them; the lists are each reader's own."""
    store.read_pack = read_committed_once


def read_committed_once(file: Path, identifier: str = "") -> Pack:
    if identifier or not file.is_relative_to(REFERENCE):
        return read_pack(file, identifier)
    pack = read_once(file)
    return replace(pack, records=[*pack.records], reasons_by_line={**pack.reasons_by_line})


def keeping_points(file: Path) -> Callable[..., list[tuple[Point, ...]]]:
    """What simulates as scripts/agreement.py does, and keeps in a file what all committed costs give."""
    simulate = agreement._simulated

    def simulated(*costs: str) -> list[tuple[Point, ...]]:
        if [*costs] != agreement.committed():
            return simulate(*costs)
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_bytes(pickle.dumps(simulate(*costs)))
            return pickle.loads(file.read_bytes())  # type: ignore[no-any-return]

    return cache(simulated)
