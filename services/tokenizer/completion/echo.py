"""The prompt in front of a choice: its text, and the columns of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.tokenizer.completion.columns import Columns, Score
from services.tokenizer.completion.prompt import EncodedPrompt
from services.tokenizer.text.detokenizer import Detokenizer

__all__ = ["Echo", "make_echo"]


@dataclass(frozen=True, slots=True)
class Echo:
    """What a choice shows of its prompt."""

    text: str
    columns: Columns
    ended: "Echo | None" = None
    """What it shows instead where no generated token goes on with the prompt's last character;
    None for the same."""


def make_echo(prompt: EncodedPrompt, scores: Sequence[Score] | None) -> Echo:
    """The echo of a prompt. `scores` are those of its tokens, the first of which has none; None
    where none are shown."""
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
        shown = text or prompt.table.hidden.get(token, "")  # a BOS that the tokenizer added, say
        columns.append(token, shown, offset, score, candidates)
        detokenizer.feed(token)
        offset += len(text)
    return Echo("".join(texts), columns)
