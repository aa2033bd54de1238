"""Bounds of request fields, which the protos state as options: access to them, and their check."""

import re
from collections.abc import Callable, Collection, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from math import inf, nextafter
from sys import float_info
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tokenwire.pb.options.v1 import bounds_pb2
from tokenwire.pb.options.v1.bounds_pb2 import Bounds
from tokenwire.pb.types.v1.types_pb2 import TokenIds

__all__ = ["Fault", "bounds_of", "check_bounds", "fault_of", "most"]

_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_FEW_FIELDS = 4
"""Fields of a message that are read one by one; of more, it is faster to list those that are set"""
_WRAPPERS = ("ids", "items")
"""Fields whose names say nothing without that of the field which holds their message"""


@dataclass(frozen=True, slots=True)
class Fault:
    """A value outside its bounds."""

    rule: str
    """The broken rule and the value, such as "must be at most 2, got 3" """
    path: str = ""
    """Path of the value within the one that was checked"""

    @property
    def sentence(self) -> str:
        """The fault as a sentence."""
        parts = self.path.split(".")
        name = ".".join(parts[-2 if parts[-1] in _WRAPPERS else -1 :])
        return f"{name} {self.rule}."

    def within(self, place: str) -> "Fault":
        """Return the fault with a field, or an index in brackets, in front of its path."""
        dot = "." if self.path and not self.path.startswith("[") else ""
        return Fault(self.rule, f"{place}{dot}{self.path}")


_Check: TypeAlias = Callable[[Any], Fault | None]


def check_bounds(message: Message, path: str = "") -> None:
    """Raise INVALID_ARGUMENT for the first field that `fault_of` finds.

    path: place of the message in the request.
    """
    fault = fault_of(message)
    if fault is not None:
        from tokenwire.errors import invalid  # gRPC, which processes that compute do not load

        fault = fault.within(path) if path else fault
        raise invalid(fault.path, fault.sentence)


def fault_of(message: Message) -> Fault | None:
    """Return a field outside its bounds, in the message or in those it holds; None without any.

    The time grows with the fields that are set, and not with those that the message may have.
    """
    check = _message_check(message.DESCRIPTOR)
    return None if check is None else check(message)


def bounds_of(message: type[Message], path: str) -> Bounds:
    """Return the bounds of a field by its path, such as "sampling.top_k"; empty without any."""
    first, *others = path.split(".")
    field = message.DESCRIPTOR.fields_by_name[first]
    for name in others:
        assert field.message_type is not None, path
        field = field.message_type.fields_by_name[name]
    return field.GetOptions().Extensions[bounds_pb2.bounds]


def most(message: type[Message], path: str) -> int:
    """Return the upper bound of a field: of its number, or its items, characters or bytes."""
    bounds = bounds_of(message, path)
    limits = (bounds.most, bounds.max_items, bounds.max_length, bounds.max_bytes)
    return int(next(filter(None, limits)))


@cache
def _message_check(descriptor: Descriptor) -> _Check | None:
    """Return the check of a message that can't hold itself; None if no field has bounds."""
    checks = {field: check for field in descriptor.fields if (check := _field_check(field))}
    oneofs = [
        (oneof.name, {field.name: checks.pop(field, None) for field in oneof.fields})
        for oneof in descriptor.oneofs
        if oneof.GetOptions().Extensions[bounds_pb2.required]
    ]
    has_few = len(checks) <= _FEW_FIELDS
    fetched = [
        (field.name, field.has_presence, check)
        for field, check in checks.items()
        if has_few or _needs_value(field, check)
    ]
    listed = {} if has_few else {field.number: check for field, check in checks.items()}

    def check_message(message: Message) -> Fault | None:
        for field, value in message.ListFields() if listed else ():
            check = listed.get(field.number)
            if check is not None and (fault := check(value)) is not None:
                return fault.within(field.name)
        for name, may_be_absent, check in fetched:
            if may_be_absent and not message.HasField(name):
                continue
            if (fault := check(getattr(message, name))) is not None:
                return fault.within(name)
        for oneof, members in oneofs:
            present = message.WhichOneof(oneof)
            if present is None:
                return Fault(f"must be one of {', '.join(members)}", oneof)
            check = members[present]
            if check is not None and (fault := check(getattr(message, present))) is not None:
                return fault.within(present)
        return None

    return check_message if listed or fetched or oneofs else None


def _needs_value(field: FieldDescriptor, check: _Check) -> bool:
    if field.is_repeated:
        return field.GetOptions().Extensions[bounds_pb2.bounds].min_items > 0
    return not field.has_presence and check(field.default_value) is not None


