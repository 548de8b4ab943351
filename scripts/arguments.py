"""The command line of a script: a bad request is one line and exit status 2."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's, with a script's docstring for --help as it stands, and without its usage before an error."""

    def __init__(self, description: str | None):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")
