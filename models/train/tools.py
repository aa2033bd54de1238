"""Tools of the synthetic conversations: definitions, requests, results and answers."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from words import WORDS

JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
JsonObject = Mapping[str, JsonValue]
Arguments = dict[str, str | int | float | bool | list[str]]

_NUMBERS = {
    "days": (1, 10),
    "amount": (1, 900),
    "minutes": (1, 90),
    "limit": (1, 20),
    "people": (1, 12),
    "number": (0, 500),
    "level": (0, 100),
    "a": (0, 999),
    "b": (1, 99),
    "order": (1000, 99999),
    "temperature": (15, 26),
    "hour": (0, 23),
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: kinds of its parameters, templates of requests and answers."""

    name: str
    description: str
    parameters: dict[str, str]
    requests: tuple[str, ...]
    result_key: str
    answer: str
    required: int = 9

    def schema(self) -> JsonObject:
        """Return the definition in the format of OpenAI's `tools`."""
        properties: JsonObject = {
            name: {"type": "integer" if kind in _NUMBERS else "string"}
            for name, kind in self.parameters.items()
        }
        required = list(self.parameters)[: self.required]
        parameters: JsonObject = {"type": "object", "properties": properties, "required": required}
        function: JsonObject = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}

    def request(self, rng: random.Random) -> tuple[str, Arguments]:
        """Return a user's request and the arguments of the call that it asks for."""
        template = rng.choice(self.requests)
        named = {field for _, field, _, _ in string.Formatter().parse(template) if field}
        arguments: Arguments = {
            name: _draw(kind, rng)
            for name, kind in self.parameters.items()
            if name in named or not named
        }
        return template.format(**arguments), arguments

    def result(self, arguments: Arguments, rng: random.Random) -> tuple[dict[str, object], str]:
        """Return a result for `arguments` and the assistant's answer about it."""
        value = _RESULTS[self.result_key](rng)
        known = {name: arguments.get(name, "") for name in self.parameters}
        return {self.result_key: value}, self.answer.format(**known, result=value).replace(
            "  ", " "
        )


def _draw(kind: str, rng: random.Random) -> str | int:
    if kind in _NUMBERS:
        return rng.randint(*_NUMBERS[kind])
    if kind == "time":
        return f"{rng.randint(6, 22):02}:{rng.choice((0, 15, 30, 45)):02}"
    if kind == "expression":
        terms = [str(rng.randint(1, 99)) for _ in range(rng.randint(2, 3))]
        return f" {rng.choice('+-*/')} ".join(terms)
    if kind == "email":
        return f"{rng.choice(WORDS['name']).lower()}@example.com"
    return rng.choice(WORDS[kind])


_RESULTS: dict[str, Callable[[random.Random], str | int | float]] = {
    "temperature": lambda rng: rng.randint(-5, 35),
    "result": lambda rng: rng.randint(1, 5000),
    "converted": lambda rng: round(rng.uniform(1, 900), 2),
    "price": lambda rng: round(rng.uniform(5, 900), 2),
    "time": lambda rng: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
    "status": lambda rng: rng.choice(("ok", "done", "created", "sent")),
    "state": lambda rng: rng.choice(("shipped", "delivered", "pending", "delayed")),
    "count": lambda rng: rng.randint(0, 40),
    "text": lambda rng: rng.choice(
        ("first line", "hello", "no entries", "all good", "see the appendix")
    ),
    "population": lambda rng: rng.randint(100_000, 9_000_000),
    "title": lambda rng: rng.choice(WORDS["title"]),
}

