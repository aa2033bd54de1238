"""Forms of tool calls by family of models, for templates that do not show how calls are written."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.tokenizer.chat.answer.call_syntax import (
    ID,
    INDEX,
    KIND,
    CallSyntax,
    JsonArguments,
    KeywordArguments,
    Notation,
    TaggedArguments,
)
from services.tokenizer.chat.answer.reasoning_formats import REASONING_FORMATS
from services.tokenizer.chat.answer.rendered_text import marks_in

__all__ = ["JSON_FORMAT", "TOOL_FORMATS", "ToolFormat", "answer_marks", "tool_format_of"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Form of tool calls in one family."""

    name: str
    syntaxes: Sequence[CallSyntax]
    """All ways to write calls that are read"""
    signs: Sequence[str] = ()
    """Strings all of which a chat template of this family contains"""
    ends: Sequence[str] = ()
    """Control tokens with which the model ends a message, though the template may not"""
    written: int = 1
    """Number of syntaxes, from the first on, that grammars let a model write"""

    @property
    def opens(self) -> Sequence[str]:
        """Marks that begin calls anywhere in a message."""
        return tuple(dict.fromkeys(each.opening for each in self.syntaxes if each.opening))

    @property
    def leads(self) -> str:
        """Characters that begin calls without a mark at the start of a message."""
        return "".join(dict.fromkeys(syntax.leads for syntax in self.syntaxes))

    @property
    def writes_json(self) -> bool:
        """True if the arguments of calls are one JSON object."""
        return all(isinstance(syntax.arguments, JsonArguments) for syntax in self.syntaxes)

    @property
    def texts(self) -> Sequence[str]:
        """All texts that may contain control tokens."""
        return tuple(text for syntax in self.syntaxes for text in syntax.texts())


def _object(before: str, behind: str, *, key: str = "arguments", between: str = "\n") -> CallSyntax:
    """Return the syntax of objects, each between two texts."""
    begins = f'{before}{{"name": "'
    return CallSyntax(begins, f'", "{key}": ', "}" + behind, between=between)


def _listed(opens: str, closes: str, between: str = ", ") -> CallSyntax:
    """Return the syntax of a list of objects."""
    return CallSyntax(
        '{"name": "', '", "arguments": ', "}", opens=opens, closes=closes, between=between
    )


def _pythonic(opens: str, closes: str, between: str = ", ") -> CallSyntax:
    arguments = KeywordArguments("=", "'")
    return CallSyntax("", "(", ")", arguments, opens=opens, closes=closes, between=between)


def _braced(opens: str, quote: str, closes: str) -> CallSyntax:
    """Return the syntax of Gemma's calls: call:name{key:value}."""
    arguments = KeywordArguments(":", quote, ",", Notation.BARE)
    return CallSyntax(f"{opens}call:", "{", "}" + closes, arguments)


def _deepseek(begins: str, middle: str, ends: str, between: str) -> CallSyntax:
    marks = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return CallSyntax(
        f"<｜tool▁call▁begin｜>{begins}", middle, f"{ends}<｜tool▁call▁end｜>",
        opens=marks[0], between=between, closes=marks[1],
    )  # fmt: skip


def _invocation(prefix: str, opens: str, closes: str, kinds: bool) -> CallSyntax:
    """Return the syntax of tags `invoke` and `parameter` with a prefix, one in each line."""
    middle = f'" string="{KIND}">' if kinds else '">'
    return CallSyntax(
        f'\n<{prefix}invoke name="', '">\n', f"</{prefix}invoke>",
        TaggedArguments(
            f'<{prefix}parameter name="', middle, f"</{prefix}parameter>\n",
            kinds=_STRING_FLAGS if kinds else {},
        ),
        opens=opens, closes=closes,
    )  # fmt: skip


