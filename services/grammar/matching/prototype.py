"""Prototypes: compiled grammars as matchers in their initial state."""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.grammar import GrammarError

__all__ = ["compile_prototype", "reason_of"]

_LIMITS = LLParserLimits(verbose_errors=False)  # verbose errors quote the whole grammar


def compile_prototype(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar in llguidance's JSON form. Every sequence gets a copy of the result.

    Raises GrammarError with the library's full reason. The first mask is computed, too: this finds
    grammars that no text satisfies, and copies inherit the automaton states that it built.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        if warnings := matcher.get_grammar_warnings():
            raise GrammarError(f"The grammar would not be enforced in full: {warnings[0]}.")
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"No text satisfies the grammar: {reason_of(matcher)}")
    if matcher.is_error():
        raise GrammarError(reason_of(matcher))
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Return the library's reason for which a matcher broke. It may quote the whole grammar."""
    return re.sub(r"\s*<non-verbose/>\s*$", "", matcher.get_error()).strip()
