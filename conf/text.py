"""Words of messages: numbers of things, and text that other programs wrote, cut to what one line holds."""

LONGEST = 300  # characters of a line


def counted(number: int, thing: str) -> str:
    """ "1 stream", "2 streams"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def words_of(text: object) -> str:
    """A text, or an error's message; "" of an error whose message cannot be had."""
    try:
        return str(text)
    except Exception:
        return ""


def first_line(text: object) -> str:
    """The first line of a text or of an error's message that is not blank, stripped and cut to LONGEST characters.

    Args:
        text: A string, or an error, whose type stands for a message without such a line.
    """
    lines = [line.strip() for line in words_of(text).splitlines() if line.strip()]
    return (lines[0] if lines else type(text).__name__ if isinstance(text, BaseException) else "")[:LONGEST]


def named_line(error: BaseException) -> str:
    """An error's type and message in one line."""
    message = " ".join(words_of(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
