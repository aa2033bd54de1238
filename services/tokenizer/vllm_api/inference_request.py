"""Translation of vllm.GenerateRequest, which vllm-router sends, to Tokenwire's."""

from collections.abc import Iterator

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.common.constraint_texts import grammar_of_text, structural_tag_of
from services.tokenizer.vllm_api.refusals import image_of_data_url, refuse
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.pb.vllm import inference_pb2

__all__ = ["inference_field", "request_of"]

_MANY_TOKENS = 2**31 - 1
"""Value of max_tokens that leaves only the limit of the context"""
_PLACES = {
    "prompts.items[0].token_ids": "token_ids",
    "prompts.items[0].text": "text",
    "prompts.items": "prompt",
    "prompts.images": "media",
    "sampling.temperature": "temperature",
    "sampling.frequency_penalty": "decoding.frequency_penalty",
    "sampling.presence_penalty": "decoding.presence_penalty",
    "sampling.repetition_penalty": "decoding.repetition_penalty",
    "sampling.logit_bias": "decoding.logit_bias",
    "sampling.allowed_token_ids.ids": "decoding.allowed_token_ids",
    "sampling.allowed_token_ids": "decoding.allowed_token_ids",
    "stopping.max_tokens": "stopping.max_new_tokens",
    "stopping.min_tokens": "stopping.min_new_tokens",
    "stop": "stopping.stop_strings",
    "n": "sampling.num_sequences",
    "logprobs": "response.output_candidates",
    "prompt_logprobs": "response.prompt_candidates",
}
"""Paths of our GenerateRequest, and their names in vLLM's"""


def request_of(
    request: inference_pb2.GenerateRequest,
) -> completion_pb2.GenerateRequest:
    """Return the same request in Tokenwire's terms.

    Raises INVALID_ARGUMENT and UNIMPLEMENTED, with the path of the field at fault.
    """
    _refuse_unknown(request, "")
    _refuse_unsupported(request)
    stopping, response = request.stopping, request.response
    completion = completion_pb2.GenerateRequest(
        model=request.model,
        prompts=completion_pb2.Prompts(items=[_prompt(request)], images=_images(request)),
        sampling=_sampling(request),
        stopping=types_pb2.StoppingParams(
            max_tokens=stopping.max_new_tokens or _MANY_TOKENS,
            min_tokens=stopping.min_new_tokens,
            ignore_eos=stopping.ignore_eos,
            stop_token_ids=stopping.stop_token_ids,
        ),
        stop=stopping.stop_strings,
        include_stop_string=stopping.include_stop_strings,
        n=request.sampling.num_sequences or 1,
        skip_special_tokens=not response.HasField("skip_special_tokens")
        or response.skip_special_tokens,
        user=request.session_id,
    )
    if response.output_logprobs:
        completion.logprobs = _candidates(response.output_candidates, "output_candidates")
    if response.prompt_logprobs:
        completion.prompt_logprobs = _candidates(response.prompt_candidates, "prompt_candidates")
    if request.truncate_prompt_tokens:
        completion.truncate_prompt_tokens = request.truncate_prompt_tokens
    grammar = _grammar(request.decoding)
    if grammar is not None:
        completion.grammar.CopyFrom(grammar)
    return completion


def inference_field(path: str, request: inference_pb2.GenerateRequest) -> str:
    """Return the name in the client's request of a field of our request."""
    head, _, rest = path.partition(".")
    if head == "grammar":
        _, _, inner = rest.partition(".")
        kind = request.decoding.WhichOneof("structured_output") or ""
        return ".".join(filter(None, ("decoding", kind, inner)))
    for prefix, name in _PLACES.items():
        if path == prefix or path.startswith((f"{prefix}.", f"{prefix}[")):
            return name + path.removeprefix(prefix)
    return path


