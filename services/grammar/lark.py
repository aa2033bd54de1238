"""JSON Schemas in Lark grammars: `%json` with the white space of all other JSON."""

import json
import re
from collections.abc import Mapping

from services.common.json_values import Json

__all__ = ["with_options"]

# Comments, strings and regular expressions may contain "%json" too.
_TERM = re.compile(
    r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|(?P<schema>%json\s*\{)(?P<end>\s*\})?'
)


def with_options(lark: str, options: Mapping[str, Json]) -> str:
    """Return a Lark grammar whose JSON Schemas have the members `options`.

    A schema's own member wins: llguidance takes the last one of a name.
    """
    members = json.dumps(options)[1:-1]

    def extended(term: re.Match[str]) -> str:
        opening, end = term["schema"], term["end"]
        if not opening:
            return term.group()
        return f"{opening}{members}{end}" if end else f"{opening}{members}, "

    return _TERM.sub(extended, lark)
