"""A recently compiled grammar is still cached when its sequence starts."""

from llguidance import LLMatcher, LLTokenizer

from services.grammar.matching.cache import CompiledGrammar, GrammarCache


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def grammar(name: str, size: int = 1) -> CompiledGrammar:
    return CompiledGrammar(name, LLMatcher(LLTokenizer("byte"), 'start: "a"'), size)


def held(cache: GrammarCache, names: str) -> str:
    return "".join(name for name in names if cache.get(name) is not None)


def test_a_grammar_is_cached_for_ten_minutes_after_its_last_use() -> None:
    clock = Clock()
    cache = GrammarCache(10, 1000, clock)
    cache.put(grammar("a"))
    cache.put(grammar("b"))
    clock.time = 599
    assert cache.get("a") is not None
    clock.time = 1198
    assert cache.get("a") is not None
    assert cache.get("b") is None


def test_the_least_recently_used_grammar_is_evicted() -> None:
    cache = GrammarCache(3, 1000)
    for name in "abc":
        cache.put(grammar(name))
    cache.get("a")
    cache.put(grammar("d"))
    assert held(cache, "abcd") == "acd"


def test_the_size_of_all_grammars_is_bounded() -> None:
    """A few large grammars must not fill the memory."""
    cache = GrammarCache(100, 1000)
    for name in "abcd":
        cache.put(grammar(name, 300))
    assert held(cache, "abcd") == "bcd"
    cache.put(grammar("e", 600))
    assert held(cache, "abcde") == "de"
    cache.put(grammar("e", 600))  # a replacement needs no more room
    assert held(cache, "de") == "de"


def test_expired_grammars_make_room() -> None:
    clock = Clock()
    cache = GrammarCache(100, 1000, clock)
    cache.put(grammar("a", 900))
    clock.time = 601
    cache.put(grammar("b", 100))
    cache.put(grammar("c", 900))
    assert held(cache, "abc") == "bc"


def test_a_grammar_larger_than_the_cache_stays_until_the_next_one() -> None:
    """The sequence that it was compiled for is about to start."""
    cache = GrammarCache(100, 1000)
    cache.put(grammar("a", 100))
    cache.put(grammar("b", 5000))
    assert held(cache, "ab") == "b"
    cache.put(grammar("c", 100))
    assert held(cache, "bc") == "c"
