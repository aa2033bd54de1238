"""What the fields of request bodies mean, and the ranges that their types do not tell.

The services check them; that document and checks agree is tested against the running stack.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from services.http_shim.formats.chat_messages import CalledFunction, Message, MessageCall
from services.http_shim.formats.constraint_fields import StructuralTagFormat, StructuredOutputs
from services.http_shim.formats.request_bodies import (
    ChatBody,
    FunctionName,
    FunctionSpec,
    FunctionTool,
    JsonSchemaFormat,
    JsonSchemaGrammar,
    JsonSchemaSpec,
    LarkGrammar,
    LlguidanceGrammar,
    MultiCompletionBody,
    NamedToolChoice,
    RegexGrammar,
    TemplateBody,
    TokenizeBody,
)

__all__ = ["FIELDS", "LIMITS", "OWN_FIELDS", "REQUIRED", "UNTAGGED"]

Json = dict[str, Any]

_TOKEN_LIMIT: Json = {"minimum": 0, "default": 16}
_PENALTY: Json = {"minimum": -2, "maximum": 2, "default": 0}
_FLAG: Json = {"default": False}
_REFUSED: Json = {"anyOf": [{"type": "null"}]}
_NOT_EMPTY: Json = {"minLength": 1}
_FUNCTION_NAME: Json = {"pattern": "^[A-Za-z0-9_-]{1,64}$"}
_TOKEN_ID: Json = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_TOKEN_IDS: Json = {"type": "array", "minItems": 1, "items": _TOKEN_ID}
_PROMPTS: Json = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": 128, "items": {"type": "string"}},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "maxItems": 128, "items": _TOKEN_IDS},
    ]
}
_NAMED_TOOLS: tuple[str, Json] = ("Functions that the prompt names.", {"maxItems": 128})
_STOP = (
    "Strings that end a choice; they are cut off. 16 at most, unless the server has another limit."
)
FIELDS: Mapping[str, tuple[str, Json]] = {
    "model": ("Id, alias, or id:variant; absent or `default` = the only model.", {}),
    "prompt": ("Text, several texts, token ids, or several lists of them.", _PROMPTS),
    "suffix": ("What follows the gap: only the middle is generated.", {}),
    "max_tokens": ("Tokens of each choice at most; 0 only with echo.", _TOKEN_LIMIT),
    "max_completion_tokens": ("Another name of max_tokens.", {"minimum": 0}),
    "min_tokens": ("Until then nothing ends a choice.", {"minimum": 0, "default": 0}),
    "ignore_eos": ("The end-of-sequence token does not end a choice.", _FLAG),
    "stop": (_STOP, {"minLength": 1, "maxLength": 1_000}),
    "stop_token_ids": ("Token ids that end a choice.", {"maxItems": 128}),
    "include_stop_str_in_output": ("Keep the stop string that ended a choice.", _FLAG),
    "temperature": ("0 = greedy.", {"minimum": 0, "maximum": 2, "default": 1}),
    "top_p": ("Nucleus mass.", {"minimum": 0, "maximum": 1, "default": 1}),
    "top_k": ("Draw from so many; -1 and 0 = from all.", {"minimum": -1, "maximum": 128}),
    "min_p": ("Least probability, relative to the most likely.", {"minimum": 0, "maximum": 1}),
    "seed": ("The same seed gives the same text.", {}),
    "frequency_penalty": ("By how often a token was generated.", _PENALTY),
    "presence_penalty": ("By whether a token was generated.", _PENALTY),
    "repetition_penalty": (
        "Divides positive logits of tokens that occurred, multiplies negative ones.",
        {"exclusiveMinimum": 0, "maximum": 2, "default": 1},
    ),
    "logit_bias": (
        "Added to the logits of token ids.",
        {"minimum": -100, "maximum": 100, "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}},
    ),
    "dry_multiplier": ("DRY; 0 = off.", {"minimum": 0, "default": 0}),
    "dry_base": ("DRY's base.", {"minimum": 1, "default": 1.75}),
    "dry_allowed_length": ("Repetitions of so many tokens cost nothing.", {"default": 2}),
    "dry_sequence_breakers": (
        "Texts that end a repetition; [] = none.",
        {"maxItems": 32, "minLength": 1, "maxLength": 64},
    ),
    "mirostat_target": ("Mirostat 2: the perplexity to keep to.", {"exclusiveMinimum": 0}),
    "mirostat_lr": ("Mirostat's learning rate.", {"exclusiveMinimum": 0}),
    "n": ("Choices of each prompt; prompts x n is 128 at most.", {"minimum": 1, "maximum": 128}),
    "best_of": (
        "Candidates of which the n best are returned; more than n can't be streamed.",
        {"minimum": 0, "maximum": 128},
    ),
    "echo": ("Put the prompt in front of each choice.", _FLAG),
    "logprobs": (
        "Candidates to show for each token; more than 5 only where the server allows them.",
        {"minimum": 0, "maximum": 20},
    ),
    "truncate_sequence": ("Keep the end of a prompt that is over the context.", _FLAG),
    "context_length_exceeded_behavior": (
        "Where prompt and max_tokens exceed the context: lower max_tokens, or refuse.",
        {"default": "truncate"},
    ),
    "response_format": ("Constrains the output to JSON, or parts of it.", {}),
    "grammar": ("Constrains the output to a grammar; a string is GBNF or Lark.", {}),
    "structured_outputs": ("A constraint as vLLM has it.", {}),
    "guided_json": ("A JSON Schema, or its text.", _NOT_EMPTY),
    "guided_regex": ("A regular expression.", _NOT_EMPTY),
    "guided_choice": ("One of several texts.", _NOT_EMPTY | {"minItems": 1}),
    "guided_grammar": ("A grammar in GBNF or Lark.", _NOT_EMPTY),
    "json_schema": ("A JSON Schema, or its text.", _NOT_EMPTY),
    "regex": ("A regular expression.", _NOT_EMPTY),
    "choice": ("One of several texts.", _NOT_EMPTY | {"minItems": 1}),
    "ebnf": ("A grammar in GBNF.", _NOT_EMPTY),
    "structural_tag": ("Free text in which triggers start constrained parts.", _NOT_EMPTY),
    "tools": ("Functions to call.", {"maxItems": 128}),
    "tool_choice": ("Whether, and which.", {}),
    "images": ("Refused: the models read text only.", {"maxItems": 0}),
    "stream": ("Answer in server-sent events, `data: [DONE]` last.", _FLAG),
    "stream_options": ("Where in the stream usage is told.", {}),
    "user": ("A label for logs.", {}),
    "return_token_ids": ("Show the ids of prompts and choices.", _FLAG),
    "return_tokens_as_token_ids": ("`token_id:N` in place of token texts.", _FLAG),
    "skip_special_tokens": (
        "Leave special tokens out of the text; the one that ends a choice is out of it unless "
        "include_stop_str_in_output is true.",
        {"default": True},
    ),
    "spaces_between_special_tokens": (
        "Without effect: no decoder here puts spaces between special tokens.",
        {"default": True},
    ),
    "truncate_prompt_tokens": (
        "Keep the last so many tokens of the prompt; -1 = as many as leave room for max_tokens.",
        {"minimum": -1, "not": {"const": 0}},
    ),
    "prompt_logprobs": (
        "Score the prompt and show so many candidates for each of its tokens; not with stream.",
        {"minimum": 0, "maximum": 20},
    ),
    "allowed_token_ids": (
        "Only these ids are generated, the end of sequence too only if it is among them.",
        {"minItems": 1},
    ),
    "bad_words": (
        "Strings that are not generated.",
        {"maxItems": 128, "minLength": 1, "maxLength": 1_000},
    ),
    "priority": (
        "Lower is earlier; with API keys at least 0.",
        {"minimum": -(2**31) + 1, "maximum": 2**31 - 1, "default": 0},
    ),
    "reasoning_effort": (
        "How much to reason: a variable of the template, which also sets enable_thinking.",
        {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", None]},
    ),
    "messages": ("The conversation.", {"minItems": 1, "maxItems": 4_096}),
    "parallel_tool_calls": ("Whether an answer may hold several calls.", {"default": True}),
    "chat_template": ("Name of one of the checkpoint's templates.", {"default": "default"}),
    "chat_template_kwargs": (
        "Further variables of the template, up to 65,536 characters of JSON.",
        {},
    ),
    "add_generation_prompt": (
        "End the prompt with the start of an answer; default true, unless it continues a message.",
        {},
    ),
    "continue_final_message": ("Continue the last message, which is the assistant's.", _FLAG),
    "functions": ("Refused: use tools.", _REFUSED),
    "function_call": ("Refused: use tool_choice.", _REFUSED),
    "add_special_tokens": (
        "Put the BOS in front of the prompt; default true. Messages have what their template says.",
        {},
    ),
    "return_token_strs": ("Show the tokens' texts.", _FLAG),
    "tokens": ("Token ids.", {"maxItems": 262_144}),
}
OWN_FIELDS: Mapping[type[Struct], Mapping[str, tuple[str, Json]]] = {
    ChatBody: {
        "max_tokens": ("Tokens of each choice at most; absent = all that fit.", {"minimum": 1}),
        "max_completion_tokens": ("Another name of max_tokens.", {"minimum": 1}),
        "n": ("Choices.", {"minimum": 1, "maximum": 128}),
        "logprobs": ("Show the logprob of each token of the content.", _FLAG),
        "top_logprobs": (
            "Candidates to show for each token; only with logprobs.",
            {"minimum": 0, "maximum": 20},
        ),
        "tool_choice": ("Whether, and which; `auto` where there are tools.", {}),
        "echo": (
            "Put the content of the last message in front of the answer's, where it is the "
            "assistant's.",
            _FLAG,
        ),
    },
    MultiCompletionBody: {
        "model": ("Name of a model, or names of several.", {"minItems": 1, "maxItems": 128}),
        "prompt": ("Text.", {}),
        "max_tokens": ("Tokens of each choice at most.", {"default": 16}),
        "stream": ("Refused: /v1/completions streams.", {"const": False, "default": False}),
    },
    TokenizeBody: {
        "prompt": ("Text, up to 1 MiB in UTF-8.", {"maxLength": 1024 * 1024}),
        "messages": ("A conversation in its place.", {"minItems": 1, "maxItems": 4_096}),
        "tools": _NAMED_TOOLS,
    },
    TemplateBody: {"tools": _NAMED_TOOLS},
}
"""Where a field means something else than elsewhere."""
LIMITS: Mapping[type[Struct], Mapping[str, Json]] = {
    CalledFunction: {"name": _NOT_EMPTY, "arguments": {"maxLength": 1024 * 1024}},
    FunctionName: {"name": _FUNCTION_NAME},
    FunctionSpec: {"name": _FUNCTION_NAME},
    JsonSchemaGrammar: {"value": _NOT_EMPTY},
    LarkGrammar: {"value": _NOT_EMPTY},
    LlguidanceGrammar: {"value": _NOT_EMPTY},
    Message: {
        "content": {"maxItems": 1_024},
        "tool_calls": {"maxItems": 128},
        "function_call": _REFUSED,
    },
    MessageCall: {"id": _NOT_EMPTY},
    RegexGrammar: {"value": _NOT_EMPTY},
    StructuralTagFormat: {
        "structures": {"minItems": 1, "maxItems": 128},
        "triggers": _NOT_EMPTY | {"minItems": 1, "maxItems": 128},
        "format": _REFUSED,
    },
    StructuredOutputs: {
        "json": _NOT_EMPTY,
        "regex": _NOT_EMPTY,
        "choice": _NOT_EMPTY | {"minItems": 1},
        "grammar": _NOT_EMPTY,
        "structural_tag": _NOT_EMPTY,
        "disable_additional_properties": {"const": False},
    },
}
"""Of what bodies hold."""
UNTAGGED: Sequence[type[Struct]] = (FunctionTool, MessageCall, NamedToolChoice)
"""Whose `type` may be left out: nothing else can stand in their place"""
REQUIRED: Mapping[type[Struct], Sequence[str]] = {
    JsonSchemaFormat: ("json_schema",),
    JsonSchemaSpec: ("schema",),
    StructuralTagFormat: ("structures", "triggers"),
}
