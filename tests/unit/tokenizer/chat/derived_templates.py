"""Small templates that write calls in the forms of many families, each as its models do."""

from collections.abc import Mapping

__all__ = ["DERIVED", "Derived"]

from dataclasses import dataclass

_TURNS = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ 'OPEN' + message.reasoning_content + 'CLOSE' }}{% endif %}
{{- message.content or '' }}
{%- if message.tool_calls %}
CALLS
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_EACH = """{{- 'FIRST' }}
{%- for call in message.tool_calls %}
{%- set function = call.function %}
CALL
{%- if not loop.last %}{{ 'JOIN' }}{% endif %}
{%- endfor %}
{{- 'LAST' }}"""
_MEMBERS = """{%- for key, value in function.arguments | items %}
MEMBER
{%- if not loop.last %}{{ 'COMMA' }}{% endif %}
{%- endfor %}"""
_OBJECT = """{{- '{"name": "' + function.name + '", "KEY": ' }}
{{- function.arguments | tojson + '}' }}"""
_JSON = "(value if value is string else value | tojson)"
_PYTHON = "(value | string)"


@dataclass(frozen=True, slots=True)
class Derived:
    """A template, and what it takes."""

    source: str
    tokens: tuple[str, ...] = ()
    """Control tokens of the form"""
    is_single: bool = False
    """True if it writes one call of a message"""
    thinks: bool = False
    """True if it writes reasoning"""
    begins_messages: bool = False
    """True if its calls have no mark, so that they are read at the start of a message alone"""


def _calls(call: str, *, first: str = "", join: str = "", last: str = "") -> str:
    parts = {"FIRST": first, "LAST": last, "JOIN": join}
    text = _EACH.replace("CALL\n", call + "\n", 1)
    for name, part in parts.items():
        text = text.replace(f"'{name}'", repr(part))
    return text


def _turns(calls: str, opens: str = "<think>", closes: str = "</think>") -> str:
    text = _TURNS.replace("CALLS", calls)
    return text.replace("'OPEN'", repr(opens)).replace("'CLOSE'", repr(closes))


def _objects(
    before: str = "", behind: str = "", *, key: str = "arguments", first: str = "",
    join: str = "", last: str = "",
) -> str:  # fmt: skip
    call = "\n".join((f"{{{{- {before!r} }}}}", _OBJECT.replace("KEY", key),
                      f"{{{{- {behind!r} }}}}"))  # fmt: skip
    return _calls(call, first=first, join=join, last=last)


def _tags(
    begins: str, middle: str, ends: str, member: str, *, comma: str = "", first: str = "",
    join: str = "", last: str = "",
) -> str:  # fmt: skip
    members = _MEMBERS.replace("MEMBER", member).replace("'COMMA'", repr(comma))
    call = f"{{{{- {begins!r} + function.name + {middle!r} }}}}\n{members}\n{{{{- {ends!r} }}}}"
    return _calls(call, first=first, join=join, last=last)


def _named(begins: str, middle: str, ends: str, *, join: str = "") -> str:
    call = (
        f"{{{{- {begins!r} + function.name + {middle!r} }}}}"
        f"{{{{- function.arguments | tojson + {ends!r} }}}}"
    )
    return _calls(call, join=join)


_NESTED = """{%- macro tags(value) -%}
{%- if value is mapping -%}
{%- for key, part in value | items -%}
{{ 'NS<' + key + '>' }}{{ tags(part) }}{{ 'NS</' + key + '>' }}
{%- endfor -%}
{%- elif value is string -%}{{ value }}
{%- elif value is iterable -%}
{%- for part in value %}{{ 'NS<item>' }}{{ tags(part) }}{{ 'NS</item>' }}{% endfor -%}
{%- else -%}{{ value | tojson }}
{%- endif -%}
{%- endmacro -%}
""".replace("NS", "]<]ns[>[")
_BARE = """{%- macro bare(value) -%}
{%- if value is string -%}{{ 'Q' + value + 'Q' }}
{%- elif value is mapping -%}{{ '{' }}
{%- for key, part in value | dictsort -%}
{{ key + ':' }}{{ bare(part) }}{% if not loop.last %},{% endif -%}
{%- endfor -%}{{ '}' }}
{%- elif value is iterable -%}{{ '[' }}
{%- for part in value %}{{ bare(part) }}{% if not loop.last %},{% endif %}{% endfor -%}{{ ']' }}
{%- else -%}{{ value | tojson }}
{%- endif -%}
{%- endmacro -%}
"""
_TYPE = (
    "('string' if value is string else 'boolean' if value is boolean else 'number' if value is "
    "number else 'object' if value is mapping else 'array')"
)
_DSML = "｜DSML｜"


