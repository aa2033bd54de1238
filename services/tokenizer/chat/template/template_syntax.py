"""Syntax of chat templates, checked before a client meets an error."""

from collections.abc import Mapping

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from services.common.settings import StartupError

__all__ = ["require_syntax"]


class _Generation(Extension):
    """The tag `generation`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def require_syntax(templates: Mapping[str, str]) -> None:
    """Raise StartupError for the first template that Jinja can't parse."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    for name, source in templates.items():
        try:
            environment.parse(source)
        except TemplateSyntaxError as error:
            raise StartupError(
                f"The checkpoint's chat template {name!r} is broken in line {error.lineno}: "
                f"{error.message}"
            ) from None
