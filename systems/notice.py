"""What a cell's process has to tell the person who asked for it."""


class Notice(UserWarning):
    """A warning that belongs in the cell's record, since nobody sees what its process prints."""
