"""Tasks with one right answer in JSON: extraction, classification, arithmetic, tool choice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.json_values import Json

__all__ = ["TOOLS", "Task", "tasks"]

_NAMES = [
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Elena",
    "Frank",
    "Greta",
    "Henry",
    "Inés",
    "Jonas",
    "Karla",
    "Louis",
    "María",
    "Nils",
    "Olga",
    "Peter",
    "Quinn",
    "Rosa",
    "Simón",
    "Tina",
    "Ulla",
    "Victor",
    "Wanda",
    "Xavier",
    "Yara",
    "Zoë",
    "Björn",
    "Chloé",
    "Dora",
    "Emil",
]
_CITIES = [
    "Oslo",
    "Paris",
    "Berlin",
    "Madrid",
    "Rome",
    "Vienna",
    "Prague",
    "Lisbon",
    "Athens",
    "Dublin",
    "London",
    "Boston",
    "Tokyo",
    "Cairo",
    "Delhi",
    "Lima",
    "Quito",
    "Seoul",
    "Milan",
    "Geneva",
    "Málaga",
    "Zürich",
    "Hanoi",
    "Kyoto",
    "Turin",
    "Porto",
    "Lyon",
    "Bergen",
    "Graz",
    "Malmö",
]
_PRODUCTS = [
    "rice",
    "flour",
    "sugar",
    "salt",
    "milk",
    "oil",
    "wine",
    "tea",
    "coffee",
    "honey",
    "bread",
    "butter",
    "cheese",
    "apples",
    "pears",
    "plums",
    "nuts",
    "beans",
    "corn",
    "oats",
    "pasta",
    "soap",
    "paper",
    "ink",
    "rope",
    "cloth",
    "wool",
    "wood",
    "sand",
    "glue",
]
_UNITS = ("kilogram", "litre", "piece", "metre", "box")
_GOOD = "wonderful great excellent lovely amazing delightful superb fantastic perfect brilliant"
_BAD = "terrible awful boring horrible bad disappointing dreadful poor annoying ugly"
_THINGS = ("film", "hotel", "book")
_TOPICS = {
    "sports": (
        "The striker scored twice in the final.", "She won the race by a second.",
        "The team lost its third match.", "The coach chose a new goalkeeper.",
        "He broke the record in the high jump.", "The players trained in the stadium.",
        "Their tennis match lasted four hours.", "The boxer won in the last round.",
        "Fans cheered for the home team.", "The cyclist led the tour for a week.",
    ),
    "food": (
        "The soup needs more salt.", "She baked a cake with cherries.",
        "Fry the onions in butter.", "The restaurant serves fresh fish.",
        "He ate two slices of pizza.", "Boil the rice for ten minutes.",
        "The cheese tastes like nuts.", "Grandmother's pie was sweet.",
        "They drank tea with honey.", "Peel the potatoes and cut them.",
    ),
    "weather": (
        "It will rain all day tomorrow.", "A cold wind blows from the north.",
        "The storm brought heavy snow.", "It is sunny and warm today.",
        "Thick fog covers the valley.", "Temperatures fall below zero tonight.",
        "Clouds gather over the coast.", "Hail damaged the roofs.",
        "The heat wave ends on Friday.", "Thunder was heard in the evening.",
    ),
}  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _closed(properties: Mapping[str, Json]) -> dict[str, Json]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT: Json = {"type": "string"}
_PARAMETERS = {
    "weather": _closed({"city": _TEXT}),
    "calendar": _closed({"day": _TEXT}),
    "convert": _closed({"amount": {"type": "integer"}, "currency": _TEXT}),
}
TOOLS: Sequence[Json] = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in _PARAMETERS.items()
]


@dataclass(frozen=True, slots=True)
class Task:
    """A question, and the answer to it."""

    kind: str
    question: str
    answer: Mapping[str, Any]
    checked: Sequence[str]
    """The members of the answer that must be equal"""
    schema: Mapping[str, Json] | None
    """The schema of the answer; None: a call of one of `TOOLS`"""

    def is_right(self, answer: object) -> bool:
        """Return whether an answer has the right members, case and spelling of numbers apart."""
        if not isinstance(answer, dict):
            return False
        found = {str(name).lower(): value for name, value in answer.items()}
        return all(_plain(found.get(name)) == _plain(self.answer[name]) for name in self.checked)


def tasks() -> list[Task]:
    """Return 60 extractions, 60 classifications, 40 sums and 40 calls."""
    return [*_people(), *_products(), *_reviews(), *_topics(), *_sums(), *_calls()]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, str):
        value = value.strip().lower()
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _people() -> Iterator[Task]:
    schema = _closed({"name": _TEXT, "age": {"type": "integer"}, "city": _TEXT})
    for index, (name, city) in enumerate(zip(_NAMES, _CITIES, strict=True)):
        age = 18 + index * 29 % 61
        question = f"Extract JSON with name, age and city: {name}, aged {age}, is from {city}."
        answer = {"name": name, "age": age, "city": city}
        yield Task("people", question, answer, tuple(answer), schema)


def _products() -> Iterator[Task]:
    schema = _closed({"product": _TEXT, "price": {"type": "number"}, "unit": _TEXT})
    for index, product in enumerate(_PRODUCTS):
        price, unit = 1.5 + index * 7 % 40 / 4, _UNITS[index % len(_UNITS)]
        question = (
            "Extract JSON with product, price and unit: "
            f"We sell {product} at {price:.2f} dollars per {unit}."
        )
        answer = {"product": product, "price": price, "unit": unit}
        yield Task("products", question, answer, tuple(answer), schema)


def _reviews() -> Iterator[Task]:
    schema = _closed({"sentiment": {"enum": ["positive", "negative"]}})
    words = [(word, "positive") for word in _GOOD.split()]
    words += [(word, "negative") for word in _BAD.split()]
    for index in range(30):
        word, sentiment = words[index * 7 % len(words)]
        question = (
            f"The {_THINGS[index % 3]} was {word}. Is this positive or negative? "
            'Answer as JSON with the key "sentiment".'
        )
        yield Task("sentiment", question, {"sentiment": sentiment}, ("sentiment",), schema)


def _topics() -> Iterator[Task]:
    schema = _closed({"topic": {"enum": list(_TOPICS)}})
    for index in range(30):
        topic = list(_TOPICS)[index % 3]
        question = (
            f"{_TOPICS[topic][index // 3]} Is this about sports, food or weather? "
            'Answer as JSON with the key "topic".'
        )
        yield Task("topic", question, {"topic": topic}, ("topic",), schema)


def _sums() -> Iterator[Task]:
    schema = _closed({"reasoning": _TEXT, "answer": {"type": "integer"}})
    for index in range(40):
        some, more = 2 + index * 5 % 17, 1 + index * 3 % 11
        name, product = _NAMES[index % len(_NAMES)], ("apples", "books", "coins")[index % 3]
        question = (
            f"{name} has {some} {product} and gets {more} more. How many {product} does {name} "
            'have now? Answer as JSON with the keys "reasoning" and "answer".'
        )
        answer = {"reasoning": f"{some} + {more} = {some + more}", "answer": some + more}
        yield Task("arithmetic", question, answer, ("answer",), schema)


def _calls() -> Iterator[Task]:
    described = json.dumps({name: list(_members(name)) for name in _PARAMETERS})
    for index in range(40):
        city, day = _CITIES[index % len(_CITIES)], _DAYS[index % len(_DAYS)]
        amount, currency = 10 + index, ("euros", "yen", "pesos")[index // 3 % 3]
        wish, name, arguments = (
            (f"How warm is it in {city}?", "weather", {"city": city}),
            (f"What are my plans for {day}?", "calendar", {"day": day}),
            (
                f"Change {amount} dollars to {currency}.",
                "convert",
                {"amount": amount, "currency": currency},
            ),
        )[index % 3]
        question = (
            f"Functions and their arguments: {described}. "
            f'Call one, as JSON with the keys "name" and "arguments": {wish}'
        )
        answer = {"name": name, "arguments": arguments}
        yield Task("tools", question, answer, tuple(answer), None)


def _members(name: str) -> Sequence[str]:
    members = _PARAMETERS[name]["required"]
    assert isinstance(members, list)
    return members
