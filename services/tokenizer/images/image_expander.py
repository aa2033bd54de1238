"""Expansion of a request's images: their tokens in place of their marks, in order."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from services.common.block_hash import ImagePlaces
from services.tokenizer.images.image_family import Expansion, ImageFamily
from services.tokenizer.images.request_images import RequestImage
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["ImageExpander", "ImagePrompt"]

_GENERIC = "<image>"


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with the tokens of its images in place of their marks."""

    count: int
    """Number of images in the prompt"""
    field: str
    """Field of the request for errors"""
    placeholder: str
    placeholder_id: int
    lead: int
    """Number of an image's ids before its first placeholder"""
    text: str = ""
    """Text of a text prompt. Each of its placeholders stands for a run."""
    runs: Sequence[int] = ()
    """Number of placeholders in each run"""
    ids: Sequence[int] = ()
    """Ids of a prompt of ids, with whole runs"""

    @property
    def added(self) -> int:
        """Number of placeholders in the runs less the placeholders of `text`."""
        return sum(self.runs) - len(self.runs)

    def lengthen(
        self, ids: Sequence[int], texts: Sequence[str] = ()
    ) -> tuple[list[int], list[str]]:
        """Return ids and texts of `text` with each placeholder lengthened to its run.

        Raises INVALID_ARGUMENT if the prompt has other placeholders than those of its images.
        """
        if ids.count(self.placeholder_id) != len(self.runs):
            raise _stray(self.field, self.placeholder)
        longer: list[int] = []
        longer_texts: list[str] = []
        done = 0
        for run in self.runs:
            place = ids.index(self.placeholder_id, done)
            longer += [*ids[done:place], *[self.placeholder_id] * run]
            if texts:
                longer_texts += [*texts[done : place + 1], *[self.placeholder] * (run - 1)]
            done = place + 1
        return [*longer, *ids[done:]], [*longer_texts, *texts[done:]]

    def first_image(self, ids: Sequence[int]) -> int:
        """Return the index of an image's first id in whole ids; their number without an image."""
        return ids.index(self.placeholder_id) - self.lead if self.count else len(ids)


