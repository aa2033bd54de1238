"""A grammar that was compiled a moment ago must still be there when its sequence starts."""

from llguidance import LLMatcher, LLTokenizer

from services.grammar.cache import CompiledGrammar, GrammarCache


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def grammar(name: str) -> CompiledGrammar:
    return CompiledGrammar(name, LLMatcher(LLTokenizer("byte"), 'start: "a"'), 1)


def test_use_keeps_a_grammar_ten_more_minutes() -> None:
    clock = Clock()
    cache = GrammarCache(10, clock)
    cache.put(grammar("a"))
    cache.put(grammar("b"))
    clock.time = 599
    assert cache.get("a") is not None
    clock.time = 1198
    assert cache.get("a") is not None
    assert cache.get("b") is None


def test_a_flood_pushes_out_the_least_recently_used() -> None:
    cache = GrammarCache(3)
    for name in "abc":
        cache.put(grammar(name))
    cache.get("a")
    cache.put(grammar("d"))
    assert [cache.get(name) is not None for name in "abcd"] == [True, False, True, True]
    assert len(cache) == 3
