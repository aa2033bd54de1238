"""Echo of a prompt in front of a choice: its text, and the columns of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.tokenizer.completion.columns import Columns, Score
from services.tokenizer.completion.prompt_encoding import EncodedPrompt
from services.tokenizer.text.detokenizer import Detokenizer

__all__ = ["Echo", "make_echo"]


@dataclass(frozen=True, slots=True)
class Echo:
    """Text and tokens of a prompt."""

    text: str
    columns: Columns
    ended: "Echo | None" = None
    """Echo to use if no generated token completes the prompt's last character; None = this one."""


def make_echo(prompt: EncodedPrompt, scores: Sequence[Score] | None) -> Echo:
    """Return the echo of a prompt. scores: one per token, empty for the first; None = no scores."""
    ended = None
    if prompt.ended_texts != prompt.texts:
        ended = _echo(prompt, prompt.ended_texts, scores)
    echo = _echo(prompt, prompt.texts, scores)
    return Echo(echo.text, echo.columns, ended)


def _echo(prompt: EncodedPrompt, texts: Sequence[str], scores: Sequence[Score] | None) -> Echo:
    columns = Columns()
    if scores is None:
        columns.ids.extend(prompt.ids)
        return Echo("".join(texts), columns)
    detokenizer = Detokenizer(prompt.table)
    offset = 0
    for place, (token, text, score) in enumerate(zip(prompt.ids, texts, scores, strict=True)):
        candidates = score.candidate_texts(detokenizer) if place else [""] * len(score.top_ids)
        shown = text or prompt.table.hidden.get(token, "")  # for example, a BOS that was added
        columns.append(token, shown, offset, score, candidates)
        detokenizer.feed(token)
        offset += len(text)
    return Echo("".join(texts), columns)
