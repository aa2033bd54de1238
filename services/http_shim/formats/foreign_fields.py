"""Fields of vLLM, SGLang, llama.cpp and OpenAI that would change the result and are not here.

Accepted and ignored, such a field would give another answer than was asked for. So it is refused,
unless its value changes nothing. Fields that nobody knows are ignored, and named in a header.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from tokenwire.errors import invalid

__all__ = [
    "FOREIGN_TO_CHATS",
    "FOREIGN_TO_COMPLETIONS",
    "ForeignField",
    "ForeignFields",
    "without_foreign",
]


@dataclass(frozen=True, slots=True)
class ForeignField:
    """What a field would do, and the values besides null at which it does nothing."""

    effect: str
    neutral: Sequence[Any] = ()
    remedy: str = "leave it out"


ForeignFields: TypeAlias = Mapping[str, ForeignField]

_BEAMS = "it searches with beams"
_REPETITIONS = "it takes other tokens for repetitions"
_REASONING = "it says where reasoning stands in the answer"
_WEIGHTS = "it adds weights of an adapter"
_FIELDS: ForeignFields = {
    # vLLM
    "use_beam_search": ForeignField(_BEAMS, (False,)),
    "length_penalty": ForeignField("it weighs the lengths of beams", (1,)),
    "early_stopping": ForeignField("it ends a search with beams", (False,)),
    "logits_processors": ForeignField("it changes logits by code", ([],)),
    "prompt_embeds": ForeignField("it gives the prompt as vectors", ([],)),
    "include_reasoning": ForeignField("it leaves the reasoning out", (True,)),
    "thinking_token_budget": ForeignField("it ends reasoning after so many tokens", (-1,)),
    "repetition_detection": ForeignField("it ends an answer that repeats itself"),
    "logprob_token_ids": ForeignField("it asks for the scores of given tokens", ([],)),
    "kv_transfer_params": ForeignField("it takes keys and values from elsewhere", ({},)),
    "vllm_xargs": ForeignField("it is for extensions of vLLM", ({},)),
    # SGLang
    "stop_regex": ForeignField("it ends a choice by a regular expression", ("", []), "use stop"),
    "no_stop_trim": ForeignField(
        "it keeps what stopped a choice", (False,), "use include_stop_str_in_output"
    ),
    "custom_logit_processor": ForeignField("it changes logits by code", ("",)),
    "custom_params": ForeignField("it is for code that changes logits", ({},)),
    "lora_path": ForeignField(_WEIGHTS, ("", [])),
    "session_params": ForeignField("it goes on with an earlier request", ({},)),
    "input_ids": ForeignField("it gives the prompt as ids", (), "give ids in prompt"),
    "input_embeds": ForeignField("it gives the prompt as vectors"),
    "return_hidden_states": ForeignField("it asks for hidden states", (False,)),
    "return_routed_experts": ForeignField("it asks for the experts of each token", (False,)),
    "token_ids_logprob": ForeignField("it asks for the scores of given tokens", ([],)),
    "separate_reasoning": ForeignField(_REASONING, (True,)),
    "stream_reasoning": ForeignField(_REASONING, (True,)),
    # llama.cpp, and what samplers of others call alike
    "n_predict": ForeignField("it bounds the output", (), "use max_tokens"),
    "typical_p": ForeignField("it draws typical tokens", (1,)),
    "typ_p": ForeignField("it draws typical tokens", (1,)),
    "tfs_z": ForeignField("it cuts the tail of the distribution", (1,)),
    "top_a": ForeignField("it drops tokens by the square of the largest probability", (0,)),
    "top_n_sigma": ForeignField("it drops tokens by the spread of the logits", (-1, 0)),
    "xtc_probability": ForeignField("it drops the likeliest tokens", (0,)),
    "dynatemp_range": ForeignField("it changes the temperature from token to token", (0,)),
    "min_keep": ForeignField("it keeps so many tokens, whatever samplers drop", (0,)),
    "samplers": ForeignField("it orders the samplers", ([],)),
    "mirostat": ForeignField("it turns Mirostat on", (0,), "use mirostat_target"),
    "repeat_penalty": ForeignField("it penalizes repetitions", (1,), "use repetition_penalty"),
    "repeat_last_n": ForeignField(_REPETITIONS, (-1,)),
    "penalize_nl": ForeignField(_REPETITIONS, (True,)),
    "dry_penalty_last_n": ForeignField(_REPETITIONS, (-1,)),
    "n_probs": ForeignField("it asks for scores", (0,), "use logprobs"),
    "post_sampling_probs": ForeignField("it asks for scores after sampling", (False,)),
    "n_keep": ForeignField("it says what of a full context is kept", (0,)),
    "n_indent": ForeignField("it asks for an indentation", (0,)),
    "t_max_predict_ms": ForeignField("it ends a choice by time", (0, -1)),
    "lora": ForeignField(_WEIGHTS, ([],)),
    "image_data": ForeignField("it gives images", ([],)),
    "input_extra": ForeignField("it puts further files before an infill prompt", ([],)),
    "reasoning_format": ForeignField(_REASONING, ("auto", "deepseek")),
    "reasoning_budget": ForeignField("it ends reasoning after so many tokens", (-1,)),
    "thinking_forced_open": ForeignField("it takes the answer's start for reasoning", (False,)),
    "parse_tool_calls": ForeignField("it leaves calls in the content", (True,)),
    # OpenAI
    "audio": ForeignField("it asks for speech"),
    "modalities": ForeignField("it asks for more than text", (["text"], [])),
    "web_search_options": ForeignField("it searches the web"),
    "verbosity": ForeignField("it asks for a shorter or a longer answer", ("medium",)),
    # transformers
    "num_beams": ForeignField(_BEAMS, (1,)),
    "do_sample": ForeignField("it takes the likeliest tokens", (True,), "use temperature 0"),
    "no_repeat_ngram_size": ForeignField("it forbids repetitions", (0,), "use dry_multiplier"),
}
FOREIGN_TO_COMPLETIONS: ForeignFields = {
    **_FIELDS,
    "add_special_tokens": ForeignField(
        "it leaves the BOS out", (True,), "give the ids that /tokenize answers with it"
    ),
}
FOREIGN_TO_CHATS: ForeignFields = {
    **_FIELDS,
    "add_special_tokens": ForeignField("it puts a BOS before the template's text", (False,)),
    "best_of": ForeignField("it draws more choices than it answers", (0, 1), "use n"),
    "documents": ForeignField(
        "it hands documents to the template", ([],), "put them into chat_template_kwargs"
    ),
    "mm_processor_kwargs": ForeignField("it is for images and sound", ({},)),
}


def without_foreign(fields: Mapping[str, Raw], foreign: ForeignFields) -> dict[str, Raw]:
    """The fields of a body but for those in `foreign`. Raises INVALID_ARGUMENT for one of those
    whose value would change the result."""
    for name in fields.keys() & foreign.keys():
        described, value = foreign[name], msgspec.json.decode(fields[name])
        if value is not None and value not in described.neutral:
            raise invalid(
                name, f"{name} is not supported ({described.effect}): {described.remedy}."
            )
    return {name: raw for name, raw in fields.items() if name not in foreign}
