"""A warning for the person who asked for a measurement, from the process that measures."""


class Notice(UserWarning):
    """A warning that belongs in the cell's record, since nobody sees what the cell's process prints."""
