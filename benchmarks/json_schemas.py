"""JSON Schemas that the grammar service accepts, and the validity of the texts that it allows.

    python -m benchmarks.json_schemas --schemas DIRECTORY [--suite DIRECTORY] [--limit 1400]

`--schemas` holds one schema in each .json file, or an object of MaskBench: a "schema" and "tests"
with instances (github.com/guidance-ai/jsonschemabench has both, in data/ and maskbench/data/).
`--suite` is the directory of drafts of the JSON-Schema-Test-Suite.

A fork of this process compiles each schema as the service does. It draws texts from the masks at
random, and validates them with the `jsonschema` package (formats included) and for repeated keys.
The matcher should accept many of the valid instances, and none of the invalid ones. It does not
accept all valid ones, because a grammar fixes the order and spelling that JSON leaves free.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import select
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for
from llguidance import LLExecutor

from services.grammar import GrammarError, specification
from services.grammar.matching.initial_state import initial_state
from services.grammar.matching.mask_filler import MaskFiller
from services.grammar.matching.matcher import Matcher, RefusedTokenError
from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.token_index import TokenIndex
from services.grammar.matching.vocabulary import Vocabulary, load
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

_MODEL = Path(__file__).parent.parent / "models" / "tokenwire-code-6m"
_DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_CLOSERS = re.compile(rb'["\]}]+[,:]?|,"?|[0-9]|e[0-9]')
_SECONDS = 60  # time limit of a schema with all its draws
_SHOWN = 300  # characters shown of an invalid text


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, and instances with their validity."""

    name: str
    schema: Any
    instances: Sequence[tuple[Any, bool]] = ()


@dataclass(slots=True)
class Outcome:
    """The result of examining a schema."""

    name: str
    refusal: str = ""
    """The error message; empty if the schema was accepted"""
    valid: int = 0
    cut: int = 0
    """Texts that did not end within the tokens"""
    unchecked: int = 0
    """Texts that the validator cannot check"""
    invalid: list[str] = field(default_factory=list)
    matched: int = 0
    """Valid instances that were accepted"""
    missed: int = 0
    """Valid instances that were not accepted"""
    broken: str = ""
    """The exception or signal that ended the examination; empty if there was none"""


class RepeatedKeyError(Exception):
    """An object has a repeated key."""


