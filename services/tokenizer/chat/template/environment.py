"""Jinja environment of chat templates, whose output marks the text that the template wrote.

It has the functions, filters and limits of transformers' (`transformers.utils.chat_template_utils`,
5.24), which published templates are written for. The difference: literals of the template and all
results of string operations are `TracedText`.
"""

import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, pass_eval_context
from markupsafe import Markup

from services.tokenizer.chat.template.traced_text import (
    TracedMarkup,
    TracedText,
    from_request,
    from_template,
    is_template_text,
    join_traced,
)

__all__ = ["TemplateEnvironment"]

_EXTENSIONS = ["jinja2.ext.loopcontrols"]


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox in which chat templates are compiled and rendered."""

    concat = staticmethod(join_traced)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[*_EXTENSIONS, _Generation]
        )
        self.literals: list[TracedText | TracedMarkup] = []
        """Texts of the compiled templates, to which their code refers"""
        self.code_generator_class = _LiteralGenerator
        self.filters["join"] = _join
        self.filters["safe"] = TracedMarkup
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _format_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def literal(self, text: str) -> str:
        """Return the Python expression of a text of the template."""
        traced = from_template(text)
        self.literals.append(TracedMarkup(traced) if isinstance(text, Markup) else traced)
        return f"environment.literals[{len(self.literals) - 1}]"

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """Return the method `format` of a string in the sandbox; None for any other value."""
        wrapped = super().wrap_str_format(value)
        text = getattr(value, "__self__", None)
        if wrapped is None or not isinstance(text, TracedText):
            return wrapped
        formatter = _TracedFormatter(self)
        if getattr(value, "__name__", "") == "format_map":
            return lambda mapping: formatter.vformat(text, (), mapping)
        return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)


class _LiteralGenerator(CodeGenerator):
    """Compiler of templates whose literals are `TemplateEnvironment.literals`."""

    environment: TemplateEnvironment

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self.environment.literal(value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[str]) -> str:
        return self.environment.literal("".join(map(str, group)))


class _TracedFormatter(SandboxedFormatter):
    """`str.format` that keeps the origins of texts without conversion or format."""

    def vformat(
        self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TracedText:
        expected = super().vformat(format_string, args, kwargs)
        assert isinstance(format_string, TracedText)
        is_template = is_template_text(format_string)
        pieces: list[str] = []
        number = 0
        for literal, field, form, conversion in string.Formatter().parse(format_string):
            pieces.append(from_template(literal) if is_template else literal)
            if field is None:
                continue
            if field == "":
                field, number = str(number), number + 1
            if form or conversion:
                return from_request(expected)
            value, _ = self.get_field(field, args, kwargs)
            pieces.append(value if isinstance(value, str) else str(value))
        joined = join_traced(pieces)
        return joined if joined == expected else from_request(expected)


class _Generation(Extension):
    """The tag `generation`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The function `dict` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        namespace, *rest = args
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(namespace, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A namespace takes no name that begins with an underscore: {name!r}.")


@pass_eval_context
def _join(context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Return Jinja's filter `join` of traced strings."""
    separator = d if isinstance(d, TracedText) else from_request(d)
    joined: str = FILTERS["join"](context, value, separator, attribute)
    return joined


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form)
