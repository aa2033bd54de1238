"""Parser of messages: the result does not depend on the pieces of the text, arguments are JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.chat.answer.message_parser import MessageParser, Segment, SegmentKind
from services.tokenizer.chat.answer.reasoning_formats import REASONING_FORMATS, ReasoningFormat
from services.tokenizer.chat.answer.response_parser import ResponseParser
from services.tokenizer.chat.answer.tool_formats import (
    JSON_FORMAT,
    TOOL_FORMATS,
    ToolFormat,
)

_FORMATS = {form.name: form for form in (*TOOL_FORMATS, JSON_FORMAT)}
_THINK = next(form for form in REASONING_FORMATS if form.name == "think")
_TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "where": {"$ref": "#/$defs/place"},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "get_time": {"type": "object", "properties": {}},
    "get": {"type": "object", "properties": {"x": {}}},
}


@dataclass(slots=True)
class _Message:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    fragments: int = 0
    source: int = 0

    def take(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self.source += segment.source
            if segment.kind is SegmentKind.CONTENT:
                self.content += segment.text
            elif segment.kind is SegmentKind.REASONING:
                self.reasoning += segment.text
            elif segment.kind is SegmentKind.CALL:
                self.calls.append((segment.text, ""))
            elif segment.kind is SegmentKind.ARGUMENTS:
                name, arguments = self.calls[-1]
                self.calls[-1] = name, arguments + segment.text
                self.fragments += 1

    def decoded(self) -> list[tuple[str, object]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def _parser(
    form: ToolFormat | None,
    reasoning: ReasoningFormat | None = None,
    *,
    is_reasoning: bool = False,
    is_forced: bool = False,
) -> MessageParser:
    return ResponseParser(reasoning, form, _TOOLS, is_reasoning=is_reasoning, is_forced=is_forced)


def _read(
    parser: MessageParser,
    pieces: Sequence[str],
    *,
    is_cut: bool = False,
    is_stopped: bool = False,
) -> _Message:
    message = _Message()
    for piece in pieces:
        message.take(parser.feed(piece))
    message.take(parser.finish(is_cut=is_cut, is_stopped=is_stopped))
    assert message.source == len("".join(pieces))
    return message


_WEATHER = ("get_weather", {"city": "São Tomé", "days": 3})
_TIME: tuple[str, dict[str, object]] = ("get_time", {})
# format, text, content, calls
_CASES: list[tuple[str, str, str, list[tuple[str, dict[str, object]]]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "São Tomé", "days": 3}}\n'
        "</tool_call>",
        "",
        [_WEATHER],
    ),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "São Tomé", "days": 3}, "name": "get_weather"}\n'
        "</tool_call>\n",
        "Let me see.",
        [_TIME, _WEATHER],
    ),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", [_TIME]),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": null}', "", [_TIME]),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": "{}"}', "", [_TIME]),
    ("hermes", "a <tool_box> and <tool_call", "a <tool_box> and <tool_call", []),
    (
        "hermes",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        [],
    ),
    (
        "hermes",
        ' <tool_call> <tool_call>{"name": "get_time", "arguments": {}}</tool_call> so',
        " <tool_call>so",
        [_TIME],
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "São Tomé", "days": 3} oh',
        "oh",
        [_WEATHER],
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "São Tomé", "days": 3!}}',
        "!}}",
        [_WEATHER],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "get_time", "arguments": {}}]</tool_call>',
        '<tool_call>[{"name": "get_time", "arguments": {}}]</tool_call>',
        [],
    ),
    (
        "qwen3_coder",
        "Well:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Tomé\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n</function>\n</tool_call>",
        "Well:",
        [_WEATHER, _TIME],
    ),
    (
        "qwen3_coder",
        '<function=get_weather><parameter=where>{"a": [1]}</parameter><parameter=units>null'
        "</parameter><parameter=city>null\n</parameter></function>",
        "",
        [("get_weather", {"where": {"a": [1]}, "units": None, "city": "null"})],
    ),
    ("qwen3_coder", "<function=get_weather> <b", "<b", [("get_weather", {})]),
    ("qwen3_coder", "<function=get_weath> <b", "<function=get_weath> <b", []),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "São Tomé", "days": 3}[TOOL_CALLS]get_time[ARGS]{}',
        "",
        [_WEATHER, _TIME],
    ),
    (
        "mistral",
        'Hm. [TOOL_CALLS]get_time[CALL_ID]123456789[ARGS]{} [TOOL_CALLS] get_weather{"days": 1}.',
        "Hm..",
        [_TIME, ("get_weather", {"days": 1})],
    ),
    (
        "mistral_array",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "São Tomé", "days": 3}, '
        '"id": "123456789"}, {"name": "get_time", "arguments": {}}]',
        "",
        [_WEATHER, _TIME],
    ),
    ("mistral_array", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": '
        '{"city": "São Tomé", "days": 3}}; {"name": "get_time", "parameters": {}}',
        "",
        [_WEATHER, _TIME],
    ),
    ("llama3_json", '\n{"name": "get_time", "parameters": {}} done', "done", [_TIME]),
    ("llama3_json", '{"a": {"name": "get_time"}}', '{"a": {"name": "get_time"}}', []),
    ("llama3_json", 'So {"name": "get_time"}', 'So {"name": "get_time"}', []),
    ("llama3_json", '<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
    ("json", '{"name": "get_time", "arguments": {}}', "", [_TIME]),
    (
        "pythonic",
        "[get_weather(city='São Tomé', days=3), get_time()]",
        "",
        [_WEATHER, _TIME],
    ),
    (
        "pythonic",
        'I think <|python_start|>[get(x=[true, {"a": null}, -1.5, (")", "\\"")])]<|python_end|>',
        "I think",
        [("get", {"x": [True, {"a": None}, -1.5, [")", '"']]})],
    ),
    (
        "deepseek_v3",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "São Tomé", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "Let me see.",
        [_WEATHER, _TIME],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "São Tomé", "days": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [_WEATHER, _TIME],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}",
        [],
    ),
    (
        "kimi_k2",
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "São Tomé", "days": 3}<|tool_call_end|>'
        "<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Hm.",
        [_WEATHER, _TIME],
    ),
    (
        "glm45",
        "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São Tomé</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>get_time\n</tool_call>",
        "",
        [_WEATHER, _TIME],
    ),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>\n a</b> \n</arg_value>"
        "</tool_call>",
        "",
        [("get_weather", {"city": "\n a</b> \n"})],
    ),
    ("glm45", "<tool_call>get_tim\n</tool_call>", "<tool_call>get_tim\n</tool_call>", []),
    (
        "minimax_m2",
        'So:\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">São Tomé'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n'
        "</invoke>\n</minimax:tool_call>",
        "So:",
        [_WEATHER, _TIME],
    ),
    (
        "minimax",
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "São Tomé", "days": 3}}\n'
        '{"name": "get_time", "arguments": {}}\n</tool_calls>',
        "",
        [_WEATHER, _TIME],
    ),
    (
        "command",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        '{"city": "São Tomé", "days": 3}},\n    {"tool_call_id": "1", "tool_name": "get_time", '
        '"parameters": {}}\n]<|END_ACTION|>',
        "",
        [_WEATHER, _TIME],
    ),
    (
        "granite",
        'Yes. <|tool_call|>[{"name": "get_weather", "arguments": {"city": "São Tomé", "days": 3}}]',
        "Yes.",
        [_WEATHER],
    ),
    (
        "phi4",
        '<|tool_call|>[{"name": "get_time", "arguments": {}}]<|/tool_call|>',
        "",
        [_TIME],
    ),
    (
        "phi4",
        'So: functools[{"name": "get_weather", "arguments": {"city": "São Tomé", "days": 3}},\n '
        '{"name": "get_time", "arguments": {}}]',
        "So:",
        [_WEATHER, _TIME],
    ),
    (
        "granite",
        '<tool_call> [\n  {"name": "get_weather",\n   "arguments": {"city": "São Tomé", '
        '"days": 3}},\n  {"name": "get_time", "arguments": {}}\n]',
        "",
        [_WEATHER, _TIME],
    ),
    (
        "jamba",
        '<tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "São Tomé", "days": 3}},'
        '\n    {"name": "get_time", "arguments": {}, "id": "a-1"}\n]</tool_calls>',
        "",
        [_WEATHER, _TIME],
    ),
    (
        "minimax",
        '<tool_calls>[{"name": "get_time", "arguments": {}}]</tool_calls> Yes.',
        "Yes.",
        [_TIME],
    ),
    (
        "hermes",
        '<tool_call>\n{\n  "name" : "get_time",\n  "arguments" :\n  {}\n}\n</tool_call>',
        "",
        [_TIME],
    ),
    (
        "lfm2",
        "<|tool_call_start|> [get_weather(city='São Tomé', days=3), get_time()]"
        "<|tool_call_end|>\nWait.",
        "Wait.",
        [_WEATHER, _TIME],
    ),
    (
        "olmo3",
        "Hm.<function_calls>get_weather(city='São Tomé', days=3)\nget_time()</function_calls>",
        "Hm.",
        [_WEATHER, _TIME],
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>São Tomé<escape>,days:3}"
        "<end_function_call><start_function_call>call:get_time{}<end_function_call>",
        "",
        [_WEATHER, _TIME],
    ),
    (
        "gemma4",
        '<|tool_call>call:get{x:{b:[<|"|>}, ]<|"|>, -1.5,true],"c":null}}<tool_call|>',
        "",
        [("get", {"x": {"b": ["}, ]", -1.5, True], "c": None}})],
    ),
    ("gemma4", "<|tool_call>call:get{x:[1", "x:[1", [("get", {})]),
    (
        "internlm",
        '<|action_start|><|plugin|>\n{"name": "get_time", "parameters": {}}<|action_end|>',
        "",
        [_TIME],
    ),
    (
        "longcat",
        'Hm.<longcat_tool_call>{"name": "get_time", "arguments": {}}</longcat_tool_call>\n'
        '<longcat_tool_call>{"name": "get_time", "arguments": {}}</longcat_tool_call>\nSo.',
        "Hm.So.",
        [_TIME, _TIME],
    ),
    (
        "step3",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_weather"><steptml:parameter name="city">São Tomé'
        '</steptml:parameter><steptml:parameter name="days"> 3 </steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        "",
        [_WEATHER],
    ),
    (
        "step3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">São Tomé</steptml:parameter>'
        '<steptml:parameter name="days">3</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        '<｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="get_time"></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        "",
        [_WEATHER, _TIME],
    ),
    (
        "deepseek_v4",
        'So.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get">\n'
        '<｜DSML｜parameter name="x" string="true">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="x" string="false">3'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "So.",
        [("get", {"x": "3"}), ("get", {"x": 3})],
    ),
    ("xlam", '[{"name": "get_time", "arguments": {}}]', "", [_TIME]),
    (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=where>\n{'a': [True, None]}\n</parameter>\n</function>",
        "",
        [("get_weather", {"where": {"a": [True, None]}})],
    ),
    ("pythonic", "[get_time(), 3]", ", 3]", [_TIME]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[get(x=open('f'))]", "[get(x=open('f'))]", []),
    ("pythonic", "[get(1)]", "[get(1)]", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), _CASES)
def test_calls_are_separated_from_content(
    form: str, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    """The text may arrive at once, by characters, or in two parts."""
    whole = _read(_parser(_FORMATS[form]), [text])
    assert (whole.content, whole.decoded()) == (content, calls)
    single = _read(_parser(_FORMATS[form]), list(text))
    assert (single.content, single.calls) == (content, whole.calls)
    for cut in range(len(text)):
        parts = _read(_parser(_FORMATS[form]), [text[:cut], text[cut:]])
        assert (parts.content, parts.calls) == (content, whole.calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [(form, text) for form, text, content, calls in _CASES if calls and not content],
)
@pytest.mark.parametrize("ending", ["is_cut", "is_stopped"])
def test_interrupted_call_leaves_no_markup_in_the_content(
    form: str, text: str, ending: str
) -> None:
    """Users would see `<tool_call>`."""
    for cut in range(len(text)):
        for pieces in ([text[:cut]], list(text[:cut])):
            forced = _read(_parser(_FORMATS[form], is_forced=True), pieces, **{ending: True})
            free = _read(_parser(_FORMATS[form]), pieces, **{ending: True})
            assert forced.content.strip() == free.content.strip() == ""
            assert free.calls == forced.calls


def test_half_a_mark_after_a_call_is_left_out() -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}'
    for rest in ("", "\n", "\n</tool_", "\n</tool_call>"):
        message = _read(_parser(_FORMATS["hermes"]), [call + rest], is_cut=True)
        assert (message.content, message.decoded()) == ("", [_TIME])
    others = _read(_parser(_FORMATS["hermes"]), [call + "\n</b>"], is_cut=True)
    assert others.content == "</b>"


def test_half_a_mark_after_other_text_stays() -> None:
    """A sentence may end with "<", and a client that continues the answer needs it."""
    for text in ("if a <", "if a <tool", "<tool_call", "Well. <tool_call"):
        expected = "" if text == "<tool_call" else text
        assert _read(_parser(_FORMATS["hermes"]), [text], is_cut=True).content == expected


def test_half_a_mark_of_reasoning_is_left_out() -> None:
    assert _read(_parser(None, _THINK), ["\n<thi"], is_cut=True).content == ""
    open_thought = _read(_parser(None, _THINK), ["<think>\n</thi"], is_cut=True)
    assert (open_thought.reasoning, open_thought.content) == ("", "")
    assert _read(_parser(None, _THINK), ["<thi"]).content == "<thi"
    assert _read(_parser(None, _THINK), [" \n"], is_cut=True).content == " \n"


def test_unfinished_call_stays_if_the_model_ended_the_answer() -> None:
    """It is content: no call would have followed."""
    for form, text in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("json", '{"name"')):
        assert _read(_parser(_FORMATS[form]), [text]).content == text


_SCRAPS = st.sampled_from(
    [text[begin:] for _, text, _, _ in _CASES for begin in (0, len(text) // 2)]
    + [mark for form in _FORMATS.values() for mark in form.opens]
    + ["<think>", "</think>", "\n", " ", "{", "}", '"', "[", "]", "get_time", "\\", "é", "😀", ","]
)


@given(
    st.sampled_from(sorted(_FORMATS)),
    st.booleans(),
    st.booleans(),
    st.lists(_SCRAPS, max_size=8),
    st.data(),
)
def test_any_pieces_of_any_text_give_the_same_message(
    form: str, is_reasoning: bool, is_cut: bool, scraps: list[str], data: st.DataObject
) -> None:
    """Arguments are JSON, unless the answer was cut within them."""
    text = "".join(scraps)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    messages = [
        _read(_parser(_FORMATS[form], _THINK, is_reasoning=is_reasoning), parts, is_cut=is_cut)
        for parts in ([text], pieces)
    ]
    for message in messages:
        message.fragments = 0
    assert messages[0] == messages[1]
    for place, (name, arguments) in enumerate(messages[0].calls):
        assert name in _TOOLS
        if not is_cut or place < len(messages[0].calls) - 1:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("text", "is_reasoning", "reasoning", "content"),
    [
        ("<think>\nHm, <b>.\n</think>\n\nYes.\n", False, "Hm, <b>.", "Yes.\n"),
        ("\nHm.</think>Yes.", True, "Hm.", "Yes."),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("  Yes.", False, "", "  Yes."),
        ("Hm. </th", True, "Hm. </th", ""),
    ],
)
def test_reasoning_is_separated_from_content(
    text: str, is_reasoning: bool, reasoning: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        message = _read(_parser(None, _THINK, is_reasoning=is_reasoning), pieces)
        assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            "Hm.",
            "Yes.",
        ),
        ("<|START_RESPONSE|>Yes.\n<|END_RESPONSE|>", "", "Yes."),
        ("Yes.", "", "Yes."),
    ],
)
def test_marks_around_content_are_left_out(text: str, reasoning: str, content: str) -> None:
    form = next(form for form in REASONING_FORMATS if form.name == "command")
    for calls in (None, _FORMATS["command"]):
        for pieces in ([text], list(text)):
            parser = ResponseParser(
                form, calls, _TOOLS if calls else {}, is_reasoning=False, frame=form.frame
            )
            message = _read(parser, pieces)
            assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("muse", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes."),
        ("solar", "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>"),
        (
            "kimi_k3",
            "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes."
            "<|close|>response<|sep|>",
        ),
        ("apriel", "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nYes.\n"
                   "[END FINAL RESPONSE]"),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes."),
        ("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Yes."),
        ("seed", "<seed:think>\nHm.</seed:think>Yes."),
        ("minimax_m3", "<mm:think>Hm.</mm:think>\nYes."),
        ("hunyuan", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>"),
        ("response", "<think>Hm.</think>\n\n<response>Yes.</response>"),
        ("magistral", "[THINK]Hm.[/THINK]Yes."),
    ],
)  # fmt: skip
def test_marks_of_every_family_are_left_out(name: str, text: str) -> None:
    form = next(form for form in REASONING_FORMATS if form.name == name)
    for pieces in ([text], list(text)):
        parser = ResponseParser(form, None, {}, is_reasoning=False, frame=form.separators)
        message = _read(parser, pieces)
        assert (message.reasoning.strip(), message.content.strip()) == ("Hm.", "Yes.")


@pytest.mark.parametrize("value", ["[1, 2]", '"a"', "12 ", "null"])
def test_json_that_is_no_object_is_no_call(value: str) -> None:
    text = f"<tool_call>{value}</tool_call>"
    for pieces in ([text], list(text)):
        message = _read(_parser(_FORMATS["hermes"]), pieces)
        assert (message.content, message.calls) == (text, [])


@pytest.mark.parametrize("key", ["name", "arguments"])
def test_number_with_too_many_digits_for_python_is_no_call(key: str) -> None:
    other = '"arguments": {}' if key == "name" else '"name": "get_time"'
    text = f'<tool_call>{{"{key}": {"9" * 5_000}, {other}}}</tool_call>'
    message = _read(_parser(_FORMATS["hermes"]), [text])
    assert (message.content, message.calls) == (text, [])


def test_arguments_are_passed_on_as_they_arrive() -> None:
    """A client that shows them would wait for the whole call."""
    text = json.dumps({"city": "x" * 100, "days": 3})
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {text}}}\n</tool_call>'
    message = _read(_parser(_FORMATS["hermes"]), list(call))
    assert message.calls == [("get_weather", text)]
    assert message.fragments == len(text)


def test_call_that_max_tokens_cut_stays_open() -> None:
    """A client would run a closed call with half of its arguments."""
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ber'
    cut = _read(_parser(_FORMATS["hermes"]), [text], is_cut=True)
    assert cut.calls == [("get_weather", '{"city": "Ber')]
    ended = _read(_parser(_FORMATS["hermes"]), [text])
    assert ended.calls == [("get_weather", '{"city": "Ber"}')]
