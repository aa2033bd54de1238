"""Tokens and scores among the outputs of a step loop."""

from services.engine.messages import Output, ScoredPrompt, Token
from services.engine.model.model import Model
from tests.unit.engine.tiny import make_loop, make_request, run


def greedy_tokens(decoder: Model, prompt: list[int], max_tokens: int) -> list[Token]:
    outputs = run(
        make_loop(decoder), [make_request(1, [prompt], max_tokens=max_tokens, logprobs=2)]
    )
    return [output for output in outputs if isinstance(output, Token)]


def scores_of(outputs: list[Output], handle: int) -> list[float]:
    """Return the logprobs of a request's prompt tokens."""
    scored = [o for o in outputs if isinstance(o, ScoredPrompt) and o.handle == handle]
    return [score.logprob for o in scored for score in o.scores]
