"""The line in which a command or a process reports that it failed."""

import re

_LINE = re.compile(r"stageline: error\[(?P<reason>[A-Z][A-Z0-9_]*)\]: (?P<text>[^\n]*)\n?")


def parse_error_line(output: str) -> tuple[str, str]:
    """Reason code and text of the one line that `output` must be."""
    match = _LINE.fullmatch(output)
    assert match is not None, output
    return match["reason"], match["text"]
