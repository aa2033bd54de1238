"""Prometheus metrics of the grammar service."""

from prometheus_client import Counter, Gauge, Histogram

__all__ = ["COMPILES", "COMPILE_SECONDS", "MASKS", "MATCHERS", "STEP_SECONDS"]

COMPILES = Counter(
    "tokenwire_grammar_compiles",
    "Compile RPCs, by kind of grammar and outcome: compiled, cached, refused, failed.",
    ["kind", "outcome"],
)
COMPILE_SECONDS = Histogram(
    "tokenwire_grammar_compile_seconds",
    "Seconds to compile a grammar that is not cached, including the trial.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
MATCHERS = Gauge("tokenwire_grammar_matchers", "Open matchers.")
MASKS = Counter(
    "tokenwire_grammar_masks",
    "Masks sent, by form: bitmask, allowed, unconstrained, held.",
    ["form"],
)
STEP_SECONDS = Histogram(
    "tokenwire_grammar_step_seconds",
    "Seconds from the commands of a step to its masks.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5),
)
