"""Where the project's code lies, and by which names Python imports it: as a checkout, or as the package of a wheel."""

from pathlib import Path

NAME = "runners.machine.installation"  # of this module in a checkout

PREFIX = __name__.removesuffix(NAME)  # before every module's name: "opweave." in a wheel, nothing in a checkout
ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the rooms (models, systems, runners, ...)

# What a child process needs on its import path. A wheel's children find it where their parent found it: at its folder on
# PYTHONPATH every installed package would come before Python's own modules.
IMPORT_PATH = () if PREFIX else (str(ROOT),)


def module_name(name: str) -> str:
    """The name by which `python -m` finds a module of the project.

    Args:
        name: the module's name in a checkout, "runners.cell.worker".
    """
    return PREFIX + name
