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
_HARMONY = """{%- set effort = reasoning_effort or 'medium' %}
{{- '<|start|>system<|message|>Reasoning: ' + effort + '<|end|>' }}
{%- set caller = namespace(name='') %}
{%- for message in messages %}
{%- if message.content and '<|channel|>' in message.content %}
{{- raise_exception('channels belong in the field thinking') }}
{%- endif %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('one of both') }}{% endif %}
{%- set thought = message.thinking or message.content %}
{%- if thought %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{%- set caller.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + caller.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
_DEEPSEEK = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<｜Assistant｜>' + (message.content or '') + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
CALL
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' + eos_token }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content + eos_token }}
{%- else %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
_DEEPSEEK_V3 = _DEEPSEEK.replace(
    "CALL",
    """{{- '\\n' if not loop.first }}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}""",
)
_DEEPSEEK_V31 = _DEEPSEEK.replace(
    "CALL",
    """{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}""",
)
_KIMI = _TURNS.replace(
    "CALLS",
    """{%- if message.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0 | string }}
{{- '<|tool_call_argument_begin|>' + call.function.arguments | tojson + '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}""",
)
_GLM = _TURNS.replace(
    "CALLS",
    """{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}""",
)
_MINIMAX_M2 = _TURNS.replace(
    "CALLS",
    """{%- if message.tool_calls %}
{{- '\\n<minimax:tool_call>' }}
{%- for call in message.tool_calls %}
{{- '\\n<invoke name="' + call.function.name + '">' }}
{%- for key, value in call.function.arguments | items %}
{{- '\\n<parameter name="' + key + '">' }}
{{- (value if value is string else value | tojson) + '</parameter>' }}
{%- endfor %}
{{- '\\n</invoke>' }}
{%- endfor %}
{{- '\\n</minimax:tool_call>' }}
{%- endif %}""",
)
_MINIMAX = _TURNS.replace(
    "CALLS",
    """{%- if message.tool_calls %}
{{- '\\n<tool_calls>\\n' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n' }}
{%- endfor %}
{{- '</tool_calls>' }}
{%- endif %}""",
)
_COMMAND = """{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_ACTION|>[' }}
{%- for call in message.tool_calls %}
{{- '\\n    {"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + call.function.name }}
{{- '", "parameters": ' + call.function.arguments | tojson + '}' + (',' if not loop.last else '') }}
{%- endfor %}
{{- '\\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' + message.content }}
{{- '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}
{%- else %}
{{- '<|START_OF_TURN_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- if reasoning is defined and not reasoning %}
{{- '<|START_THINKING|><|END_THINKING|>' }}
{%- endif %}
{%- endif %}"""
_LISTED = _TURNS.replace(
    "CALLS",
    """{%- if message.tool_calls %}
{{- '<|tool_call|>[' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}' }}{% if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ']' }}CLOSE
{%- endif %}""",
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
    "harmony": _HARMONY,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "kimi_k2": _KIMI,
    "glm45": _GLM,
    "minimax_m2": _MINIMAX_M2,
    "minimax": _MINIMAX,
    "command": _COMMAND,
    "phi4": "{#- <|tool|>…<|/tool|> -#}" + _LISTED.replace("CLOSE", "{{- '<|/tool_call|>' }}"),
    "granite": _LISTED.replace("CLOSE", ""),
}
"""Templates by the name of their format of calls, if they have one."""

_SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|python_tag|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]",
    "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
    "<｜User｜>", "<｜Assistant｜>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
    "<|CHATBOT_TOKEN|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>",
    "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
_PLAIN = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", "<|tool_call|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)  # fmt: skip


def chat_vocabulary(directory: Path, template: str | list[dict[str, str]]) -> Vocabulary:
    """Write a checkpoint with this template, and return its vocabulary."""
    tokenizer = byte_level(_SPECIAL, _PLAIN)
    return Vocabulary(
        write_checkpoint(directory, tokenizer, chat_template=template), answer_marks()
    )