def _refuse_unknown(message: Message, path: str) -> None:
    """Refuse fields of later versions, which would have no effect."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        where, number = path.removesuffix(".") or "The request", unknown[0].field_number
        raise invalid(f"{path}{number}", f"{where} has the unknown field number {number}.")
    for field, value in message.ListFields():
        if field.message_type is not None and not field.is_repeated:
            _refuse_unknown(value, f"{path}{field.name}.")


def _refuse_unsupported(request: inference_pb2.GenerateRequest) -> None:
    if request.lora_name:
        refuse("lora_name", "there are no adapters")
    kv = request.kv
    if kv.bypass_prefix_cache:
        refuse("kv.bypass_prefix_cache", "use a cache_salt of your own")
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if kv.HasField(name):
            refuse(f"kv.{name}", "nothing can be moved between engines")


def _prompt(request: inference_pb2.GenerateRequest) -> completion_pb2.Prompt:
    match request.WhichOneof("prompt"):
        case "token_ids":
            ids = types_pb2.TokenIds(ids=request.token_ids.ids)
            return completion_pb2.Prompt(token_ids=ids)
        case "text":
            return completion_pb2.Prompt(text=request.text)
    raise invalid("prompt", "A request must have text or token_ids.")


def _sampling(request: inference_pb2.GenerateRequest) -> types_pb2.SamplingParams:
    drawing, decoding = request.sampling, request.decoding
    sampling = types_pb2.SamplingParams(
        temperature=request.temperature,  # an absent temperature is 0, which means greedy
        top_k=drawing.top_k,
        min_p=drawing.min_p,
        frequency_penalty=decoding.frequency_penalty,
        presence_penalty=decoding.presence_penalty,
        logit_bias=decoding.logit_bias,
    )
    if drawing.top_p:
        sampling.top_p = drawing.top_p
    if drawing.HasField("seed"):
        sampling.seed = drawing.seed
    if decoding.repetition_penalty:
        sampling.repetition_penalty = decoding.repetition_penalty
    if decoding.allowed_token_ids:
        sampling.allowed_token_ids.ids.extend(decoding.allowed_token_ids)
    return sampling


def _candidates(candidates: inference_pb2.CandidateTokens, name: str) -> int:
    """Return the number of candidates for each token."""
    kind = candidates.WhichOneof("select")
    if kind == "token_ids" or candidates.all:
        refuse(f"response.{name}.{kind}", "use top_n")
    return candidates.top_n


def _grammar(decoding: inference_pb2.DecodingParameters) -> types_pb2.GrammarSpec | None:
    match decoding.WhichOneof("structured_output"):
        case "json":
            return types_pb2.GrammarSpec(json_schema=decoding.json)
        case "regex":
            return types_pb2.GrammarSpec(regex=decoding.regex)
        case "choice":
            choices = types_pb2.ChoiceList(choices=decoding.choice.choices)
            return types_pb2.GrammarSpec(choice=choices)
        case "grammar":
            return grammar_of_text(decoding.grammar)
        case "json_object" if decoding.json_object:
            return types_pb2.GrammarSpec(json_object=types_pb2.JsonObject())
        case "structural_tag":
            return structural_tag_of(decoding.structural_tag, "decoding.structural_tag")
    return None


def _images(request: inference_pb2.GenerateRequest) -> Iterator[bytes]:
    if request.media and request.WhichOneof("prompt") != "token_ids":
        raise invalid("media", "media need token_ids.")
    for index, item in enumerate(request.media):
        field = f"media[{index}]"
        _refuse_unknown(item, f"{field}.")
        if item.modality > inference_pb2.MODALITY_IMAGE:
            refuse(f"{field}.modality", "only images are taken")
        match item.WhichOneof("source"):
            case "raw_bytes":
                yield item.raw_bytes
            case "data_uri":
                yield image_of_data_url(item.data_uri, f"{field}.data_uri")
            case "url":
                refuse(f"{field}.url", "this service fetches nothing")
            case _:
                raise invalid(field, "An image must have data_uri or raw_bytes.")