def _field_check(field: FieldDescriptor) -> _Check | None:
    bounds = field.GetOptions().Extensions[bounds_pb2.bounds]
    if not field.is_repeated:
        return _value_check(field, bounds)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value = _value_check(field.message_type.fields_by_name["value"], bounds.items)
        return None if value is None else _each_value(value)
    count = _size_check(bounds.min_items, bounds.max_items, "item")
    item = _value_check(field, bounds.items)
    return count if item is None else _each_item(item, count)


def _each_item(check: _Check, check_count: _Check | None) -> _Check:
    def check_items(items: Sequence[object]) -> Fault | None:
        if check_count is not None and (fault := check_count(items)) is not None:
            return fault
        for index in range(len(items)):  # faster than an iterator where items are few
            if (fault := check(items[index])) is not None:
                return fault.within(f"[{index}]")
        return None

    return check_items


def _each_value(check: _Check) -> _Check:
    def check_values(entries: Any) -> Fault | None:
        for key, value in entries.items():
            if (fault := check(value)) is not None:
                return fault.within(f"[{key}]")
        return None

    return check_values


def _value_check(field: FieldDescriptor, bounds: Bounds) -> _Check | None:
    """Return the check of one value: of a field, or of an item of a repeated one."""
    if field.message_type is not None:
        count = _size_check(bounds.min_items, bounds.max_items, "id")
        return _message_check(field.message_type) if count is None else _ids_check(count)
    if field.enum_type is not None:
        least = bounds.least
        names = {each.number: each.name for each in field.enum_type.values if each.number >= least}
        return _choice_check(names, names.values())
    if bounds.one_of:
        return _choice_check({"", *bounds.one_of}, bounds.one_of)
    if bounds.pattern:
        return _pattern_check(bounds.pattern)
    if field.type == FieldDescriptor.TYPE_STRING:
        return _size_check(bounds.min_length, bounds.max_length, "character")
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _size_check(bounds.min_bytes, bounds.max_bytes, "byte")
    return _range_check(bounds, is_float=field.cpp_type in _FLOATS)


def _ids_check(check_count: _Check) -> _Check:
    def check_ids(tokens: TokenIds) -> Fault | None:
        fault = check_count(tokens.ids)
        return None if fault is None else fault.within("ids")

    return check_ids


def _size_check(least: int, most: int, noun: str) -> _Check | None:
    """Return the check of a number of items, characters or bytes; a bound of 0 is none."""
    if not (least or most):
        return None
    if least and most:
        rule = f"{least:,} to {most:,} {noun}s"
    else:
        rule = f"at {'least' if least else 'most'} {least or most:,} {noun}"
        rule += "s" if (least or most) > 1 else ""
    highest = most or inf

    def check_size(value: Sized) -> Fault | None:
        if least <= len(value) <= highest:
            return None
        return Fault(f"must have {rule}, got {len(value):,}")

    return check_size


def _range_check(bounds: Bounds, *, is_float: bool) -> _Check | None:
    """Return the check of a number, which NaN and the infinities do not pass."""
    rules: list[str] = []
    lowest, highest, also = -float_info.max, float_info.max, None
    if bounds.HasField("least"):
        lowest = bounds.least
        rules.append(f"at least {_shown(lowest)}")
    if bounds.HasField("above"):
        lowest = nextafter(bounds.above, inf)
        rules.append(f"above {_shown(bounds.above)}")
    if bounds.HasField("most"):
        highest = bounds.most
        rules.append(f"at most {_shown(highest)}")
    elif is_float:
        rules.append("finite")
    rule = " and ".join(rules)
    if bounds.HasField("least") and bounds.HasField("most"):
        rule = f"between {_shown(lowest)} and {_shown(highest)}"
    if bounds.HasField("also"):
        also = bounds.also
        rule += f", or {_shown(also)}"

    def check_range(value: float) -> Fault | None:
        if lowest <= value <= highest or value == also:
            return None
        return Fault(f"must be {rule}, got {_shown(value)}")

    has_bounds = (lowest, highest) != (-float_info.max, float_info.max)
    return check_range if has_bounds else None


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,g}"


def _pattern_check(pattern: str) -> _Check:
    matches = re.compile(pattern).fullmatch
    return lambda text: None if matches(text) else Fault(f"must match {pattern}, got {text!r}")


def _choice_check(allowed: Collection[object], names: Collection[str]) -> _Check:
    rule = f"must be one of {', '.join(names)}"
    return lambda value: None if value in allowed else Fault(f"{rule}, got {value!r}")
