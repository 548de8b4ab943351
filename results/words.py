"""Numbers of things in words."""


def counted(number: int, thing: str) -> str:
    """ "1 stream", "2 streams"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
