"""A compiled grammar: the matcher of which every sequence gets a copy."""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.grammar.error import GrammarError

__all__ = ["compile_prototype", "reason_of", "shortened"]

_LIMITS = LLParserLimits(verbose_errors=False)  # verbose ones print the whole grammar
_LONGEST = 600  # characters of a reason; it may quote the whole grammar


def compile_prototype(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile llguidance's JSON form; raises GrammarError with the library's reason, however long.

    The first mask is computed too: it finds grammars that no text satisfies, and copies start with
    what it learnt. Never feed the result; copy it.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        if warnings := matcher.get_grammar_warnings():
            raise GrammarError(f"The grammar would not be enforced in full: {warnings[0]}.")
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"No text satisfies the grammar: {_words_of(matcher)}")
    if matcher.is_error():
        raise GrammarError(_words_of(matcher))
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """What broke a matcher, in some of the library's words."""
    return shortened(_words_of(matcher))


def shortened(reason: str) -> str:
    """Its beginning and its end: the place is in the one, and what is wrong in the other."""
    half = _LONGEST // 2
    return reason if len(reason) <= _LONGEST else f"{reason[:half]} … {reason[-half:]}"


def _words_of(matcher: LLMatcher) -> str:
    return re.sub(r"\s*<non-verbose/>\s*$", "", matcher.get_error()).strip()
