"""Unsupported request fields of vLLM, SGLang, llama.cpp and OpenAI.

To ignore such a field would change the answer that the client expects. A field is therefore
refused unless its value has no effect. Unknown fields are ignored and listed in a header.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.http_shim.dialects.fields import JsonObject
from tokenwire.errors import invalid

__all__ = [
    "FOREIGN_TO_CHATS",
    "FOREIGN_TO_COMPLETIONS",
    "ForeignFields",
    "check_foreign",
]


@dataclass(frozen=True, slots=True)
class ForeignField:
    """An unsupported field."""

    effect: str
    """Effect on other servers, as a verb phrase"""
    neutral: Sequence[Any] = ()
    """Values besides null that have no effect"""
    remedy: str = "omit it"


ForeignFields: TypeAlias = Mapping[str, ForeignField]

_REPETITIONS = "changes which tokens count as repeated"
_REASONING = "moves the reasoning within the answer"
_WEIGHTS = "loads an adapter"
_FIELDS: ForeignFields = {
    # vLLM
    "logits_processors": ForeignField("runs code on the logits", ([],)),
    "prompt_embeds": ForeignField("gives the prompt as embeddings", ([],)),
    "include_reasoning": ForeignField("leaves the reasoning out", (True,)),
    "thinking_token_budget": ForeignField("limits the tokens of reasoning", (-1,)),
    "repetition_detection": ForeignField("ends an answer that repeats itself"),
    "logprob_token_ids": ForeignField("requests the logprobs of given tokens", ([],)),
    "kv_transfer_params": ForeignField("transfers KV blocks", ({},)),
    "vllm_xargs": ForeignField("passes arguments to extensions of vLLM", ({},)),
    # SGLang
    "stop_regex": ForeignField("ends a choice by a regular expression", ("", []), "use stop"),
    "no_stop_trim": ForeignField(
        "keeps the stop string", (False,), "use include_stop_str_in_output"
    ),
    "custom_logit_processor": ForeignField("runs code on the logits", ("",)),
    "custom_params": ForeignField("passes parameters to code that runs on the logits", ({},)),
    "lora_path": ForeignField(_WEIGHTS, ("", [])),
    "session_params": ForeignField("continues an earlier request", ({},)),
    "input_ids": ForeignField("gives the prompt as token ids", (), "use prompt"),
    "input_embeds": ForeignField("gives the prompt as embeddings"),
    "return_hidden_states": ForeignField("requests hidden states", (False,)),
    "return_routed_experts": ForeignField("requests the experts of each token", (False,)),
    "token_ids_logprob": ForeignField("requests the logprobs of given tokens", ([],)),
    "separate_reasoning": ForeignField(_REASONING, (True,)),
    "stream_reasoning": ForeignField(_REASONING, (True,)),
    # llama.cpp and other samplers
    "n_predict": ForeignField("limits the output", (), "use max_tokens"),
    "typical_p": ForeignField("enables typical sampling", (1,)),
    "typ_p": ForeignField("enables typical sampling", (1,)),
    "tfs_z": ForeignField("enables tail-free sampling", (1,)),
    "top_a": ForeignField("enables top-a sampling", (0,)),
    "top_n_sigma": ForeignField("enables top-n-sigma sampling", (-1, 0)),
    "xtc_probability": ForeignField("excludes the likeliest tokens", (0,)),
    "dynatemp_range": ForeignField("changes the temperature for each token", (0,)),
    "min_keep": ForeignField("sets the least number of candidates", (0,)),
    "samplers": ForeignField("sets the order of the samplers", ([],)),
    "mirostat": ForeignField("enables Mirostat", (0,), "use mirostat_target"),
    "repeat_penalty": ForeignField("penalizes repetitions", (1,), "use repetition_penalty"),
    "repeat_last_n": ForeignField(_REPETITIONS, (-1,)),
    "penalize_nl": ForeignField(_REPETITIONS, (True,)),
    "dry_penalty_last_n": ForeignField(_REPETITIONS, (-1,)),
    "n_probs": ForeignField("requests logprobs", (0,), "use logprobs"),
    "post_sampling_probs": ForeignField("requests probabilities after sampling", (False,)),
    "n_keep": ForeignField("sets the tokens that a full context keeps", (0,)),
    "n_indent": ForeignField("sets an indentation", (0,)),
    "t_max_predict_ms": ForeignField("limits the time of a choice", (0, -1)),
    "lora": ForeignField(_WEIGHTS, ([],)),
    "image_data": ForeignField("adds images", ([],)),
    "input_extra": ForeignField("adds files to an infill prompt", ([],)),
    "reasoning_format": ForeignField(_REASONING, ("auto", "deepseek")),
    "reasoning_budget": ForeignField("limits the tokens of reasoning", (-1,)),
    "thinking_forced_open": ForeignField("reads the start of the answer as reasoning", (False,)),
    "parse_tool_calls": ForeignField("leaves tool calls in the content", (True,)),
    # OpenAI
    "audio": ForeignField("requests speech"),
    "modalities": ForeignField("requests output other than text", (["text"], [])),
    "web_search_options": ForeignField("searches the web"),
    # transformers
    "num_beams": ForeignField("enables beam search", (1,)),
    "do_sample": ForeignField("disables sampling", (True,), "use temperature 0"),
    "no_repeat_ngram_size": ForeignField("forbids repetitions", (0,), "use dry_multiplier"),
}
FOREIGN_TO_COMPLETIONS: ForeignFields = {
    **_FIELDS,
    "add_special_tokens": ForeignField(
        "omits the BOS token", (True,), "send the token ids that /tokenize returns"
    ),
}
FOREIGN_TO_CHATS: ForeignFields = {
    **_FIELDS,
    "add_special_tokens": ForeignField("adds a BOS token to the rendered prompt", (False,)),
    "best_of": ForeignField("generates more choices than it returns", (0, 1), "use n"),
    "use_beam_search": ForeignField("enables beam search", (False,)),
    "length_penalty": ForeignField("weights the lengths of beams", (1,)),
    "early_stopping": ForeignField("ends a beam search early", (False,)),
    "documents": ForeignField(
        "passes documents to the template", ([],), "use chat_template_kwargs"
    ),
    "mm_processor_kwargs": ForeignField("configures images and audio", ({},)),
}


def check_foreign(unknown: list[str], fields: JsonObject, foreign: ForeignFields) -> list[str]:
    """Return the unknown fields that are not in `foreign`.

    Raises INVALID_ARGUMENT for one in `foreign` whose value has an effect.
    """
    for name in fields.keys() & foreign.keys():
        described, value = foreign[name], fields[name]
        if value is not None and value not in described.neutral:
            raise invalid(
                name, f"{name} is not supported: it {described.effect}; {described.remedy}."
            )
    return [path for path in unknown if path not in foreign]
