"""Translation of vLLM's GenerateRequest to Tokenwire's."""

from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from services.common.constraint_texts import grammar_of_text, structural_tag_of
from services.tokenizer.vllm_api.refusals import image_of_data_url, refuse
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["name_field", "to_request"]

_MANY_TOKENS = 2**31 - 1
"""Value of max_tokens that leaves only the limit of the context"""
_SAMPLING = "sampling_params"
_UNSUPPORTED = {
    "kv_transfer_params": "KV blocks can't be moved between engines",
    "kv_transfer_params_json": "KV blocks can't be moved between engines",
    "mm_inputs": "images are taken as media_refs, not as tensors",
}
_PLACES = (
    ("prompts.items[0].token_ids.ids", "tokenized.input_ids"),
    ("prompts.items[0].text", "text"),
    ("prompts.items[0]", "input"),
    ("prompts.items", "input"),
    ("prompts.images", "media_refs.items"),
)
"""Paths of our GenerateRequest, and their names in vLLM's"""


def to_request(
    request: vllm_engine_pb2.GenerateRequest,
) -> completion_pb2.GenerateRequest:
    """Return the same request in Tokenwire's terms.

    The answer has no text, so the tokens of a stop string stay in it, for the gateway to cut.
    Raises INVALID_ARGUMENT and UNIMPLEMENTED, with the path of the field at fault.
    """
    _refuse_unsupported(request)
    params = request.sampling_params
    completion = completion_pb2.GenerateRequest(
        prompts=completion_pb2.Prompts(items=[_prompt(request)], images=_images(request)),
        sampling=_sampling(params),
        stopping=_stopping(params),
        stop=params.stop,
        include_stop_string=True,
        n=params.n or 1,
        skip_special_tokens=params.skip_special_tokens,
        delivery=completion_pb2.DELIVERY_DELTAS
        if request.stream
        else completion_pb2.DELIVERY_WHOLE,
    )
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            setattr(completion, name, _candidates(name, getattr(params, name)))
    if params.HasField("truncate_prompt_tokens"):
        completion.truncate_prompt_tokens = params.truncate_prompt_tokens
    grammar = _grammar(params)
    if grammar is not None:
        completion.grammar.CopyFrom(grammar)
    return completion


def name_field(path: str, request: vllm_engine_pb2.GenerateRequest) -> str:
    """Return the name in the client's request of a field of our request."""
    for prefix, name in _PLACES:
        if path.startswith(prefix):
            return name + path.removeprefix(prefix)
    head, _, rest = path.partition(".")
    if head == "grammar":
        _, _, inner = rest.partition(".")
        names = (_SAMPLING, request.sampling_params.WhichOneof("constraint") or "", inner)
        return ".".join(filter(None, names))
    return f"{_SAMPLING}.{rest if head in ('sampling', 'stopping') else path}" if path else ""


def _refuse_unsupported(request: vllm_engine_pb2.GenerateRequest) -> None:
    for name, why in _UNSUPPORTED.items():
        if request.HasField(name):
            refuse(name, why)
    if request.extra_mm_inputs:
        refuse("extra_mm_inputs", _UNSUPPORTED["mm_inputs"])
    if request.data_parallel_rank > 0:
        raise invalid("data_parallel_rank", "There is one rank, 0.")


def _prompt(request: vllm_engine_pb2.GenerateRequest) -> completion_pb2.Prompt:
    match request.WhichOneof("input"):
        case "tokenized":
            ids = types_pb2.TokenIds(ids=request.tokenized.input_ids)
            return completion_pb2.Prompt(token_ids=ids)
        case "text":
            return completion_pb2.Prompt(text=request.text)
    raise invalid("input", "A request must have tokenized or text.")


def _sampling(params: vllm_engine_pb2.SamplingParams) -> types_pb2.SamplingParams:
    """Return the sampling settings. In vLLM's message, 0 means unset for most of them."""
    sampling = types_pb2.SamplingParams(
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
    )
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    if params.top_p:
        sampling.top_p = params.top_p
    if params.repetition_penalty:
        sampling.repetition_penalty = params.repetition_penalty
    if params.HasField("seed"):
        sampling.seed = params.seed
    for token, bias in params.logit_bias.items():
        if token < 0:
            raise invalid(f"{_SAMPLING}.logit_bias[{token}]", "Token ids must be at least 0.")
        sampling.logit_bias[token] = bias
    return sampling


def _stopping(params: vllm_engine_pb2.SamplingParams) -> types_pb2.StoppingParams:
    if params.HasField("max_tokens") and not params.max_tokens:
        raise invalid(f"{_SAMPLING}.max_tokens", "max_tokens must be at least 1.")
    return types_pb2.StoppingParams(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else _MANY_TOKENS,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
    )


def _candidates(name: str, count: int) -> int:
    if count < 0:
        message = f"{name} must be at least 0, got {count}: not all candidates can be sent."
        raise invalid(f"{_SAMPLING}.{name}", message)
    return count


def _grammar(params: vllm_engine_pb2.SamplingParams) -> types_pb2.GrammarSpec | None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            return types_pb2.GrammarSpec(json_schema=params.json_schema)
        case "regex":
            return types_pb2.GrammarSpec(regex=params.regex)
        case "grammar":
            return grammar_of_text(params.grammar)
        case "structural_tag":
            return structural_tag_of(params.structural_tag, f"{_SAMPLING}.structural_tag")
        case "json_object":
            if not params.json_object:
                raise invalid(f"{_SAMPLING}.json_object", "json_object must be true or absent.")
            return types_pb2.GrammarSpec(json_object=types_pb2.JsonObject())
        case "choice":
            choices = types_pb2.ChoiceList(choices=params.choice.choices)
            return types_pb2.GrammarSpec(choice=choices)
    return None


def _images(request: vllm_engine_pb2.GenerateRequest) -> Iterator[bytes]:
    items: Sequence[vllm_engine_pb2.MediaRef] = request.media_refs.items
    if items and request.WhichOneof("input") != "tokenized":
        raise invalid("media_refs", "media_refs need tokenized.")
    for index, item in enumerate(items):
        field = f"media_refs.items[{index}]"
        if item.modality not in (common_pb2.MODALITY_UNSPECIFIED, common_pb2.IMAGE):
            refuse(f"{field}.modality", "only images are taken")
        yield image_of_data_url(item.url, f"{field}.url")
