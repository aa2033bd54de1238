"""Draws tokens from logits, and scores them.

What a sequence asks for is applied to its row of logits in this order, as llama.cpp and vLLM do:

1. logit_bias is added;
2. repetition_penalty, over prompt and generated tokens;
3. frequency_penalty and presence_penalty, over generated tokens;
4. DRY;
5. the grammar's mask, allowed_token_ids and bad_words, and the ids that min_tokens bans: they have
   the last word;
6. temperature (0: the most likely id is taken, and nothing below applies);
7. top_k, then top_p, then min_p; or mirostat in place of these three;
8. one uniform number, a function of (seed, choice, position), picks a token.

Scores are those of the logits as the model gave them, before all of this. What no row of a batch
asks for is skipped.
"""

from services.engine.sampling.ahead import Ahead
from services.engine.sampling.bad_words import BadWords, narrowed
from services.engine.sampling.draw import argmax, only_numbers, sample
from services.engine.sampling.mirostat import Mirostat
from services.engine.sampling.penalties import Penalties
from services.engine.sampling.row import NOTHING_ALLOWED, Row, uniform
from services.engine.sampling.score import score

__all__ = [
    "NOTHING_ALLOWED",
    "Ahead",
    "BadWords",
    "Mirostat",
    "Penalties",
    "Row",
    "argmax",
    "narrowed",
    "only_numbers",
    "sample",
    "score",
    "uniform",
]
