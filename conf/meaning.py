"""What a key of a configuration file means: the comment beside it, which may go on in the lines below.

Such a comment is MEANING, or MEANING: VALUE (note) | VALUE | VALUE for a key that takes one of a few values, or several
of them.
"""

import re

KEY = re.compile(r"^ *(\w+):(?: .*?)??(?: # (.*))?$")
MORE = re.compile(r"^ +# (.*)$")
NOTE = re.compile(r" \([^()]*\)")


def comments(text: str) -> dict[str, str]:
    """The comment beside each key of a YAML document, inner keys too; "" where there is none."""
    comment_by_key: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if match := KEY.match(line):
            last = match[1]
            comment_by_key.setdefault(last, match[2] or "")
        elif last and (match := MORE.match(line)):
            comment_by_key[last] = f"{comment_by_key[last]} {match[1]}".lstrip()
    return comment_by_key


def listed(comment: str) -> tuple[str, ...]:
    """The values that a comment lists, without their notes; none where others are right too."""
    before, _, values = NOTE.sub("", comment).partition(": ")
    return tuple(values.split(" | ")) if " | " in values and " | " not in before else ()
