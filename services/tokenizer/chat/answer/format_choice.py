"""Choice of the form of a model's calls, from the texts that its chat template renders."""

import json
from dataclasses import replace
from typing import Any

from services.tokenizer.chat.answer.call_syntax import CallSyntax
from services.tokenizer.chat.answer.derivation import (
    CALLS,
    SCHEMAS,
    TYPED,
    Renderings,
    derive_calls,
)
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.reasoning_formats import ReasoningFormat
from services.tokenizer.chat.answer.response_parser import ResponseParser
from services.tokenizer.chat.answer.tool_formats import TOOL_FORMATS, ToolFormat

__all__ = ["choose_calls"]


def choose_calls(
    row: ToolFormat, seen: Renderings, reasoning: ReasoningFormat | None
) -> ToolFormat | None:
    """Return the format of calls that a template writes; None if it does not show one.

    row: format chosen by the template's signs. Its similar syntaxes are read, too.
    """
    found = derive_calls(seen, reasoning)
    if found is None or row.name == "harmony":  # the parser of harmony reads more than calls
        return None
    syntax, end = found
    similar = [form for form in (row, *TOOL_FORMATS) if _is_similar(form, syntax)]
    others = similar[0].syntaxes if similar else ()
    if syntax.is_single and others:
        syntax = replace(syntax, between=others[0].between)
    form = ToolFormat(
        similar[0].name if similar else "template",
        (syntax, *(other for other in others if other != syntax)),
        ends=(*(similar[0].ends if similar else ()), *filter(None, (end,))),
    )
    return form if _reads_back(form, seen, reasoning) else None


def _is_similar(form: ToolFormat, syntax: CallSyntax) -> bool:
    first = form.syntaxes[0]
    is_same = first.opening == syntax.opening and first.leads == syntax.leads
    return is_same and type(first.arguments) is type(syntax.arguments) and form.name != "harmony"


def _reads_back(form: ToolFormat, seen: Renderings, reasoning: ReasoningFormat | None) -> bool:
    """Return whether a parser finds the calls of the probes in their renderings."""
    wanted = [(seen.one, CALLS[:1])]
    if not form.syntaxes[0].is_single:
        wanted.append((seen.two, CALLS))
    if seen.typed:
        wanted.append((seen.typed, [(CALLS[0][0], TYPED)]))
    return all(_calls_in(text, form, seen, reasoning) == list(calls) for text, calls in wanted)


def _calls_in(
    text: str, form: ToolFormat, seen: Renderings, reasoning: ReasoningFormat | None
) -> list[tuple[str, Any]]:
    is_reasoning = False
    if text.startswith(seen.header):
        text = text.removeprefix(seen.header)
        is_reasoning = reasoning is not None and seen.header.rstrip().endswith(reasoning.opens)
    separators = reasoning.separators if reasoning is not None else ()
    parser = ResponseParser(reasoning, form, SCHEMAS, is_reasoning=is_reasoning, frame=separators)
    calls: list[tuple[str, str]] = []
    for part in (*parser.feed(text), *parser.finish(is_cut=False)):
        if part.kind is SegmentKind.CALL:
            calls.append((part.text, ""))
        elif part.kind is SegmentKind.ARGUMENTS:
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    return [(name, json.loads(arguments)) for name, arguments in calls]