def read_schemas(directory: Path) -> Iterator[Case]:
    """Yield one case per file."""
    for path in sorted(directory.rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        name = str(path.relative_to(directory))
        if isinstance(content, dict) and isinstance(tests := content.get("tests"), list):
            instances = [(test["data"], test["valid"]) for test in tests]
            yield Case(name, content["schema"], instances)
        else:
            yield Case(name, content)


def read_suite(directory: Path) -> Iterator[Case]:
    """Yield one case per group, with the draft that its directory names."""
    for draft, uri in _DRAFTS.items():
        for path in sorted((directory / draft).rglob("*.json")):
            for group in json.loads(path.read_text(encoding="utf-8")):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": uri, **schema}
                name = f"{path.relative_to(directory)}: {group['description']}"
                instances = [(test["data"], test["valid"]) for test in group["tests"]]
                yield Case(name, schema, instances)


class Examiner:
    """Compiles schemas, draws texts from their masks and validates them."""

    def __init__(self, vocabulary: Vocabulary, draws: int, tokens: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._draws = draws
        self._tokens = tokens
        self._seed = seed
        self._end = (vocabulary.size,)
        self._index = TokenIndex(vocabulary)
        self._filler = MaskFiller(vocabulary, LLExecutor(num_threads=1), vocabulary.size + 1)
        tokenizer = vocabulary.tokenizer
        self._closing = np.array(
            [bool(_CLOSERS.fullmatch(tokenizer.decode_bytes([i]))) for i in range(vocabulary.size)]
            + [True]
        )

    def examine(self, case: Case) -> Outcome:
        """Compile a schema, draw from it, and feed it its instances."""
        outcome = Outcome(case.name)
        spec = GrammarSpec(json_schema=json.dumps(case.schema, ensure_ascii=False))
        try:
            specification.check(spec)
            prototype = compile_prototype(self._vocabulary.tokenizer, specification.translate(spec))
        except GrammarError as error:
            outcome.refusal = str(error)
            return outcome
        matcher = Matcher(prototype, self._end, initial_state(spec, self._index))
        validator = _validator(case.schema)
        for draw in range(self._draws):
            self._judge(self._draw(matcher.fork(), draw), validator, outcome)
        for instance, is_valid in case.instances:
            text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
            accepted = self._accepts(matcher.fork(), text)
            outcome.matched += is_valid and accepted
            outcome.missed += is_valid and not accepted
            if accepted and not is_valid and not _is_valid(validator, instance):
                outcome.invalid.append(f"instance {text[:_SHOWN]}")
        return outcome

    def _draw(self, matcher: Matcher, draw: int) -> str | None:
        """Return a text drawn from the masks, or None if it does not end within the tokens."""
        rng = np.random.default_rng((self._seed, draw))
        forces, eagerness = draw % 2 == 0, rng.uniform(0.2, 0.8)
        ids: list[int] = []
        while len(ids) < self._tokens:
            if forces:
                ids += matcher.take_forced(self._vocabulary.size)
            [mask] = self._filler.fill([matcher])
            if matcher.inner.is_error() or not mask:
                raise DeadEndError(self._text(ids))
            bits = np.frombuffer(mask.to_bytes(len(self._closing) // 8 + 1, "little"), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[: len(self._closing)].astype(bool)
            closing = allowed & self._closing
            if closing.any() and rng.random() < max(eagerness, 1.5 * len(ids) / self._tokens):
                allowed = closing
            token = int(rng.choice(np.flatnonzero(allowed)))
            matcher.accept([token], self._vocabulary.size)
            if token in self._end:
                return self._text(ids)
            ids.append(token)
        return None

    def _text(self, ids: Sequence[int]) -> str:
        return self._vocabulary.tokenizer.decode_bytes(list(ids)).decode(errors="replace")

    def _accepts(self, matcher: Matcher, text: str) -> bool:
        try:
            ids = self._vocabulary.tokenizer.tokenize_str(text)
            matcher.accept(ids, self._vocabulary.size)
        except (RefusedTokenError, UnicodeEncodeError):
            return False
        self._filler.fill([matcher])
        return matcher.may_end

    def _judge(self, text: str | None, validator: Any, outcome: Outcome) -> None:
        if text is None:
            outcome.cut += 1
            return
        try:
            value = json.loads(text, object_pairs_hook=_distinct, parse_float=Decimal)
        except InvalidOperation:  # Decimal cannot hold the exponent.
            outcome.unchecked += 1
            return
        except (ValueError, RepeatedKeyError) as error:
            outcome.invalid.append(f"{text[:_SHOWN]}: {error!r}")
            return
        try:
            validator.validate(value)
            outcome.valid += 1
        except jsonschema.ValidationError as error:
            place = f"{error.json_path} {'.'.join(map(str, error.schema_path))}"
            outcome.invalid.append(f"{text[:_SHOWN]}: {place}: {error.message[:_SHOWN]}")
        except Exception:  # The schema refers to the network, or has a regex that Python lacks.
            outcome.unchecked += 1


class DeadEndError(Exception):
    """A mask allows no token."""


def _validator(schema: Any) -> Any:
    # Decimals keep multipleOf exact: no float is a multiple of 0.01.
    schema = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def _is_valid(validator: Any, instance: object) -> bool:
    try:
        return bool(validator.is_valid(instance))
    except Exception:
        return True


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise RepeatedKeyError(sorted(key for key, _ in pairs))
    return members


def examine_all(cases: Sequence[Case], examiner: Examiner, jobs: int) -> Iterator[Outcome]:
    """Examine each case in a fork of its own, because a schema may end the process."""
    waiting = list(reversed(cases))
    running: dict[int, tuple[int, Case, bytearray]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            case = waiting.pop()
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                _report(case, examiner, writer)
            os.close(writer)
            running[reader] = child, case, bytearray()
        for ready in select.select(list(running), [], [])[0]:
            child, case, content = running[ready]
            piece = os.read(ready, 1 << 16)
            content += piece
            if not piece:
                os.close(ready)
                del running[ready]
                _, status = os.waitpid(child, 0)
                if os.WIFSIGNALED(status) or not content:
                    yield Outcome(case.name, broken=f"signal {os.WTERMSIG(status)}")
                else:
                    yield Outcome(**json.loads(content))


def _report(case: Case, examiner: Examiner, writer: int) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_SECONDS)
        try:
            outcome = examiner.examine(case)
        except Exception as error:
            outcome = Outcome(case.name, broken=f"{type(error).__name__}: {error}"[:_SHOWN])
        with os.fdopen(writer, "w") as pipe:
            json.dump(asdict(outcome), pipe)
    finally:
        os._exit(0)


def cause_of(refusal: str) -> str:
    """Return the keyword or format that a refusal names, or its first words."""
    if match := re.search(r'[Tt]he (keyword "[^"]+"|format "[^"]+")', refusal):
        return match[1]
    return re.sub(r'["/].*', "…", refusal)[:70]


def report(outcomes: Sequence[Outcome], *, verbose: bool) -> None:
    """Print the counts, the refusals by cause, and the invalid texts."""
    accepted = [o for o in outcomes if not o.refusal and not o.broken]
    texts = {
        name: sum(getattr(o, name) for o in accepted) for name in ("valid", "cut", "unchecked")
    }
    invalid = sum(len(o.invalid) for o in accepted)
    refused = sum(bool(o.refusal) for o in outcomes)
    matched, missed = (sum(getattr(o, name) for o in accepted) for name in ("matched", "missed"))
    share = refused / max(len(outcomes), 1)
    broken = sum(bool(outcome.broken) for outcome in outcomes)
    print(
        f"schemas {len(outcomes)}: accepted {len(accepted)}, refused {refused} ({share:.1%}),"
        f" broken {broken}"
    )
    counts = ", ".join(f"{name} {count}" for name, count in texts.items())
    print(f"texts: {counts}, invalid {invalid}")
    print(f"valid instances: {matched} accepted of {matched + missed}")
    causes = Counter(cause_of(o.refusal) for o in outcomes if o.refusal)
    for cause, count in causes.most_common():
        print(f"  refused {count:5}  {cause}")
    for outcome in outcomes:
        if outcome.broken:
            print(f"  broken {outcome.name}: {outcome.broken}")
        for text in outcome.invalid if verbose else outcome.invalid[:2]:
            print(f"  invalid {outcome.name}: {text}")
        if verbose and outcome.refusal:
            print(f"  refused {outcome.name}: {outcome.refusal}")


def _sample(cases: list[Case], limit: int | None, seed: int) -> list[Case]:
    if limit is None or limit >= len(cases):
        return cases
    return random.Random(seed).sample(cases, limit)


def main(arguments: Mapping[str, Any]) -> int:
    """Run the command. Return 1 if a text was invalid or an examination broke."""
    vocabulary = load(arguments["model"])
    examiner = Examiner(vocabulary, arguments["draws"], arguments["tokens"], arguments["seed"])
    failed = False
    run = functools.partial(examine_all, examiner=examiner, jobs=arguments["jobs"])
    for read, directory in ((read_schemas, arguments["schemas"]), (read_suite, arguments["suite"])):
        if directory is None:
            continue
        cases = _sample(list(read(directory)), arguments["limit"], arguments["seed"])
        outcomes = sorted(run(cases), key=lambda outcome: outcome.name)
        print(f"{directory}")
        report(outcomes, verbose=arguments["verbose"])
        if path := arguments["out"]:
            path.write_text("".join(json.dumps(asdict(o)) + "\n" for o in outcomes))
        failed |= any(outcome.invalid or outcome.broken for outcome in outcomes)
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schemas", type=Path, help="directory of schemas")
    parser.add_argument("--suite", type=Path, help="directory of the test suite's drafts")
    parser.add_argument("--model", type=Path, default=_MODEL, help="checkpoint directory")
    parser.add_argument("--limit", type=int, help="number of schemas, sampled by the seed")
    parser.add_argument("--draws", type=int, default=4, help="texts drawn of each schema")
    parser.add_argument("--tokens", type=int, default=600, help="maximum tokens of a text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="schemas examined at a time")
    parser.add_argument("--out", type=Path, help="file of the outcomes, as JSON lines")
    parser.add_argument("--verbose", action="store_true", help="show each refusal and invalid text")
    sys.exit(main(vars(parser.parse_args())))
