"""Limits and defaults that the contract states, for every service."""

DEFAULT_MAX_TOKENS = 16
"""Output tokens of a completion's choice without max_tokens; a chat may fill the context"""
DRY_BASE = 1.75
"""Base of the DRY penalty"""
DRY_ALLOWED_LENGTH = 2
"""Tokens of a repetition that DRY does not penalize"""

MAX_SEQUENCES = 128
"""Sequences of a request: prompts x n, or prompts x best_of"""
MAX_STOP_TOKEN_IDS = 128
"""Stop token ids of a request"""
MAX_STOP_LENGTH = 1_000
"""Code points of a stop string"""
MAX_TOP_K = 128
"""Largest top_k"""
MAX_LENGTH_PENALTY = 10
"""Largest length_penalty of a beam search; its negative is the least one"""
MAX_DRY_BREAKERS = 32
"""DRY sequence breakers of a request"""
MAX_DRY_BREAKER_LENGTH = 64
"""Code points of a DRY sequence breaker"""
MAX_BAD_WORDS = 128
"""Bad words of a request"""
MAX_BAD_WORD_LENGTH = 1_000
"""Code points of a bad word"""
MAX_BAD_SPELLINGS = 1_024
"""Token sequences that spell the bad words of a request; a word may have several"""
MAX_BAD_IDS = 16_384
"""Token ids of all spellings of a request's bad words"""
MAX_CHAT_LOGPROBS = 20
"""Candidates of each token of a chat"""

MAX_EMBEDDED_TEXTS = 2_048
"""Texts, or pairs of texts, of a request for vectors"""

MAX_TOKEN_STATES = 4 * 1024 * 1024
"""Bytes of the states of all tokens of a request, which JSON makes five times as large"""
MAX_VECTORS = 48 * 1024 * 1024
"""Bytes of the vectors of all texts of a request"""

MAX_IMAGES = 16
"""Images of a request"""
MAX_IMAGE_BYTES = 20 * 1024 * 1024
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

MAX_MESSAGES = 4_096
"""Messages of a chat"""
MAX_MESSAGE_PARTS = 1_024
"""Content parts of a message"""
MAX_TOOL_CALLS = 128
"""Tool calls of a message"""
MAX_ARGUMENTS = 1024 * 1024
"""Characters of the arguments of a tool call"""
MAX_TEMPLATE_JSON = 64 * 1024
"""Characters of JSON of the template's arguments"""
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of reasoning_effort"""
MAX_TOOLS = 128
"""Tools of a request"""
FUNCTION_NAME = "[A-Za-z0-9_-]{1,128}"
"""Pattern that a whole name of a function must match"""
MAX_STRUCTURES = 128
"""Structures of a structural tag, and its triggers: each is a token of the grammar's lexer"""

MAX_TEXT_BYTES = 1024 * 1024
"""UTF-8 bytes of text that the tokenizer's own rpcs take or answer"""
MAX_DECODED_IDS = 256 * 1024
"""Token ids that Decode takes"""
