"""Limits and defaults that the contract states, for every service.

Limits of one field of a request are options of the protos, which `bounds` reads.
"""

from services.common.bounds import bounds_of, most
from tokenwire.pb.completion.v1.completion_pb2 import (
    Conversation,
    EmbedRequest,
    GenerateRequest,
    Message,
    Prompts,
    Tool,
    ToolCall,
)
from tokenwire.pb.types.v1.types_pb2 import SamplingParams, StoppingParams, StructuralTag

DEFAULT_MAX_TOKENS = 16
"""Output tokens of a completion's choice without max_tokens; a chat may fill the context"""
DRY_BASE = 1.75
"""Base of the DRY penalty"""
DRY_ALLOWED_LENGTH = 2
"""Tokens of a repetition that DRY does not penalize"""

MAX_SEQUENCES = most(GenerateRequest, "n")
"""Sequences of a request: prompts x n, or prompts x best_of"""
MAX_STOP_TOKEN_IDS = most(StoppingParams, "stop_token_ids") - 16
"""Stop token ids of a client's request, to which infill may add 16"""
MAX_STOP_LENGTH = bounds_of(GenerateRequest, "stop").items.max_length
"""Code points of a stop string"""
MAX_TOP_K = most(SamplingParams, "top_k")
"""Largest top_k"""
MAX_LENGTH_PENALTY = most(GenerateRequest, "beam_search.length_penalty")
"""Largest length_penalty of a beam search; its negative is the least one"""
MAX_DRY_BREAKERS = most(GenerateRequest, "dry_sequence_breakers")
"""DRY sequence breakers of a request"""
MAX_DRY_BREAKER_LENGTH = bounds_of(GenerateRequest, "dry_sequence_breakers").items.max_length
"""Code points of a DRY sequence breaker"""
MAX_BAD_WORDS = most(GenerateRequest, "bad_words")
"""Bad words of a request"""
MAX_BAD_WORD_LENGTH = bounds_of(GenerateRequest, "bad_words").items.max_length
"""Code points of a bad word"""
MAX_BAD_SPELLINGS = most(SamplingParams, "bad_token_ids")
"""Token sequences that spell the bad words of a request; a word may have several"""
MAX_BAD_IDS = 16_384
"""Token ids of all spellings of a request's bad words"""
MAX_CHAT_LOGPROBS = most(GenerateRequest, "logprobs")
"""Candidates of each token of a chat"""

MAX_EMBEDDED_TEXTS = most(EmbedRequest, "inputs")
"""Texts, or pairs of texts, of a request for vectors"""

MAX_TOKEN_STATES = 4 * 1024 * 1024
"""Bytes of the states of all tokens of a request, which JSON makes five times as large"""
MAX_VECTORS = 48 * 1024 * 1024
"""Bytes of the vectors of all texts of a request"""

MAX_IMAGES = most(Prompts, "images")
"""Images of a request"""
MAX_IMAGE_BYTES = bounds_of(Prompts, "images").items.max_bytes
"""Bytes of an encoded image"""
MAX_IMAGES_BYTES = 48 * 1024 * 1024
"""Bytes of all images of a request; with its text they must fit into a message"""
MAX_IMAGE_PIXELS = 1 << 25
"""Width x height of an image"""
MAX_IMAGE_RATIO = 200
"""Length of an image's longer side, in multiples of the shorter one"""

MAX_DOCUMENTS = 32
"""Documents of a request whose text must be read"""
MAX_DOCUMENTS_BYTES = 32 * 1024 * 1024
"""Bytes of all documents of a request, uploaded before or sent with it"""
MAX_DOCUMENT_CHARACTERS = 4 * 1024 * 1024
"""Code points of a document's text"""
MAX_DOCUMENTS_CHARACTERS = 8 * 1024 * 1024
"""Code points of the texts of all documents of a request"""

MAX_MESSAGES = most(Conversation, "messages")
"""Messages of a chat"""
MAX_MESSAGE_PARTS = most(Message, "parts")
"""Content parts of a message"""
MAX_TOOL_CALLS = most(Message, "tool_calls")
"""Tool calls of a message"""
MAX_ARGUMENTS = most(ToolCall, "arguments_json")
"""Characters of the arguments of a tool call"""
MAX_TEMPLATE_JSON = most(Conversation, "template_arguments_json")
"""Characters of JSON of the template's arguments"""
REASONING_EFFORTS = (*bounds_of(Conversation, "reasoning_effort").one_of,)
"""Values of reasoning_effort"""
MAX_TOOLS = most(GenerateRequest, "tools")
"""Tools of a request"""
FUNCTION_NAME = bounds_of(Tool, "name").pattern
"""Pattern that a whole name of a function must match"""
MAX_STRUCTURES = most(StructuralTag, "structures")
"""Structures of a structural tag, and its triggers: each is a token of the grammar's lexer"""

MAX_TEXT_BYTES = 1024 * 1024
"""UTF-8 bytes of text that the tokenizer's own rpcs take or answer"""
MAX_DECODED_IDS = 256 * 1024
"""Token ids that Decode takes"""
