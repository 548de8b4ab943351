"""The command line of a script: a bad request is one line and exit status 2."""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import NoReturn

from results.pack import is_pack, sweep_of
from results.store import why_no_records


def path_argument(text: str) -> Path:
    """An argument that is a path, also of nothing yet. Raises ArgumentTypeError where the system takes no such path."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text is no path")
    try:
        os.lstat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {(isinstance(error, OSError) and error.strerror) or error}") from error
    return Path(text)


def folder_of(results: Path) -> Path:
    """Where what is made of results belongs: in their folder; of a pack, in a folder of its name beside it."""
    return results.with_name(sweep_of(results)) if is_pack(results) else results


class Parser(argparse.ArgumentParser):
    """argparse's, with a script's docstring for --help as it stands, and without its usage before an error."""

    def __init__(self, description: str | None):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

    def unreadable(self, file: Path, error: Exception) -> NoReturn:
        """End the program over a file that cannot be read, or that holds something else."""
        is_no_json = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        self.error(f"{file}: {'no JSON: ' * is_no_json}{(isinstance(error, OSError) and error.strerror) or error}")

    def check_results(self, place: Path) -> None:
        """End the program over what can hold no records."""
        if (reason := why_no_records(place)) is not None:
            self.error(reason)

    def check_folder(self, folder: Path) -> None:
        """End the program unless `folder` can be written in or made, before anything has been run or written."""
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            self.error(f"{folder} cannot be written: {existing} is not a folder")
        try:
            with tempfile.TemporaryFile(dir=existing):  # root has every permission, and cannot write everywhere
                pass
        except OSError as error:
            self.error(f"{folder} cannot be written: {error.strerror or error} ({existing})")

    def check_file(self, file: Path) -> None:
        """The same for a file."""
        if file.is_dir():
            self.error(f"{file} cannot be written: it is a folder")
        self.check_folder(file.parent)
