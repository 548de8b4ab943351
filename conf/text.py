"""Text that other programs wrote, cut to what one line of a message holds."""

LONGEST = 300  # characters of a line


def first_line(text: object) -> str:
    """The first line of a text or of an error's message that is not blank, stripped and cut to LONGEST characters.

    Args:
        text: A string, or an error, whose type stands for a message without such a line.
    """
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return (lines[0] if lines else type(text).__name__ if isinstance(text, BaseException) else "")[:LONGEST]
