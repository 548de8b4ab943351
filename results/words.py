"""How numbers of things are told."""


def counted(number: int, thing: str) -> str:
    """ "1 stream", "2 streams"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
