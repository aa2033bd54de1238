"""Comparison of a module's forward pass with code that is known."""

import ast
import inspect
import textwrap

from torch import nn

__all__ = ["body", "forward_body", "function_body", "loop", "loops_of"]

_PASSED = frozenset(
    {"attention_mask", "cache", "output_attentions", "past_key_values", "position_ids", "use_cache"}
)
"""Arguments that have no effect here, where transformers has no cache"""


def forward_body(module: nn.Module) -> str:
    """Return the statements of a module's forward pass, empty if its source is not installed."""
    return function_body(type(module).forward)


def function_body(function: object) -> str:
    """Return the statements of a function, empty if its source is not installed."""
    try:
        return body(inspect.getsource(function))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


def body(source: str) -> str:
    """Return the statements of a function in one form.

    The form lacks docstrings, uses of transformers' cache, arguments without an effect, and
    arguments that are passed to attention by name, which a trial pass has checked.
    """
    [function] = ast.parse(textwrap.dedent(source)).body
    if not isinstance(function, ast.FunctionDef):
        return ""
    statements = [each for each in function.body if not _is_without_effect(each)]
    return "\n".join(ast.dump(_Plain().visit(each)) for each in statements)


def loop(source: str) -> str:
    """Return a loop in the form of `body`."""
    [statement] = ast.parse(source.strip()).body
    return ast.dump(_Plain().visit(statement))


def loops_of(function: object) -> list[str]:
    """Return the loops of a function in the form of `body`; none if its source is missing."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return []
    return [ast.dump(_Plain().visit(each)) for each in ast.walk(tree) if isinstance(each, ast.For)]


def _is_without_effect(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in (
        "cache is not None",
        "past_key_values is not None",
    )


class _Plain(ast.NodeTransformer):
    """Removal of the parts of code that do not change its result."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        is_attention = isinstance(node.func, ast.Name) and node.func.id == "attention_interface"
        node.keywords = [
            each
            for each in node.keywords
            if not is_attention and each.arg is not None and each.arg not in _PASSED
        ]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return node
        return ast.Assign([node.target], node.value)
