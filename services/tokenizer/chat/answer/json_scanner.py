"""Scanner of JSON, character by character; it refuses the first that can't belong to JSON."""

from enum import Enum

__all__ = ["JsonScanner"]

_SPACE = frozenset(" \t\n\r")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrtu')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_MAX_DEPTH = 128

# continuations of a number by its last part: RFC 8259, section 6
_NUMBER = {
    "-": {"0": "zero", "digit": "int"},
    "zero": {".": "point", "e": "e"},
    "int": {"digit": "int", ".": "point", "e": "e"},
    "point": {"digit": "fraction"},
    "fraction": {"digit": "fraction", "e": "e"},
    "e": {"sign": "esign", "digit": "exponent"},
    "esign": {"digit": "exponent"},
    "exponent": {"digit": "exponent"},
}
_WHOLE_NUMBER = frozenset({"zero", "int", "fraction", "exponent"})


class _Expects(Enum):
    VALUE = "a value"
    VALUE_OR_END = "a value, or the end of the array"
    KEY = "a key"
    KEY_OR_END = "a key, or the end of the object"
    COLON = "a colon"
    COMMA_OR_END = "a comma, or the end of the object or array"
    NOTHING = "nothing: the value is complete"


class JsonScanner:
    """Scanner of one object or array, from its first character on."""

    def __init__(self) -> None:
        self._open: list[str] = []  # closing brackets of all open objects and arrays
        self._expects = _Expects.VALUE
        self._in_string = False
        self._string_is_key = False
        self._escape = ""  # the part of an escape sequence that was read
        self._literal = ""  # the rest of true, false or null
        self._number = ""  # the part of a number that was read last

    @property
    def is_complete(self) -> bool:
        """True if the value ended."""
        return self._expects is _Expects.NOTHING

    @property
    def depth(self) -> int:
        """Number of open objects and arrays."""
        return len(self._open)

    @property
    def awaits_key(self) -> bool:
        """True if a key comes next."""
        return self._expects in (_Expects.KEY, _Expects.KEY_OR_END) and not self._in_string

    @property
    def awaits_value(self) -> bool:
        """True if the value of a member comes next."""
        inside = self._in_string or self._literal or self._number
        return self._expects is _Expects.VALUE and not inside

    @property
    def is_closable(self) -> bool:
        """True if closing quotes and brackets complete the value."""
        if self._in_string:
            return not self._string_is_key and not self._escape
        if self._literal or self._number:
            return self._number in _WHOLE_NUMBER
        return self.is_complete or self._expects in _MAY_END

    def push(self, character: str) -> bool:
        """Read a character; return false, without reading it, if the value can't contain it."""
        if self._in_string:
            return self._push_in_string(character)
        if self._literal:
            if character != self._literal[0]:
                return False
            self._literal = self._literal[1:]
            if not self._literal:
                self._expects = _Expects.COMMA_OR_END
            return True
        if self._number:
            follow = _NUMBER[self._number]
            found = follow.get(character) or follow.get(_number_kind(character))
            if found:
                self._number = found
                return True
            if self._number not in _WHOLE_NUMBER:
                return False
            self._number = ""
            self._expects = _Expects.COMMA_OR_END
        return self._push_between(character)

    def completion(self) -> str:
        """Return the shortest text that completes the value, and complete it."""
        text = ""
        if self._in_string:
            text, self._escape = _rest_of_escape(self._escape) + '"', ""
            self._in_string = False
            self._expects = _Expects.COLON if self._string_is_key else _Expects.COMMA_OR_END
        elif self._literal:
            text, self._literal = self._literal, ""
            self._expects = _Expects.COMMA_OR_END
        elif self._number:
            text, self._number = "" if self._number in _WHOLE_NUMBER else "0", ""
            self._expects = _Expects.COMMA_OR_END
        if self._expects is _Expects.KEY:
            text += '"":null'
        elif self._expects is _Expects.COLON:
            text += ":null"
        elif self._expects is _Expects.VALUE:
            text += "null"
        text += "".join(reversed(self._open))
        self._open.clear()
        self._expects = _Expects.NOTHING
        return text

    def _push_in_string(self, character: str) -> bool:
        if self._escape:
            if character not in (_ESCAPES if self._escape == "\\" else _HEX):
                return False
            self._escape += character
            if self._escape[1] != "u" or len(self._escape) == 6:
                self._escape = ""
        elif character == "\\":
            self._escape = character
        elif character == '"':
            self._in_string = False
            self._expects = _Expects.COLON if self._string_is_key else _Expects.COMMA_OR_END
        elif character < " ":
            return False
        return True

    def _push_between(self, character: str) -> bool:
        expects = self._expects
        if expects is _Expects.NOTHING:
            return False
        if character in _SPACE:
            return True
        if expects is _Expects.COLON:
            if character == ":":
                self._expects = _Expects.VALUE
            return character == ":"
        if expects is _Expects.COMMA_OR_END and character == ",":
            self._expects = _Expects.KEY if self._open[-1] == "}" else _Expects.VALUE
            return True
        if character in "}]" and expects in _MAY_END:
            if not self._open or self._open[-1] != character:
                return False
            self._open.pop()
            self._expects = _Expects.COMMA_OR_END if self._open else _Expects.NOTHING
            return True
        if expects in (_Expects.KEY, _Expects.KEY_OR_END):
            self._in_string = self._string_is_key = character == '"'
            return self._in_string
        if expects in (_Expects.VALUE, _Expects.VALUE_OR_END):
            return self._begin_value(character)
        return False

    def _begin_value(self, character: str) -> bool:
        if character == "{" or character == "[":
            if len(self._open) == _MAX_DEPTH:
                return False
            self._open.append("}" if character == "{" else "]")
            self._expects = _Expects.KEY_OR_END if character == "{" else _Expects.VALUE_OR_END
        elif not self._open:
            return False  # neither an object nor an array
        elif character == '"':
            self._in_string, self._string_is_key = True, False
        elif character in _LITERALS:
            self._literal = _LITERALS[character][1:]
        elif character == "-":
            self._number = "-"
        elif character in _DIGITS:
            self._number = "zero" if character == "0" else "int"
        else:
            return False
        return True


_MAY_END = frozenset({_Expects.COMMA_OR_END, _Expects.KEY_OR_END, _Expects.VALUE_OR_END})


def _number_kind(character: str) -> str:
    if character in _DIGITS:
        return "digit"
    return {"E": "e", "+": "sign", "-": "sign"}.get(character, "")


def _rest_of_escape(escape: str) -> str:
    if not escape:
        return ""
    return "\\" if escape == "\\" else "0" * (6 - len(escape))
