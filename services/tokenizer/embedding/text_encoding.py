"""Ids of texts and of pairs of texts, as models that embed or score them expect."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.tokenizer.completion.prompt_encoding import prompt_too_long
from services.tokenizer.completion.validation import check_ids
from services.tokenizer.embedding.pair_template import PairTemplate
from services.tokenizer.embedding.parts import parts
from services.tokenizer.embedding.sentence_prompts import SentencePrompt
from services.tokenizer.embedding.text_roles import PLAIN, TextRole
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import FramedText, Vocabulary
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["TextEncoder"]

_MOST_CHARACTERS = 1 << 25  # characters of all pairs of a request
_BATCH_CHARACTERS = 1 << 19  # characters of texts that are encoded at a time


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Encodes the texts of one request."""

    vocabulary: Vocabulary
    limits: ModelLimits
    truncate: int | None
    """Tokens to keep of each text; None = longer texts than the context are refused"""
    prompt: SentencePrompt | None = None
    """Prompt before each single text, but not before pairs; None = no prompt"""
    role: TextRole = PLAIN
    """Encoding of each single text"""
    pair_template: PairTemplate | None = None
    """Template around pairs; None = the tokenizer's special tokens stand around them"""

    @property
    def _most(self) -> int:
        return self.limits.context_length if self.truncate in (None, -1) else self.truncate or 0

    @property
    def _most_of_text(self) -> int:
        most = self._most if self.role.most is None else min(self._most, self.role.most)
        return most - self.role.num_added

    @property
    def _cuts_texts(self) -> bool:
        return self.truncate is not None or self.role.most is not None

    def encode(self, inputs: Sequence[completion_pb2.Prompt]) -> list[engine_pb2.EmbeddedPrompt]:
        """Encode inputs within their bounds. Raises ServiceError that names the wrong one."""
        encoded: list[engine_pb2.EmbeddedPrompt | None] = [None] * len(inputs)
        texts: dict[int, str] = {}
        for place, prompt in enumerate(inputs):
            if prompt.HasField("text"):
                texts[place] = prompt.text
            else:
                ids = self._checked(prompt.token_ids.ids, f"inputs[{place}].token_ids.ids")
                encoded[place] = engine_pb2.EmbeddedPrompt(ids=ids)
        fields = [f"inputs[{place}].text" for place in texts]
        for place, made in zip(texts, self.encode_texts([*texts.values()], fields), strict=True):
            encoded[place] = made
        return [prompt for prompt in encoded if prompt is not None]

    def encode_texts(
        self, texts: Sequence[str], fields: Sequence[str]
    ) -> list[engine_pb2.EmbeddedPrompt]:
        """Encode texts. Raises ServiceError that names the wrong one's field."""
        bounded = list(map(self._prompted, texts, fields))
        prompts = []
        for framed, field in zip(self._framed(bounded), fields, strict=True):
            ids = self._cut(framed, field, self._most_of_text, cuts=self._cuts_texts)
            prompt = self.role.arranged(framed, ids, self.limits.context_length)
            if self.prompt is not None:
                prompt.instruction_length = min(self.prompt.length, len(ids))
            prompts.append(prompt)
        return prompts

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, has_types: bool
    ) -> list[engine_pb2.EmbeddedPrompt]:
        """Encode pairs of texts. Raises ServiceError that names the wrong one.

        has_types: whether the model tells the texts of a pair apart.
        """
        most, cuts = self._most, self.truncate is not None
        firsts = {first: self._bounded(first, "first", most, cuts=cuts) for first, _ in pairs}
        bounded = [
            (firsts[first], self._bounded(second, f"second[{place}]", most, cuts=cuts))
            for place, (first, second) in enumerate(pairs)
        ]
        if sum(len(first) + len(second) for first, second in bounded) > _MOST_CHARACTERS:
            message = f"The pairs together have more than {_MOST_CHARACTERS:,} characters."
            raise invalid("second", message)
        if self.pair_template is not None:
            return self._prompted_pairs(self.pair_template, bounded)
        prompts = []
        for place, framed in enumerate(self._framed(bounded)):
            ids = self._cut(framed, f"second[{place}]", most, cuts=cuts)
            second = framed.second_text(most) if has_types else None
            prompts.append(engine_pb2.EmbeddedPrompt(ids=ids, second_text=second))
        return prompts

    def _prompted_pairs(
        self, template: PairTemplate, pairs: Sequence[tuple[str, str]]
    ) -> list[engine_pb2.EmbeddedPrompt]:
        """Encode pairs by a template, whose end stays when they are cut."""
        most, cuts = self._most, self.truncate is not None
        if (least := template.least(self.vocabulary)) >= most:
            message = f"The prompt around a pair has {least} tokens: keep more tokens."
            raise invalid("truncate_prompt_tokens" if cuts else "second[0]", message)
        prompts = []
        for place, (first, second) in enumerate(pairs):
            # one more than fits shows that a pair is too long
            ids = template.encode(self.vocabulary, first, second, most if cuts else most + 1)
            if len(ids) > most:
                field = f"second[{place}]"
                raise prompt_too_long(field, f"{len(ids):,}", self.limits.context_length, 0)
            prompts.append(engine_pb2.EmbeddedPrompt(ids=ids))
        return prompts

    def _framed(self, texts: Sequence[str | tuple[str, str]]) -> Iterator[FramedText]:
        """Encode texts or pairs, some at a time: encodings take much memory."""
        for part in parts([sum(map(len, text)) for text in texts], _BATCH_CHARACTERS):
            yield from self.vocabulary.encode_framed(texts[part])

    def _prompted(self, text: str, field: str) -> str:
        """Return a text behind its prompt. Raises the errors of `_bounded`."""
        before = self.role.prefix if self.prompt is None else self.prompt.text
        whole = before + text if text else ""
        return self._bounded(whole, field, self._most_of_text, cuts=self._cuts_texts)

    def _bounded(self, text: str, field: str, most: int, *, cuts: bool) -> str:
        """Return a text whose encoding is bounded. Raises INVALID_ARGUMENT for an empty one."""
        if not text:
            raise invalid(field, "A text must not be empty.")
        least = self.vocabulary.least_tokens(text, most)
        if least <= most:
            return text
        if not cuts:
            raise prompt_too_long(field, f"at least {least:,}", self.limits.context_length, 0)
        return self.vocabulary.beginning(text, most + 1)

    def _checked(self, ids: Sequence[int], field: str) -> Sequence[int]:
        if len(ids) > self._most and self.truncate is None:
            raise prompt_too_long(field, f"{len(ids):,}", self.limits.context_length, 0)
        kept = ids[: self._most]
        check_ids(field, kept, self.limits.vocabulary_size)
        return kept

    def _cut(self, framed: FramedText, field: str, most: int, *, cuts: bool) -> Sequence[int]:
        if len(framed.ids) > most and not cuts:
            raise prompt_too_long(field, f"{len(framed.ids):,}", self.limits.context_length, 0)
        if not framed.ids:
            raise invalid(field, "The text has no tokens.")
        if most < framed.least:
            message = f"The special tokens around a text are {framed.least}: keep more tokens."
            raise invalid("truncate_prompt_tokens", message)
        return framed.cut(most)
