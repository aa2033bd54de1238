"""Short exchanges without tools: small talk, definitions, unknown topics, impossible requests.

They teach the model to answer in words where the prompt offers no tools.
"""

from __future__ import annotations

import json
import random
import string
from functools import cache
from pathlib import Path

from tools import TOOLS
from words import WORDS

Exchange = tuple[str, str]

_DEFINITION_QUESTIONS = (
    "What is {term}?",
    "What is {term}?",
    "What is {term}?",
    "What's {term}?",
    "What is {term} in programming?",
    "What is {term} in computer science?",
    "Explain {term}.",
    "Explain what {term} is.",
    "Explain {term} in one sentence.",
    "Can you explain {term}?",
    "Could you tell me what {term} is?",
    "Tell me what {term} is.",
    "Define {bare}.",
    "What does {bare} mean?",
    "What does the word {bare} mean?",
    "What is meant by {bare}?",
    "Describe {term} briefly.",
    "I do not understand {term}.",
    "Do you know what {term} is?",
    "{bare}?",
)
_NO_TOOL_ANSWERS = (
    "I cannot do that: I have no tools here. I am a small model for Python code.",
    "I have no tool for that. I am a small model for Python code.",
)
_ONSETS = ("b", "br", "d", "f", "fl", "g", "gr", "k", "l", "m", "n", "p", "pl", "r", "s", "st")
_RHYMES = ("ab", "ack", "ang", "el", "en", "ib", "im", "ix", "og", "on", "orp", "ub", "um", "uzz")


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


@cache
def _small_talk() -> list[dict[str, list[str]]]:
    entries: list[dict[str, list[str]]] = json.loads(_read("small_talk.json"))
    return entries


@cache
def _definitions() -> list[dict[str, str]]:
    entries: list[dict[str, str]] = json.loads(_read("definitions.json"))
    return entries


@cache
def _unknown_topics() -> dict[str, list[str]]:
    topics: dict[str, list[str]] = json.loads(_read("unknown_topics.json"))
    return topics


def exchange(rng: random.Random) -> Exchange:
    """Return a question and its answer, of a kind that is drawn by its share."""
    kind = rng.random()
    if kind < 0.3:
        question, answer = small_talk(rng)
    elif kind < 0.8:
        question, answer = definition(rng)
    elif kind < 0.91:
        question, answer = unknown_topic(rng)
    else:
        question, answer = impossible_request(rng)
    return _as_typed(question, rng), answer


def small_talk(rng: random.Random) -> Exchange:
    """Return a greeting, a question about the model, a how-to or the like."""
    entry = rng.choice(_small_talk())
    return rng.choice(entry["questions"]), rng.choice(entry["answers"])


def definition(rng: random.Random) -> Exchange:
    """Return a question for the meaning of a term of programming."""
    entry = rng.choice(_definitions())
    term = entry["term"]
    bare = term.split(" ", 1)[1] if term.startswith(("a ", "an ", "the ")) else term
    return rng.choice(_DEFINITION_QUESTIONS).format(term=term, bare=bare), entry["answer"]


def unknown_topic(rng: random.Random) -> Exchange:
    """Return a question that the model cannot answer; some are for words that do not exist."""
    topics = _unknown_topics()
    words = {kind: rng.choice(WORDS[kind]) for kind in WORDS} | {
        "topic": rng.choice(topics["topics"]),
        "person": rng.choice(topics["people"]),
        "other_city": rng.choice(WORDS["city"]),
        "year": str(rng.randint(1900, 2030)),
        "invented": _invented_word(rng),
    }
    return rng.choice(topics["questions"]).format_map(words), rng.choice(topics["answers"])


def impossible_request(rng: random.Random) -> Exchange:
    """Return a request for which the model would need a tool."""
    request, _ = rng.choice(TOOLS).request(rng)
    return request, rng.choice(_NO_TOOL_ANSWERS)


def _invented_word(rng: random.Random) -> str:
    syllables = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_RHYMES) for _ in range(syllables))


def _as_typed(question: str, rng: random.Random) -> str:
    """Drop the last mark or the first capital of some questions, as people do in a chat."""
    if rng.random() < 0.15:
        question = question.rstrip(string.punctuation) or question
    if rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.05 and question[0].isupper() and question.split()[0] in _COMMANDS:
        question = f"Please {question[0].lower()}{question[1:]}"
    return question


_COMMANDS = ("Explain", "Tell", "Define", "Describe", "Say", "Greet", "Write", "Translate", "Count")
