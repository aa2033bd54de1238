"""Rules of a grammar in llguidance's dialect of Lark, with a further grammar for each schema."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from services.tokenizer.chat.answer.call_syntax import ID, INDEX
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["GrammarRules", "chosen", "literal", "regex"]

_ANY = {ID: ("id", "/[A-Za-z0-9_.-]{1,40}/"), INDEX: ("index", "/[0-9]{1,4}/")}


class GrammarRules:
    """Rules and schemas of one grammar."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """token_ids: ids of marks that no text can spell."""
        self._token_ids = token_ids
        longest_first = sorted(token_ids, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, [*longest_first, *_ANY]))})")
        self._rules = ["TEXT: /(?s:.*)/"]
        self._parts: list[dict[str, Any]] = []
        self._shared: dict[tuple[str, str], str] = {}
        self.places: dict[str, str] = {}
        """Field of the request from which each place of the grammar was built"""
        self.ignored: list[str] = []
        """Paths of schema keywords that the form of calls can't enforce"""

    def leave_out(
        self, keywords: Collection[str], tool: completion_pb2.Tool, place: str, path: str, why: str
    ) -> None:
        """Note keywords of the schema at `path` that the form of calls can't enforce.

        Raises INVALID_ARGUMENT with the reason for the tool at `place` if it is strict.
        """
        if keywords and tool.strict:
            raise invalid(place, f"{why} {', '.join(sorted(keywords))}.")
        self.ignored += (f"{path}.{keyword}" for keyword in sorted(keywords))

    def finish(self, start: str) -> types_pb2.GrammarSpec:
        """Return the grammar that starts with the rule `start`."""
        lark = "\n".join([f"start: {start}", *self._rules])
        grammars = [{"lark_grammar": lark}, *self._parts]
        return types_pb2.GrammarSpec(llguidance=json.dumps({"grammars": grammars}))

    def mark(self, text: str) -> str:
        """Return the body of a mark: tokens by id, patterns for placeholders, all else spelled."""
        parts: list[str] = []
        for piece in self._tokens.split(text):
            token = self._token_ids.get(piece)
            if token is not None:
                parts.append(f"<[{token}]>")
            elif piece in _ANY:
                name, pattern = _ANY[piece]
                parts.append(name)
                if f"{name}: {pattern}" not in self._rules:
                    self.rule(name, pattern)
            elif piece:
                parts.append(literal(piece))
        return " ".join(parts)

    def schema(self, name: str, schema: Mapping[str, Any], place: str) -> str:
        """Add a rule of JSON by a schema from `place` of the request; return its reference."""
        return self.part(name, {"json_schema": schema}, place)

    def value(self, name: str, schema: Mapping[str, Any], place: str) -> str:
        """Add a rule of JSON where no other text can begin; return its reference.

        The grammar service prevents repeated keys and items only in such JSON.
        """
        return self.part(name, {"json_value": schema}, place)

    def rule(self, name: str, body: str) -> str:
        """Add a rule; return its name, which is `name` without options in brackets."""
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def through(self, name: str, mark: str, text: str = "TEXT") -> str:
        """Add a rule of text that ends with a mark; return its name."""
        # a mark without a token could be part of the text: a lazy rule ends at the first mark
        places = [place for token in self._token_ids if (place := mark.find(token)) >= 0]
        if not places:
            return self.rule(f"{name}[lazy]", f"{text} {self.mark(mark)}")
        # the mark's beginning before its token counts as text, which only the token ends
        return self.rule(name, f"{text} {self.mark(mark[min(places) :])}")

    def shared_through(self, name: str, mark: str) -> str:
        """Return the rule of `through` for a mark, which is added once."""
        if (name, mark) not in self._shared:
            self._shared[name, mark] = self.through(f"{name}_{len(self._shared)}", mark)
        return self._shared[name, mark]

    def shared_text(self, name: str, mark: str) -> str:
        """Return the rule of text without the first character of a mark, which is added once."""
        if (name, mark) not in self._shared:
            ends_text = mark.startswith(tuple(self._token_ids))
            body = "TEXT" if ends_text else f"/[^{re.escape(mark.strip()[0])}]*/"
            self._shared[name, mark] = self.rule(f"{name}_{len(self._shared)}", body)
        return self._shared[name, mark]

    def part(self, name: str, grammar: Mapping[str, Any], place: str) -> str:
        """Add a grammar; return the reference to it."""
        self._parts.append({"name": name, **grammar})
        keyword = "json_value" if "json_value" in grammar else "json_schema"
        self.places[f"$.grammars[{len(self._parts)}].{keyword}"] = place
        return f"@{name}"


def literal(text: str) -> str:
    """Return a string literal of the grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def regex(pattern: str) -> str:
    """Return a pattern as a regular expression of the grammar, between slashes."""
    escaped = re.sub(
        r"\\.|/",
        lambda match: match.group() if match.group() != "/" else "\\/",
        pattern,
        flags=re.DOTALL,
    )
    return f"/{escaped}/".replace("\n", "\\n")


def chosen(
    grammar: GrammarRules, name: str, members: Sequence[tuple[str, bool]], separator: str
) -> str:
    """Return the rule of members in order. Optional members may be absent."""
    if not members:
        return ""
    tail = ""  # rule of the text behind a member; members are added from last to first
    heads: list[str] = []
    for place in range(len(members) - 1, -1, -1):
        member, required = members[place]
        if required:
            heads = [f"{member} {tail}"]
        else:
            heads.insert(0, f"{member} {tail}")
        following = f"{separator} {member} {tail}"
        body = following if required else f"{following} | {tail}" if tail else f"{following} |"
        tail = grammar.rule(f"{name}_{place}", body)
    optional = "" if any(required for _, required in members) else " |"
    return grammar.rule(name, " | ".join(heads) + optional)
