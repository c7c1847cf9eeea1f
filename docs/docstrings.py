"""How docstrings become pages: a section of one line (`Raises: ..`, `Cost: ..`) is a paragraph, a doctest is code."""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(Cost|Guarantee|Memory|Neighbours|Privacy|Raises|Returns|Yields): (?=\S)", re.MULTILINE)
EXAMPLE = re.compile(r"^Example:\s*\n", re.MULTILINE)


class OneLineSections(griffe.Extension):
    """Griffe knows the sections whose items stand indented below them; the others would run into one another."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Set each such section apart."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(r"\n**\1:** ", EXAMPLE.sub("Examples:\n", obj.docstring.value))
