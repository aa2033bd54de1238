"""Tiny checkpoints with the control tokens and chat templates of families of models."""

from collections.abc import Mapping
from pathlib import Path

from services.tokenizer.chat.answer.tool_formats import answer_marks
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_level, write_checkpoint

__all__ = ["TEMPLATES", "chat_vocabulary"]

_TURNS = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
CALLS
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_HERMES = _TURNS.replace(
    "CALLS",
    """{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}""",
)
_XML = _TURNS.replace(
    "CALLS",
    """{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}""",
)
_THINKING = """{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content is defined %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- elif always %}
{{- '<think>\\n' }}
{%- endif %}
{%- endif %}"""
_MISTRAL = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
CALLS
{{- eos_token }}
{%- elif message.role == 'assistant' %}
{{- message.content + eos_token }}
{%- else %}
{{- raise_exception('Only user, assistant and tool are known here.') }}
{%- endif %}
{%- endfor %}"""
_MISTRAL_NEW = _MISTRAL.replace(
    "CALLS",
    """{%- for call in message.tool_calls %}
{%- set arguments = call.function.arguments %}
{%- if arguments is not string %}{% set arguments = arguments | tojson %}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}
{%- endfor %}""",
)
_MISTRAL_ARRAY = _MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ']' }}""",
)
_LLAMA = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
CALLS
{%- else %}
{{- message.content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
_LLAMA_JSON = _LLAMA.replace(
    "CALLS",
    """{%- if message.tool_calls | length != 1 %}
{{- raise_exception('one call at a time') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{%- if tools %}{% endif %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}""",
)
_PYTHONIC = _LLAMA.replace(
    "CALLS",
    """{#- [func_name1(params_name1=params_value1)] -#}
{{- '[' }}
{%- for call in message.tool_calls %}
{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments | items %}
{{- key + '=' + value | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ')' }}{% if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ']' }}""",
)
_PARTS = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}{{ part.text }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}"""

TEMPLATES: Mapping[str, str] = {
    "hermes": _HERMES,
    "qwen3_coder": _XML,
    "mistral": _MISTRAL_NEW,
    "mistral_array": _MISTRAL_ARRAY,
    "llama3_json": _LLAMA_JSON,
    "pythonic": _PYTHONIC,
    "thinking": _THINKING,
    "json": _TURNS.replace("CALLS", ""),
    "parts": _PARTS,
}
"""Templates by the name of their format of calls, if they have one."""

_SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|python_tag|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]",
)  # fmt: skip
_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def chat_vocabulary(directory: Path, template: str | list[dict[str, str]]) -> Vocabulary:
    """Write a checkpoint with this template, and return its vocabulary."""
    tokenizer = byte_level(_SPECIAL, _PLAIN)
    return Vocabulary(
        write_checkpoint(directory, tokenizer, chat_template=template), answer_marks()
    )
