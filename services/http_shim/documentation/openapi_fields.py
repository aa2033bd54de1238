"""Meanings of request fields, and the ranges that the services check.

A test compares these ranges with the running services.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from services.common import contract
from services.http_shim.dialects.chat.types import ChatBody, Message, TemplateBody
from services.http_shim.dialects.constraints import (
    JsonSchemaFormat,
    JsonSchemaGrammar,
    JsonSchemaSpec,
    LarkGrammar,
    LlguidanceGrammar,
    RegexGrammar,
    StructuralTagFormat,
    StructuredOutputs,
)
from services.http_shim.dialects.custom_tools import arguments_of
from services.http_shim.dialects.messages.types import CountTokensBody, MessagesBody
from services.http_shim.dialects.responses.types import ResponseBody
from services.http_shim.dialects.tools import (
    CalledFunction,
    CalledTool,
    CustomSpec,
    FunctionSpec,
    MessageCall,
    NamedToolChoice,
    Tool,
    ToolName,
    ToolReference,
    Typed,
)
from services.http_shim.endpoints.multi_completion import MultiCompletionBody
from services.http_shim.endpoints.tokenization import TokenizeBody
from services.http_shim.vectors.embeddings import EmbeddingBody
from tokenwire.batch_run import BATCH_PATHS

__all__ = ["FIELDS", "LIMITS", "OWN_FIELDS", "REQUIRED", "TYPED"]

Json = dict[str, Any]
Field = tuple[str, Json]

_FLAG: Json = {"default": False}
_NOT_EMPTY: Json = {"minLength": 1}
_PENALTY: Json = {"minimum": -2, "maximum": 2, "default": 0}
_REFUSED: Json = {"anyOf": [{"type": "null"}]}
_SEQUENCES: Json = {"minimum": 1, "maximum": contract.MAX_SEQUENCES}
_CANDIDATES: Json = {"minimum": 0, "maximum": contract.MAX_CHAT_LOGPROBS}
_TOOL_NAME: Json = {"name": {"pattern": f"^{contract.FUNCTION_NAME}$"}}
_VALUE: Json = {"value": _NOT_EMPTY}
_TOKEN_ID: Json = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_TOKEN_IDS: Json = {"type": "array", "minItems": 1, "items": _TOKEN_ID}
_PROMPT_LIST: Json = {"type": "array", "minItems": 1, "maxItems": contract.MAX_SEQUENCES}
_PROMPTS: Json = {
    "anyOf": [
        {"type": "string"},
        _PROMPT_LIST | {"items": {"type": "string"}},
        _TOKEN_IDS,
        _PROMPT_LIST | {"items": _TOKEN_IDS},
    ]
}
_MANY_TEXTS: Json = {
    "minItems": 1,
    "maxItems": contract.MAX_EMBEDDED_TEXTS,
    "items": _NOT_EMPTY | {"type": "string"},
}
_INPUT_LIST: Json = {"type": "array", "minItems": 1, "maxItems": contract.MAX_EMBEDDED_TEXTS}
_INPUTS: Json = {
    "anyOf": [
        _NOT_EMPTY | {"type": "string"},
        _INPUT_LIST | {"items": _NOT_EMPTY | {"type": "string"}},
        _TOKEN_IDS,
        _INPUT_LIST | {"items": _TOKEN_IDS},
    ]
}
_MAX_TOKENS = "Most tokens of each choice"
_DEFAULT_MAX_TOKENS: Json = {"default": contract.DEFAULT_MAX_TOKENS}
_JSON_SCHEMA: Field = ("A JSON Schema, or its text.", _NOT_EMPTY)
_REGEX: Field = ("A regular expression.", _NOT_EMPTY)
_CHOICE: Field = ("Texts, one of which is the output.", _NOT_EMPTY | {"minItems": 1})
_MESSAGES: Field = ("The conversation.", {"minItems": 1, "maxItems": contract.MAX_MESSAGES})
_NAMED_TOOLS: Field = ("Tools that the prompt names.", {"maxItems": contract.MAX_TOOLS})
_OLDER_ACTIVATION: Field = ("As `use_activation`, under an older name of vLLM.", {})
FIELDS: Mapping[str, Field] = {
    "model": ("Id, alias, or id:variant; absent or `default` = the only model.", {}),
    "prompt": ("A text, several texts, token ids, or several lists of token ids.", _PROMPTS),
    "input": ("A text, several texts, token ids, or several lists of token ids.", _INPUTS),
    "encoding_format": (
        "`float` = numbers; `base64` = their float32 bytes, little endian.",
        {"default": "float"},
    ),
    "dimensions": (
        "Numbers of an embedding to keep, from the first on; at most the model's.",
        {"minimum": 1},
    ),
    "use_activation": (
        "Apply the last stage of the model; false returns logits instead of scores and "
        "probabilities, and vectors of the length that the layers give them.",
        {"default": True},
    ),
    "activation": _OLDER_ACTIVATION,
    "softmax": _OLDER_ACTIVATION,
    "normalize": _OLDER_ACTIVATION,
    "task": (
        "What has a vector: embed = each text, token_embed = each token, by its last state or a "
        "head of the model; token_classify = each token has a weight (BGE-M3). Absent = each text, "
        "or each token if the model makes vectors of tokens alone.",
        {},
    ),
    "prompt_name": (
        "Name of a prompt in the checkpoint's config_sentence_transformers.json, whose text goes "
        "before each text; absent = the checkpoint's default prompt, or none.",
        {},
    ),
    "query": ("The text that the documents should fit.", _NOT_EMPTY),
    "documents": ("Texts to order.", _MANY_TEXTS),
    "top_n": ("Documents to return, best first; absent = all.", {"minimum": 1}),
    "return_documents": ("Return the documents' texts, too.", {"default": True}),
    "text_1": ("The first text of each pair, or of all pairs.", _MANY_TEXTS),
    "text_2": ("The second text of each pair.", _MANY_TEXTS),
    "input_file_id": ("Id of the file of requests.", {}),
    "endpoint": ("Path that all requests of the file name.", {"enum": [*BATCH_PATHS]}),
    "completion_window": ("24h: what is not answered then, expires.", {"const": "24h"}),
    "metadata": ("Up to 16 texts by name, which the batch shows.", {"maxProperties": 16}),
    "suffix": ("The text after the gap; the model generates the text between.", {}),
    "max_tokens": (f"{_MAX_TOKENS}; 0 only with echo.", {"minimum": 0, **_DEFAULT_MAX_TOKENS}),
    "max_completion_tokens": ("Another name of max_tokens.", {"minimum": 0}),
    "min_tokens": ("Fewest tokens of each choice.", {"minimum": 0, "default": 0}),
    "ignore_eos": ("Continue a choice after the end-of-sequence token.", _FLAG),
    "stop": (
        "Strings that end a choice and are cut off: at most 16, or the server's own limit.",
        {"minLength": 1, "maxLength": contract.MAX_STOP_LENGTH},
    ),
    "stop_token_ids": ("Token ids that end a choice.", {"maxItems": contract.MAX_STOP_TOKEN_IDS}),
    "include_stop_str_in_output": ("Keep the stop string that ended a choice.", _FLAG),
    "temperature": ("Temperature; 0 = greedy.", {"minimum": 0, "maximum": 2, "default": 1}),
    "top_p": ("Nucleus mass.", {"minimum": 0, "maximum": 1, "default": 1}),
    "top_k": (
        "Number of likeliest tokens to sample from; -1 and 0 = all.",
        {"minimum": -1, "maximum": contract.MAX_TOP_K},
    ),
    "min_p": ("Least probability, relative to the likeliest.", {"minimum": 0, "maximum": 1}),
    "seed": ("Seed of the sampling; equal seeds give equal text.", {}),
    "frequency_penalty": ("Penalty for each occurrence of a token in the output.", _PENALTY),
    "presence_penalty": ("Penalty for any occurrence of a token in the output.", _PENALTY),
    "repetition_penalty": (
        "Divides positive logits of tokens that occurred, and multiplies negative ones.",
        {"exclusiveMinimum": 0, "maximum": 2, "default": 1},
    ),
    "logit_bias": (
        "Values added to the logits of token ids.",
        {"minimum": -100, "maximum": 100, "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}},
    ),
    "dry_multiplier": ("Multiplier of the DRY penalty; 0 = off.", {"minimum": 0, "default": 0}),
    "dry_base": ("Base of the DRY penalty.", {"minimum": 1, "default": contract.DRY_BASE}),
    "dry_allowed_length": (
        "Longest repetition without a DRY penalty, in tokens.",
        {"default": contract.DRY_ALLOWED_LENGTH},
    ),
    "dry_sequence_breakers": (
        "Texts that end a repetition for DRY; [] = none.",
        {
            "maxItems": contract.MAX_DRY_BREAKERS,
            "minLength": 1,
            "maxLength": contract.MAX_DRY_BREAKER_LENGTH,
        },
    ),
    "mirostat_target": ("Target perplexity of Mirostat 2.", {"exclusiveMinimum": 0}),
    "mirostat_lr": ("Learning rate of Mirostat 2.", {"exclusiveMinimum": 0}),
    "n": (f"Choices of each prompt; prompts x n is at most {contract.MAX_SEQUENCES}.", _SEQUENCES),
    "best_of": (
        "Candidates, of which the n best are returned; at most n in a stream.",
        {"minimum": 0, "maximum": contract.MAX_SEQUENCES},
    ),
    "use_beam_search": ("Search with max(n, best_of) beams instead of sampling.", _FLAG),
    "length_penalty": (
        "Beams are ranked by the sum of their logprobs / length^length_penalty.",
        {
            "minimum": -contract.MAX_LENGTH_PENALTY,
            "maximum": contract.MAX_LENGTH_PENALTY,
            "default": 1,
        },
    ),
    "early_stopping": (
        "End of a beam search: true = once as many choices have ended as there are beams; false = "
        'once the best beam ranks below them; "never" = once no beam can rank above one of them.',
        _FLAG,
    ),
    "echo": ("Start each choice with the prompt.", _FLAG),
    "logprobs": ("Candidates for each token; above 5 only if the server allows it.", _CANDIDATES),
    "truncate_sequence": ("Keep the end of a prompt that exceeds the context.", _FLAG),
    "context_length_exceeded_behavior": (
        "Lower max_tokens, or refuse the request, if prompt and max_tokens exceed the context.",
        {"default": "truncate"},
    ),
    "response_format": ("Constrains the output, or parts of it, to JSON.", {}),
    "grammar": ("Constrains the output to a grammar; a string is GBNF or Lark.", {}),
    "structured_outputs": ("A constraint in vLLM's form.", {}),
    "guided_json": _JSON_SCHEMA,
    "guided_regex": _REGEX,
    "guided_choice": _CHOICE,
    "guided_grammar": ("A grammar in GBNF or Lark.", _NOT_EMPTY),
    "guided_whitespace_pattern": (
        "Regular expression of the white space between tokens of JSON; empty = compact JSON.",
        {},
    ),
    "json_schema": _JSON_SCHEMA,
    "regex": _REGEX,
    "choice": _CHOICE,
    "ebnf": ("A grammar in GBNF.", _NOT_EMPTY),
    "structural_tag": ("Free text in which triggers start constrained parts.", _NOT_EMPTY),
    "tools": (
        "Functions and custom tools that the model may call.",
        {"maxItems": contract.MAX_TOOLS},
    ),
    "tool_choice": (
        "Tool to call, or tools to choose from; `required` = any, `none` = no call.",
        {},
    ),
    "images": (
        "Data URLs of the images for each `<image>` of the prompts, in order: "
        "data:image/png;base64,… (or jpeg, webp, gif). http(s) URLs if the server fetches them.",
        {"maxItems": contract.MAX_IMAGES},
    ),
    "stream": ("Answer with server-sent events; the last one is `data: [DONE]`.", _FLAG),
    "stream_options": ("Events of the stream that have the usage.", {}),
    "user": ("A label for the logs.", {}),
    "return_token_ids": ("Return the token ids of prompts and choices.", _FLAG),
    "return_tokens_as_token_ids": ("Return `token_id:N` in place of token texts.", _FLAG),
    "skip_special_tokens": (
        "Omit special tokens from the text. The one that ends a choice is omitted in any case "
        "unless include_stop_str_in_output is true.",
        {"default": True},
    ),
    "spaces_between_special_tokens": (
        "No effect: no decoder here puts spaces between special tokens.",
        {"default": True},
    ),
    "truncate_prompt_tokens": (
        "Number of last tokens of the prompt to keep; -1 = all that leave room for max_tokens.",
        {"minimum": -1, "not": {"const": 0}},
    ),
    "prompt_logprobs": ("Candidates for each token of the prompt; not with stream.", _CANDIDATES),
    "allowed_token_ids": (
        "The only token ids to generate. The end of sequence must be among them to be generated.",
        {"minItems": 1},
    ),
    "bad_words": (
        "Strings that are never generated.",
        {
            "maxItems": contract.MAX_BAD_WORDS,
            "minLength": 1,
            "maxLength": contract.MAX_BAD_WORD_LENGTH,
        },
    ),
    "timeout": (
        "Seconds after which the request fails with 504; absent = none.",
        {"exclusiveMinimum": 0, "maximum": 86_400},
    ),
    "priority": (
        "Priority, lower first; at least 0 with API keys.",
        {"minimum": -(2**31) + 1, "maximum": 2**31 - 1, "default": 0},
    ),
    "reasoning_effort": (
        "Effort of the reasoning: a variable of the template, which also sets enable_thinking.",
        {"enum": [*contract.REASONING_EFFORTS, None]},
    ),
    "messages": _MESSAGES,
    "parallel_tool_calls": ("Allow several calls in an answer.", {"default": True}),
    "chat_template": ("Name of one of the checkpoint's templates.", {"default": "default"}),
    "chat_template_kwargs": (
        f"Further variables of the template; {contract.MAX_TEMPLATE_JSON:,} characters at most.",
        {},
    ),
    "add_generation_prompt": (
        "End the prompt with the start of an answer. Default: true unless a message is continued.",
        {},
    ),
    "continue_final_message": ("Continue the last message, which must be the assistant's.", _FLAG),
    "functions": ("Not supported: use tools.", _REFUSED),
    "function_call": ("Not supported: use tool_choice.", _REFUSED),
    "add_special_tokens": (
        "Add the BOS token to the prompt. Default: true for text; messages follow their template.",
        {},
    ),
    "lora_name": ("Name of the adapter, for which requests ask as their model.", _NOT_EMPTY),
    "lora_path": ("Its directory, in PEFT's format, on the machines of the engines.", _NOT_EMPTY),
    "return_token_strs": ("Return the tokens' texts.", _FLAG),
    "tokens": ("Token ids.", {"maxItems": contract.MAX_DECODED_IDS}),
}
_MESSAGE_PROMPT: Mapping[str, Field] = {
    "messages": ("The conversation. A last message of the assistant is continued.", _MESSAGES[1]),
    "system": ("Instructions.", {}),
    "tools": (
        "Tools that the client runs. Those of Anthropic's own servers are left out, and named in "
        "x-tokenwire-ignored.",
        {"maxItems": contract.MAX_TOOLS},
    ),
    "tool_choice": ("Whether a tool must be called; default auto.", {}),
    "thinking": (
        "Whether the model reasons first, for templates with that choice. The budget has no "
        "effect.",
        {},
    ),
    "output_config": ("A schema for the answer, and the amount of reasoning.", {}),
    "output_format": ("A schema for the answer.", {}),
    "cache_control": ("No effect: all prefixes are cached.", {}),
}
OWN_FIELDS: Mapping[type[Struct], Mapping[str, Field]] = {
    CountTokensBody: _MESSAGE_PROMPT,
    EmbeddingBody: {
        "task": (
            "Task whose adapter computes the vectors, and whose instruction goes before each text, "
            "of a checkpoint with such adapters (Jina v3 and v5); absent = the adapter that model "
            "names, or the model alone.",
            {},
        )
    },
    MessagesBody: {
        **_MESSAGE_PROMPT,
        "max_tokens": ("Most tokens of the answer, with its reasoning.", {"minimum": 1}),
        "stop_sequences": ("Strings that end the answer.", {}),
        "metadata": ("`user_id` is a label for logs.", {}),
        "thread": ("`create` has no effect; `continue` is refused: no threads are held.", {}),
        "compaction": ("Not supported: ask for a summary in messages.", _REFUSED),
    },
    ResponseBody: {
        "input": ("A text, or items: messages, calls of functions and their results.", {}),
        "instructions": ("A system message before the others; it is not passed on.", {}),
        "previous_response_id": ("Id of the kept response that this one continues.", {}),
        "store": ("Keep the response. Default: true.", {"default": True}),
        "background": (
            "Run without the client, which reads or cancels the response later; needs store.",
            _FLAG,
        ),
        "max_output_tokens": ("Most tokens of the answer, with its reasoning.", {"minimum": 1}),
        "top_logprobs": ("Candidates for each token of the text.", _CANDIDATES),
        "include": ("`message.output_text.logprobs` adds log probabilities.", {}),
        "tools": (
            "Functions and custom tools. Tools that only OpenAI's servers run are left out.",
            {},
        ),
        "tool_choice": ("`auto`, `none`, `required`, or a tool.", {}),
        "text": ("`format` constrains the answer: JSON, or a schema.", {}),
        "reasoning": ("`effort`, for the chat template.", {}),
        "truncation": (
            "`auto` leaves out the oldest items of a prompt that is too long; `disabled` (default) "
            "refuses it.",
            {"default": "disabled"},
        ),
        "metadata": ("Returned with the response.", {}),
        "safety_identifier": ("A label for logs.", {}),
        "prompt_cache_key": ("No effect: all prefixes are cached.", {}),
        "conversation": ("Not supported: use previous_response_id.", {}),
        "prompt": ("Not supported: send the text as input.", {}),
    },
    ChatBody: {
        "max_tokens": (f"{_MAX_TOKENS}; absent = the rest of the context.", {"minimum": 1}),
        "max_completion_tokens": ("Another name of max_tokens.", {"minimum": 1}),
        "n": ("Number of choices.", _SEQUENCES),
        "logprobs": ("Return the log probability of each token of the content.", _FLAG),
        "top_logprobs": ("Candidates for each token; needs logprobs.", _CANDIDATES),
        "tool_choice": (
            "Tool to call, or tools to choose from; `required` = any, `none` = no call, `auto` "
            "(default with tools) = the model decides.",
            {},
        ),
        "truncation": (
            "`auto` leaves out the oldest messages of a prompt that is too long, `disabled` "
            "refuses it.",
            {"default": "disabled"},
        ),
        "echo": ("Start the answer with the last message if it is the assistant's.", _FLAG),
    },
    MultiCompletionBody: {
        "model": (
            "One or several model names.",
            {"minItems": 1, "maxItems": contract.MAX_SEQUENCES},
        ),
        "prompt": ("The text.", {}),
        "max_tokens": (f"{_MAX_TOKENS}.", _DEFAULT_MAX_TOKENS),
        "stream": ("Not supported: /v1/completions streams.", {"const": False, "default": False}),
    },
    TokenizeBody: {
        "prompt": ("Text of up to 1 MiB of UTF-8.", {"maxLength": contract.MAX_TEXT_BYTES}),
        "messages": ("A conversation in place of the text.", _MESSAGES[1]),
        "tools": _NAMED_TOOLS,
    },
    TemplateBody: {"tools": _NAMED_TOOLS},
}
"""Fields whose meaning or constraints differ in one body"""
LIMITS: Mapping[type[Struct], Mapping[str, Json]] = {
    CalledFunction: {"name": _NOT_EMPTY, "arguments": {"maxLength": contract.MAX_ARGUMENTS}},
    CalledTool: {
        "name": _NOT_EMPTY,
        "input": {"maxLength": contract.MAX_ARGUMENTS - len(arguments_of(""))},
    },
    CustomSpec: _TOOL_NAME,
    FunctionSpec: _TOOL_NAME,
    JsonSchemaGrammar: _VALUE,
    LarkGrammar: _VALUE,
    LlguidanceGrammar: _VALUE,
    RegexGrammar: _VALUE,
    Message: {
        "content": {"maxItems": contract.MAX_MESSAGE_PARTS},
        "tool_calls": {"maxItems": contract.MAX_TOOL_CALLS},
        "function_call": _REFUSED,
    },
    MessageCall: {"id": _NOT_EMPTY},
    StructuralTagFormat: {
        "structures": {"minItems": 1, "maxItems": contract.MAX_STRUCTURES},
        "triggers": _NOT_EMPTY | {"minItems": 1, "maxItems": contract.MAX_STRUCTURES},
        "format": _REFUSED,
    },
    StructuredOutputs: {
        "json": _NOT_EMPTY,
        "regex": _NOT_EMPTY,
        "choice": _CHOICE[1],
        "grammar": _NOT_EMPTY,
        "structural_tag": _NOT_EMPTY,
        "disable_additional_properties": {"const": False},
    },
    ToolName: _TOOL_NAME,
}
"""Constraints on the fields of nested types"""
TYPED: Mapping[type[Typed], Sequence[str]] = {
    Tool: ("function", "custom"),
    ToolReference: ("function", "custom"),
    NamedToolChoice: ("function", "custom", "allowed_tools"),
    MessageCall: ("function", "custom"),
}
"""Fields of nested types of which `type` names the one that is given; absent = the first"""
REQUIRED: Mapping[type[Struct], Sequence[str]] = {
    JsonSchemaFormat: ("json_schema",),
    JsonSchemaSpec: ("schema",),
    StructuralTagFormat: ("structures", "triggers"),
}
"""Required fields of nested types"""