class ImageExpander:
    """The images of one request. Each mark in the prompts takes the next image."""

    def __init__(
        self,
        family: ImageFamily,
        vocabulary: Vocabulary,
        images: Sequence[RequestImage],
        expansions: Sequence[Expansion],
    ) -> None:
        """expansions: one for each image."""
        self._family = family
        self._vocabulary = vocabulary
        self._images = images
        self._expansions = expansions
        self._marks = 0
        """Number of marks that were found so far"""

    def of(self, places: Sequence[int]) -> "ImageExpander":
        """Return the expander of some of the images alone."""
        return ImageExpander(
            self._family,
            self._vocabulary,
            [self._images[place] for place in places],
            [self._expansions[place] for place in places],
        )

    def place(self, prompts: Iterable[completion_pb2.Prompt]) -> list[ImagePrompt]:
        """Return the prompts of a completion with its images.

        Raises INVALID_ARGUMENT unless they have a mark for each image.
        """
        placed, are_ids = [], False
        for prompt in prompts:
            if prompt.WhichOneof("prompt") == "text":
                text = [(prompt.text, False)]
                placed.append(self._in_parts(text, "prompts.images", takes_generic=True)[1])
            else:
                placed.append(self._in_ids(list(prompt.token_ids.ids)))
                are_ids = True
        if self._marks != len(self._images):
            mark = _GENERIC if not are_ids else "image"
            message = (
                f"The prompts have {_count(self._marks, f'{mark} mark')}, but the request has "
                f"{_count(len(self._images), 'image')}."
            )
            if are_ids:
                message += (
                    " In ids, a mark is one image token, or as many as the image's size needs."
                )
            raise invalid("prompts.images", message)
        return placed

    def place_in_chat(
        self, parts: Sequence[tuple[str, bool]]
    ) -> tuple[list[tuple[str, bool]], ImagePrompt]:
        """Return the parts of a rendered conversation with its images; see `ControlTokens.split`.

        Raises INVALID_ARGUMENT unless the template wrote a mark for each image.
        """
        placed = self._in_parts(parts, "conversation.messages", takes_generic=False)
        if self._marks < len(self._images):
            raise invalid(
                self._images[self._marks].field,
                f"The chat template leaves out images: it writes {_count(self._marks, 'mark')} for "
                f"{_count(len(self._images), 'image')}. Move images to messages of the user.",
            )
        if self._marks > len(self._images):
            raise invalid(
                "conversation.messages",
                f"The chat template writes {_count(self._marks, 'image mark')} for "
                f"{_count(len(self._images), 'image')}.",
            )
        return placed

    def messages(self, placed: Iterable[ImagePrompt]) -> list[engine_pb2.PromptImage]:
        """Return the engine's messages of the images that `place` put into these prompts."""
        images = iter(self._images)
        return [
            engine_pb2.PromptImage(prompt=index, data=next(images).data)
            for index, prompt in enumerate(placed)
            for _ in range(prompt.count)
        ]

    def places(
        self, placed: Sequence[ImagePrompt], prompts: Sequence[Sequence[int]]
    ) -> list[list[ImagePlaces]]:
        """Return, for each prompt, the images that `place` put there, with their places in its ids.

        Takes long for long prompts.
        """
        images = iter(zip(self._images, self._expansions, strict=True))
        placeholder = self._family.placeholder
        found = []
        for prompt, ids in zip(placed, prompts, strict=True):
            tokens = (i for i, token in enumerate(ids) if token == prompt.placeholder_id)
            its_images = []
            for image, expansion in islice(images, prompt.count):
                parts = expansion.run * expansion.core.count(placeholder)
                its_images.append(ImagePlaces(image.digest, list(islice(tokens, parts))))
            found.append(its_images)
        return found

    def _next(self) -> Expansion | None:
        """Return the expansion of the next mark; None beyond the last image."""
        self._marks += 1
        return self._expansions[self._marks - 1] if self._marks <= len(self._images) else None

    def _in_parts(
        self, parts: Sequence[tuple[str, bool]], field: str, *, takes_generic: bool
    ) -> tuple[list[tuple[str, bool]], ImagePrompt]:
        """Expand the marks in all parts except control tokens of users."""
        family = self._family
        marks = {family.mark: family.mark} | ({_GENERIC: family.generic} if takes_generic else {})
        pattern = re.compile("|".join(map(re.escape, marks)))
        runs: list[int] = []
        before = self._marks

        def expand(match: re.Match[str]) -> str:
            expansion = self._next()
            if expansion is None:
                return match.group()
            runs.extend([expansion.run] * expansion.core.count(family.placeholder))
            return marks[match.group()].replace(family.mark, expansion.text)

        expanded = [
            (text if is_users else pattern.sub(expand, text), is_users) for text, is_users in parts
        ]
        text = "".join(text for text, _ in expanded)
        return expanded, self._prompt(before, field, text=text, runs=runs)

    def _in_ids(self, ids: list[int]) -> ImagePrompt:
        """Expand the marks of ids. Runs that already have the length for their image stay."""
        mark_id = self._vocabulary.ids[self._family.mark]
        find = _finder(ids, mark_id, self._family.placeholder_id)
        placed: list[int] = []
        before = self._marks
        done = 0
        while (place := find(done)) < len(ids):
            expansion = self._next()
            if expansion is None:
                self._marks += ids[place + 1 :].count(mark_id)
                break
            core = self._whole(expansion.core, expansion.run)
            start = place - self._offset(core, mark_id)
            if start >= done and ids[start : start + len(core)] == core:
                end = start + len(core)
                placed += ids[done:end]
            elif ids[place] != mark_id:
                raise _stray("prompts.images", self._family.placeholder)
            else:
                end = place + 1
                placed += [*ids[done:place], *self._lone(expansion)]
            done = end
        return self._prompt(before, "prompts.images", ids=[*placed, *ids[done:]])

    def _prompt(
        self,
        before: int,
        field: str,
        *,
        text: str = "",
        runs: Sequence[int] = (),
        ids: Sequence[int] = (),
    ) -> ImagePrompt:
        """Return the prompt whose marks were found after the first `before`."""
        count = min(self._marks, len(self._images)) - min(before, len(self._images))
        family, lead = self._family, 0
        if count:
            lead = self._whole(self._expansions[before].core, 1).index(family.placeholder_id)
        placeholder, token = family.placeholder, family.placeholder_id
        return ImagePrompt(count, field, placeholder, token, lead, text, runs, ids)

    def _offset(self, core: Sequence[int], mark_id: int) -> int:
        """Return the place of the token in a core's ids that the search for marks finds."""
        return next(
            place
            for place, token in enumerate(core)
            if token in (mark_id, self._family.placeholder_id)
        )

    def _lone(self, expansion: Expansion) -> list[int]:
        """Return the ids of an expansion between other ids."""
        before = self._vocabulary.encode_continuation(expansion.before)
        return before + self._whole(expansion.core + expansion.after, expansion.run)

    def _whole(self, text: str, run: int) -> list[int]:
        """Return the ids of a text whose placeholders stand for runs of this length."""
        placeholder = self._family.placeholder_id
        return [
            each
            for token in self._vocabulary.encode(text, add_special_tokens=False)
            for each in ([placeholder] * run if token == placeholder else [token])
        ]


def _finder(ids: list[int], *tokens: int) -> Callable[[int], int]:
    """Return a function that finds the first place of one of the tokens from a place on."""
    known = dict.fromkeys(tokens, -1)

    def find(begin: int) -> int:
        for token, place in known.items():
            if place < begin:
                try:
                    known[token] = ids.index(token, begin)
                except ValueError:
                    known[token] = len(ids)
        return min(known.values())

    return find


def _stray(field: str, placeholder: str) -> ServiceError:
    return invalid(
        field,
        f"A prompt has {placeholder} tokens that belong to none of the request's images.",
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
