"""Syntax of chat templates, checked before a client meets an error."""

from collections.abc import Mapping

from jinja2 import TemplateSyntaxError

from services.common.settings import StartupError
from services.tokenizer.chat.template.environment import TemplateEnvironment

__all__ = ["require_syntax"]


def require_syntax(templates: Mapping[str, str]) -> None:
    """Raise StartupError for the first template that Jinja can't parse."""
    environment = TemplateEnvironment()
    for name, source in templates.items():
        try:
            environment.parse(source)
        except TemplateSyntaxError as error:
            raise StartupError(
                f"The checkpoint's chat template {name!r} is broken in line {error.lineno}: "
                f"{error.message}"
            ) from None
