"""Forms of errors by the path of a request; a dialect may have a form of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.http_shim.dialects.messages.write import message_error, other_message_error
from tokenwire.errors import ServiceError

__all__ = ["ErrorForm", "error_form"]


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of a dialect's errors, each for the request with an id."""

    of_service: Callable[[ServiceError, str], bytes]
    """Returns the JSON body of the error of a service"""
    of_status: Callable[[int, str, str], bytes]
    """Returns the JSON body of another failure, of its HTTP status and message"""


_FORMS: Mapping[str, ErrorForm] = {"/v1/messages": ErrorForm(message_error, other_message_error)}


def error_form(path: str) -> ErrorForm | None:
    """Return the form of errors of a path, or of those below it; None = OpenAI's."""
    for prefix, form in _FORMS.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return form
    return None