TOOLS: list[Tool] = [
    Tool(
        "get_weather",
        "Get the current weather of a city.",
        {"city": "city", "unit": "unit"},
        (
            "What is the weather like in {city}?",
            "What's the weather in {city}?",
            "How warm is it in {city} in {unit}?",
            "Is it cold in {city} right now?",
            "Tell me the weather in {city}, in {unit}.",
            "Weather in {city}?",
        ),
        "temperature",
        "It is {result} degrees in {city}.",
        1,
    ),
    Tool(
        "get_current_weather",
        "Get the current weather in a given location",
        {"location": "city"},
        (
            "What's the weather like in {location} today?",
            "Weather in {location} please",
            "How is the weather in {location}?",
        ),
        "temperature",
        "The temperature in {location} is {result} degrees.",
    ),
    Tool(
        "get_forecast",
        "Get the weather forecast for some days.",
        {"city": "city", "days": "days"},
        (
            "Give me the forecast for {city} for {days} days.",
            "What will the weather be in {city} over the next {days} days?",
        ),
        "text",
        "The forecast for {city}: {result}.",
    ),
    Tool(
        "get_time",
        "Get the local time of a city.",
        {"city": "city"},
        (
            "What time is it in {city}?",
            "Tell me the current time in {city}.",
            "Local time in {city}?",
        ),
        "time",
        "It is {result} in {city}.",
    ),
    Tool(
        "convert_currency",
        "Convert an amount between currencies.",
        {"amount": "amount", "source": "currency", "target": "currency"},
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"),
        "converted",
        "{amount} {source} are {result} {target}.",
    ),
    Tool(
        "calculate",
        "Evaluate an arithmetic expression.",
        {"expression": "expression"},
        ("What is {expression}?", "Calculate {expression}.", "Please compute {expression}."),
        "result",
        "{expression} is {result}.",
    ),
    Tool(
        "add",
        "Add two integers.",
        {"a": "a", "b": "b"},
        ("Add {a} and {b}.", "What is {a} plus {b}?", "What is the sum of {a} and {b}?"),
        "result",
        "The sum is {result}.",
    ),
    Tool(
        "search_web",
        "Search the web.",
        {"query": "topic", "limit": "limit"},
        ("Search the web for {query}.", "Find {limit} articles about {query}.", "Look up {query}."),
        "count",
        "I found {result} results about {query}.",
        1,
    ),
    Tool(
        "get_stock_price",
        "Get the latest price of a stock.",
        {"symbol": "symbol"},
        (
            "What is the price of {symbol}?",
            "How much is {symbol} stock right now?",
            "Stock price of {symbol}, please.",
        ),
        "price",
        "{symbol} is at {result}.",
    ),
    Tool(
        "send_email",
        "Send an e-mail.",
        {"to": "email", "subject": "title"},
        ("Send an email to {to} with the subject {subject}.", 'Email {to} about "{subject}".'),
        "status",
        "The e-mail to {to} is sent.",
    ),
    Tool(
        "create_reminder",
        "Create a reminder.",
        {"text": "note", "time": "time"},
        ("Remind me to {text} at {time}.", "Set a reminder at {time}: {text}."),
        "status",
        "I will remind you at {time} to {text}.",
    ),
    Tool(
        "set_timer",
        "Start a countdown.",
        {"minutes": "minutes"},
        ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer."),
        "status",
        "The timer is set for {minutes} minutes.",
    ),
    Tool(
        "add_todo",
        "Add an entry to the to-do list.",
        {"task": "note"},
        (
            'Add "{task}" to my to-do list.',
            "Put {task} on my list.",
            "I need to {task}, write that down.",
        ),
        "status",
        'I added "{task}" to your list.',
    ),
    Tool(
        "translate",
        "Translate a text.",
        {"text": "sentence", "language": "language"},
        ('Translate "{text}" into {language}.', 'How do you say "{text}" in {language}?'),
        "text",
        "In {language}: {result}",
    ),
    Tool(
        "read_file",
        "Read a text file.",
        {"path": "file"},
        ("Show me {path}.", "Read the file {path}.", "What is in {path}?", "Open {path}"),
        "text",
        "The file {path} says: {result}",
    ),
    Tool(
        "delete_file",
        "Delete a file.",
        {"path": "file"},
        ("Delete {path}.", "Please remove the file {path}."),
        "status",
        "The file {path} is deleted.",
    ),
    Tool(
        "count_lines",
        "Count the lines of a file.",
        {"path": "file"},
        ("How many lines does {path} have?", "Count the lines in {path}."),
        "count",
        "{path} has {result} lines.",
    ),
    Tool(
        "get_order",
        "Look up the state of an order.",
        {"order_id": "order"},
        ("Where is my order {order_id}?", "What is the status of order {order_id}?"),
        "state",
        "Order {order_id} is {result}.",
    ),
    Tool(
        "book_table",
        "Book a table in a restaurant.",
        {"city": "city", "people": "people", "time": "time"},
        (
            "Book a table in {city} for {people} people at {time}.",
            "I want to eat in {city} at {time}, we are {people}.",
        ),
        "status",
        "Your table in {city} at {time} is booked.",
    ),
    Tool(
        "find_recipe",
        "Find a recipe.",
        {"dish": "dish"},
        ("How do I make {dish}?", "Find me a recipe for {dish}.", "I would like to cook {dish}."),
        "title",
        "I found this recipe for {dish}: {result}.",
    ),
    Tool(
        "play_music",
        "Play music of a genre.",
        {"genre": "genre"},
        ("Play some {genre}.", "I want to hear {genre} music."),
        "status",
        "Now playing {genre}.",
    ),
    Tool(
        "set_temperature",
        "Set the temperature of a room.",
        {"room": "room", "temperature": "temperature"},
        (
            "Set the {room} to {temperature} degrees.",
            "Make it {temperature} degrees in the {room}.",
        ),
        "status",
        "The {room} is set to {temperature} degrees.",
    ),
    Tool(
        "switch_light",
        "Switch the light of a room, with a brightness in percent.",
        {"room": "room", "level": "level"},
        ("Dim the light in the {room} to {level} percent.", "Set the {room} light to {level}%."),
        "status",
        "The light in the {room} is at {level} percent.",
    ),
    Tool(
        "get_population",
        "Get the population of a city.",
        {"city": "city"},
        ("How many people live in {city}?", "What is the population of {city}?"),
        "population",
        "{city} has {result} inhabitants.",
    ),
    Tool(
        "find_product",
        "Search the shop.",
        {"product": "product", "color": "color"},
        (
            "Do you sell a {color} {product}?",
            "I am looking for a {product}.",
            "Find a {color} {product}.",
        ),
        "count",
        "We have {result} of them.",
        1,
    ),
    Tool(
        "schedule_meeting",
        "Schedule a meeting.",
        {"person": "name", "day": "day", "time": "time"},
        (
            "Schedule a meeting with {person} on {day} at {time}.",
            "Set up a call with {person}, {day} at {time}.",
        ),
        "status",
        "The meeting with {person} at {time} is scheduled.",
    ),
    Tool(
        "get_contact",
        "Look up a contact.",
        {"name": "name"},
        (
            "What is the phone number of {name}?",
            "Find {name} in my contacts.",
            "How can I reach {name}?",
        ),
        "text",
        "This is what I have on {name}: {result}.",
    ),
    Tool(
        "is_prime",
        "Tell whether a number is prime.",
        {"number": "number"},
        ("Is {number} a prime number?", "Check whether {number} is prime."),
        "text",
        "The check of {number} says: {result}.",
    ),
]

UNRELATED_ANSWERS: list[tuple[str, str]] = [
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hi! What can I do for you?"),
    ("Thank you!", "You are welcome."),
    ("Who are you?", "I am a small assistant that can call functions and write short Python code."),
    ("What can you do?", "I can call the functions I was given and write short Python code."),
    ("Good night.", "Good night!"),
    ("What is Python?", "Python is a programming language."),
    ("Tell me a joke.", "A function walks into a bar and never returns."),
    ("How are you?", "I am fine, thank you. How can I help?"),
    ("Write a function that adds two numbers.", "```python\ndef add(a, b):\n    return a + b\n```"),
    ("Do you like music?", "I am a program, but many people enjoy it."),
    (
        "What is the meaning of life?",
        "I have no function for that, but many would say: to be kind.",
    ),
]
