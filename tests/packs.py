"""The committed packs of records, kept once read: many tests go by the same ones, and their files do not change."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from results import store
from results.pack import Pack, read_pack

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