_STRING_FLAGS = {
    "string": "true", "integer": "false", "number": "false", "boolean": "false", "null": "false",
    "array": "false", "object": "false",
}  # fmt: skip
_DSML = "｜DSML｜"
_XML = TaggedArguments("<parameter=", ">\n", "\n</parameter>\n", notation=Notation.PYTHON)
_GLM = TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
_STEP = TaggedArguments('<steptml:parameter name="', '">', "</steptml:parameter>")
_COMMAND = f'{{"tool_call_id": "{INDEX}", "tool_name": "'
_COMMAND_LIST = CallSyntax(
    f"\n    {_COMMAND}", '", "parameters": ', "}",
    opens="<|START_ACTION|>[", between=",", closes="\n]<|END_ACTION|>",
)  # fmt: skip
_MISTRAL_LIST = _listed("[TOOL_CALLS][", "]")
_MISTRAL_NAMED = CallSyntax("[TOOL_CALLS]", "[ARGS]", "")
_MISTRAL_ID = CallSyntax("[TOOL_CALLS]", f"[CALL_ID]{ID}[ARGS]", "")
_MISTRAL_BARE = CallSyntax("[TOOL_CALLS]", "", "")
_MISTRAL_OBJECT = CallSyntax('[TOOL_CALLS]{"name": "', '", "arguments": ', "}")
# the order matters: a template of an earlier form may contain the signs of a later one
TOOL_FORMATS: Sequence[ToolFormat] = (
    ToolFormat(
        "harmony",  # gpt-oss, which `HarmonyParser` reads
        (
            CallSyntax(
                "<|channel|>commentary to=functions.",
                " <|constrain|>json<|message|>",
                "",
                is_single=True,
                mark="<|channel|>commentary to=functions.",
            ),
            CallSyntax(
                " to=functions.",
                "<|channel|>commentary json<|message|>",
                "",
                is_single=True,
                mark="to=functions.",
            ),
        ),
        signs=("<|channel|>", "<|start|>"),
        ends=("<|call|>", "<|return|>"),
        written=2,
    ),
    ToolFormat(
        "deepseek_v3",  # and R1
        (_deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),),
        signs=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    ToolFormat(
        "deepseek_v31",
        (_deepseek("", "<｜tool▁sep｜>", "", ""),),
        signs=("<｜tool▁calls▁begin｜>",),
    ),
    ToolFormat(
        "deepseek_v32",
        (_invocation(_DSML, f"<{_DSML}function_calls>", f"\n</{_DSML}function_calls>", True),),
        signs=(f"<{_DSML}function_calls>",),
    ),
    ToolFormat(
        "deepseek_v4",
        (_invocation(_DSML, f"<{_DSML}tool_calls>", f"\n</{_DSML}tool_calls>", True),),
        signs=(_DSML,),
    ),
    ToolFormat(
        "kimi_k2",
        (
            CallSyntax(
                "<|tool_call_begin|>functions.",
                f":{INDEX}<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                opens="<|tool_calls_section_begin|>",
                closes="<|tool_calls_section_end|>",
            ),
            CallSyntax(
                "<|tool_call_begin|>",
                f":{INDEX}<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                opens="<|tool_calls_section_begin|>",
                closes="<|tool_calls_section_end|>",
            ),
        ),
        signs=("<|tool_calls_section_begin|>",),
    ),
    ToolFormat(
        "glm45",
        (CallSyntax("<tool_call>", "\n", "</tool_call>", _GLM, between="\n"),),
        signs=("<tool_call>", "<arg_key>"),
    ),
    ToolFormat(
        "minimax_m2",
        (_invocation("", "<minimax:tool_call>", "\n</minimax:tool_call>", False),),
        signs=("<minimax:tool_call>",),
    ),
    ToolFormat(
        "step3",
        (
            CallSyntax(
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
                '">',
                "</steptml:invoke><｜tool_call_end｜>",
                _STEP,
                opens="<｜tool_calls_begin｜>",
                closes="<｜tool_calls_end｜>",
            ),
            CallSyntax(
                '<｜tool_call_begin｜><steptml:invoke name="',
                '">',
                "</steptml:invoke><｜tool_call_end｜>",
                _STEP,
                opens="<｜tool_calls_begin｜>",
                between="<｜tool_sep｜>",
                closes="<｜tool_calls_end｜>",
            ),
        ),
        signs=("steptml",),
    ),
    ToolFormat(
        "jamba",  # and Hunyuan A13B, Apriel
        (
            _listed("<tool_calls>[\n    ", "\n]</tool_calls>", ",\n    "),
            _object("<tool_calls>", "</tool_calls>"),
        ),
        signs=("<tool_calls>[",),
    ),
    ToolFormat(
        "minimax",  # M1
        (
            CallSyntax(
                '\n{"name": "',
                '", "arguments": ',
                "}",
                opens="<tool_calls>",
                closes="\n</tool_calls>",
            ),
            _listed("<tool_calls>[", "]</tool_calls>"),
        ),
        signs=("<tool_calls>",),
    ),
    ToolFormat(
        "command",  # Command A and R7B
        (_COMMAND_LIST,),
        signs=("<|START_ACTION|>",),
    ),
    ToolFormat(
        "phi4",  # mini
        (
            _listed("<|tool_call|>[", "]<|/tool_call|>"),
            _listed("functools[", "]"),
        ),
        signs=("<|tool|>", "<|/tool|>"),
    ),
    ToolFormat(
        "functools",  # Firefunction
        (_listed("functools[", "]"),),
        signs=("functools[",),
    ),
    ToolFormat(
        "granite",  # 3; later ones have the form of Hermes
        (
            _listed("<|tool_call|>[", "]"),
            _listed("<tool_call>[", "]"),
        ),
        signs=("<|tool_call|>",),
    ),
    ToolFormat(
        "lfm2",
        (_pythonic("<|tool_call_start|>[", "]<|tool_call_end|>"),),
        signs=("<|tool_list_start|>",),
    ),
    ToolFormat(
        "olmo3",
        (_pythonic("<function_calls>", "</function_calls>", "\n"),),
        signs=("<function_calls>",),
    ),
    ToolFormat(
        "functiongemma",
        (_braced("<start_function_call>", "<escape>", "<end_function_call>"),),
        signs=("<start_function_call>",),
    ),
    ToolFormat(
        "gemma4",
        (_braced("<|tool_call>", '<|"|>', "<tool_call|>"),),
        signs=("<|tool_call>",),
    ),
    ToolFormat(
        "internlm",  # 2.5 and 3
        (_object("<|action_start|><|plugin|>", "<|action_end|>", key="parameters", between=""),),
        signs=("<|plugin|>",),
    ),
    ToolFormat(
        "longcat",
        (_object("<longcat_tool_call>", "</longcat_tool_call>"),),
        signs=("<longcat_tool_call>",),
    ),
    ToolFormat(
        "qwen3_coder",
        (
            CallSyntax(
                "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", _XML, between="\n"
            ),
            CallSyntax("<function=", ">\n", "</function>", _XML, between="\n"),
        ),
        signs=("<tool_call>", "<function=", "<parameter="),
    ),
    ToolFormat(
        "hermes",  # and Qwen 2.5, Qwen 3, ERNIE 4.5, the embedded model
        (_object("<tool_call>\n", "\n</tool_call>"),),
        signs=("<tool_call>",),
    ),
    ToolFormat(
        "mistral",
        (_MISTRAL_NAMED, _MISTRAL_ID, _MISTRAL_LIST, _MISTRAL_OBJECT, _MISTRAL_BARE),
        signs=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ToolFormat(
        "mistral_array",  # before v11 of Mistral's tokenizers
        (_MISTRAL_LIST, _MISTRAL_OBJECT, _MISTRAL_NAMED, _MISTRAL_BARE),
        signs=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        "pythonic",  # Llama 3.2 and 4, by their model cards
        (_pythonic("[", "]"), _pythonic("<|python_start|>[", "]<|python_end|>")),
        signs=("func_name1(",),
    ),
    ToolFormat(
        "llama3_json",
        (
            CallSyntax('{"name": "', '", "parameters": ', "}", between="; ", is_single=True),
            CallSyntax(
                '{"name": "', '", "parameters": ', "}", opens="<|python_tag|>", between="; "
            ),
        ),
        signs=('"parameters":', "tools"),
    ),
    ToolFormat("xlam", (_listed("[", "]"),), signs=("xLAM",)),
)
# the form that a grammar forces if the template has none
JSON_FORMAT = ToolFormat(
    "json",
    (
        CallSyntax('{"name": "', '", "arguments": ', "}", is_single=True),
        _listed("[", "]"),
    ),
)


def answer_marks() -> frozenset[str]:
    """Return the marks of every format."""
    texts = [text for form in TOOL_FORMATS for text in form.texts]
    texts += (text for form in REASONING_FORMATS for text in form.texts)
    return frozenset(mark for text in texts for mark in marks_in(text))


def tool_format_of(setting: str, templates: Collection[str], tokens: Collection[str]) -> ToolFormat:
    """Return the format named `setting`.

    For "auto", return the first format whose signs a template has. If a template writes tools but
    has no known signs, return the simplest format whose mark is one of the vocabulary's control
    tokens, `tokens`. Otherwise return the JSON format.
    """
    for form in TOOL_FORMATS:
        if form.name == setting or (
            setting == "auto"
            and any(all(sign in template for sign in form.signs) for template in templates)
        ):
            return form
    if setting != "auto" or not any("tools" in template for template in templates):
        return JSON_FORMAT
    marked = [form for form in TOOL_FORMATS if form.opens]
    known = [form for form in marked if form.opens[0] in tokens]
    return min(known, key=lambda form: len(form.signs), default=JSON_FORMAT)