def _braced(call: str, close: str, quote: str) -> str:
    calls = _calls(
        f"{{{{- {call!r} + function.name }}}}{{{{- bare(function.arguments) + {close!r} }}}}"
    )
    return _BARE.replace("'Q'", repr(quote)) + _turns(calls)


DERIVED: Mapping[str, Derived] = {
    "name_as_key": Derived(
        _turns(
            _calls(
                "{{- '{\"' + function.name + '\": ' + function.arguments | tojson + '}' }}",
                first="<|tools_prefix|>[", join=", ", last="]<|tools_suffix|>",
            ),
            "<|inner_prefix|>", "<|inner_suffix|>",
        ),
        ("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        thinks=True,
    ),
    "list_with_ids": Derived(
        _turns(
            _calls(
                _OBJECT.replace("KEY", "arguments").replace(
                    "+ '}'", "+ ', \"id\": \"' + call.id + '\"}'"
                ),
                first="\n<tool_calls>[", join=", ", last="]</tool_calls>\n",
            )
        )
    ),
    "indented_list": Derived(
        _turns(_objects("\n    ", join=",", first="<tool_calls>[", last="\n]</tool_calls>"))
    ),
    "list_in_capitals": Derived(
        _turns(_objects(join=", ", first="<TOOLCALL>[", last="]</TOOLCALL>")), thinks=True
    ),
    "bare_list": Derived(_turns(_objects(join=", ", first="[", last="]")), begins_messages=True),
    "functools": Derived(_turns(_objects(join=", ", first="functools[", last="]"))),
    "plugin": Derived(
        _turns(_objects("<|action_start|><|plugin|>", "<|action_end|>", key="parameters")),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "longcat": Derived(
        _turns(_objects("<longcat_tool_call>", "</longcat_tool_call>", join="\n"))
    ),
    "marked_object": Derived(
        _turns(_objects("<|function_call|>")).replace(
            "in message.tool_calls", "in message.tool_calls[:1]"
        ),
        ("<|function_call|>",),
        is_single=True,
    ),
    "tags_of_seed": Derived(
        _turns(
            _tags(
                "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>",
                f"{{{{- '<parameter=' + key + '>' + {_PYTHON} + '</parameter>\\n' }}}}", join="\n",
            ),
            "<seed:think>", "</seed:think>",
        ),
        ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        thinks=True,
    ),
    "attributes": Derived(
        _turns(
            _tags(
                '<function name="', '">', "</function>",
                f"{{{{- '<param name=\"' + key + '\">' + {_PYTHON} + '</param>' }}}}", join="\n",
            )
        ),
        thinks=True,
    ),
    "prefixed_tags": Derived(
        _turns(
            _tags(
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">',
                "</steptml:invoke><｜tool_call_end｜>",
                f"{{{{- '<steptml:parameter name=\"' + key + '\">' + {_JSON} }}}}"
                "{{- '</steptml:parameter>' }}",
                first="<｜tool_calls_begin｜>", last="<｜tool_calls_end｜>",
            )
        ),
        ("<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>", "<｜tool_calls_begin｜>",
         "<｜tool_calls_end｜>"),
    ),
    "flags_of_strings": Derived(
        _turns(
            _tags(
                f'\n<{_DSML}invoke name="', '">\n', f"</{_DSML}invoke>",
                f"{{{{- '<{_DSML}parameter name=\"' + key + '\" string=\"' }}}}"
                "{{- ('true' if value is string else 'false') + '\">' }}"
                f"{{{{- {_JSON} + '</{_DSML}parameter>\\n' }}}}",
                first=f"\n\n<{_DSML}tool_calls>", last=f"\n</{_DSML}tool_calls>",
            )
        ),
        (_DSML,),
    ),
    "types_of_values": Derived(
        _turns(
            _tags(
                '<|open|>call tool="', '"<|sep|>', "<|close|>call<|sep|>",
                f"{{{{- '<|open|>argument key=\"' + key + '\" type=\"' + {_TYPE} + '\"<|sep|>' }}}}"
                f"{{{{- {_JSON} + '<|close|>argument<|sep|>' }}}}",
                first="<|open|>tools<|sep|>", last="<|close|>tools<|sep|>",
            )
        ),
        ("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "suffixed_tags": Derived(
        _turns(
            _tags(
                "\n<tool_call:x>", "<tool_sep:x>\n", "</tool_call:x>",
                f"{{{{- '<arg_key:x>' + key + '</arg_key:x>\\n<arg_value:x>' + {_JSON} }}}}"
                "{{- '</arg_value:x>\\n' }}",
                first="<tool_calls:x>", last="\n</tool_calls:x>",
            ),
            "<think:x>", "</think:x>",
        ),
        ("<tool_call:x>", "</tool_call:x>", "<think:x>", "</think:x>"),
        thinks=True,
    ),
    "nested_tags": Derived(
        _NESTED
        + _turns(
            _calls(
                "{{- ']<]ns[>[<invoke name=\"' + function.name + '\">' }}"
                "{{- tags(function.arguments) + ']<]ns[>[</invoke>\\n' }}",
                first="]<]ns[>[<tool_call>\n", last="]<]ns[>[</tool_call>",
            ),
            "<mm:think>", "</mm:think>",
        ),
        ("]<]ns[>[",),
        thinks=True,
    ),
    "name_twice": Derived(
        _turns(
            _tags(
                "", '<|message|><x:invoke name="', "", "", join=""
            )
        ).replace(
            "{{- '' + function.name + '<|message|><x:invoke name=\"' }}",
            "{{- ' to=' + function.name + '<|message|><x:invoke name=\"' }}"
            "{{- function.name + '\">' }}",
        ).replace("{%- for key, value in function.arguments | items %}\n\n",
                  "{%- for key, value in function.arguments | items %}\n"
                  f"{{{{- '\\n<x:parameter name=\"' + key + '\">' + {_JSON} }}}}"
                  "{{- '</x:parameter>' }}\n")
        .replace("{%- endfor %}\n{{- '' }}", "{%- endfor %}\n{{- '\\n</x:invoke><|eom|>' }}", 1),
        ("<|message|>", "<|eom|>"),
    ),
    "pythonic": Derived(
        _turns(
            _tags(
                "", "(", ")",
                "{{- key + '=' + (\"'\" + value + \"'\" if value is string else value | string) }}",
                comma=", ", first="<|tool_call_start|>[", join=", ", last="]<|tool_call_end|>",
            )
        ),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        thinks=True,
    ),
    "pythonic_lines": Derived(
        _turns(
            _tags(
                "", "(", ")",
                "{{- key + '=' + (\"'\" + value + \"'\" if value is string else value | string) }}",
                comma=", ", first="<function_calls>", join="\n", last="</function_calls>",
            )
        )
    ),
    "braces": Derived(
        _braced("<|tool_call>call:", "<tool_call|>", '<|"|>'),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "escaped_braces": Derived(
        _braced("<start_function_call>call:", "<end_function_call>", "<escape>"),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "ids_in_tokens": Derived(
        _turns(
            _calls(
                "{{- '<|call:begin|>' + call.id + '<|call:name|>' + function.name }}"
                "{{- '<|call:args|>' + function.arguments | tojson + '<|call:end|>' }}",
                first="<|tool_calls|>",
            )
        ),
        ("<|call:begin|>", "<|call:name|>", "<|call:args|>", "<|call:end|>", "<|tool_calls|>"),
    ),
    "function_tag": Derived(_turns(_named("<function=", ">", "</function>"))),
    "begun_by_the_prompt": Derived(
        _turns(_named(">>>", "\n", ""))
        .replace("{{- message.content or '' }}",
                 "{%- if message.content and message.role == 'assistant' %}{{ '>>>all\n' }}"
                 "{%- endif %}{{ message.content or '' }}")
        .replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n>>>' }}")
    ),
}  # fmt: skip
"""Templates by the kind of their calls"""
