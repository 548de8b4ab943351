"""Warnings from what makes a module ready, for the record of the cell that it is made ready for.

In Python no notice is shown but a caution: nobody who calls a library can act on the others. Python's own option -W and
`warnings.simplefilter("always", Notice)` show them all.
"""

import warnings


class Notice(UserWarning):
    """A warning that belongs in the cell's record, since nobody sees what the cell's process prints."""


class Caution(Notice):
    """A notice that whoever calls a system in Python can act on."""


warnings.filterwarnings("default", category=Caution, append=True)  # after the user's own filters, and before the next one
warnings.filterwarnings("ignore", category=Notice, append=True)
