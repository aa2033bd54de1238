"""A grammar service that answers a step loop after a number of steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.engine.messages import AddRequest, Command, DraftTokens, Mask, Output, SetMasks, Token
from tests.unit.engine.tiny import EOS, mask_of


@dataclass
class Grammar:
    """Answers like the grammar service, after a number of steps."""

    allowed: Sequence[set[int]]
    jumps: bool
    lateness: Iterator[int]
    """Steps until each answer"""
    handle: int = 1
    known: dict[int, int] = field(default_factory=dict)
    """Position of the last answer, by sequence"""
    generated: dict[int, int] = field(default_factory=dict)
    """Number of tokens, by sequence"""
    due: list[tuple[int, Mask]] = field(default_factory=list)

    def open(self, request: AddRequest) -> None:
        resumed = {resume.sequence: len(resume.generated) for resume in request.checked.resume}
        for sequence in range(request.checked.num_sequences):
            self.generated[sequence] = resumed.get(sequence, 0)
        self.reopen()

    def reopen(self) -> None:
        """Answer once more: another service takes the sequences, with the tokens so far."""
        self.due.clear()
        for sequence, position in self.generated.items():
            self._answer(sequence, position, ())

    def feed(self, outputs: Sequence[Output]) -> None:
        """Take all tokens of a step, and then answer."""
        mine = [
            o for o in outputs if isinstance(o, Token) and o.handle == self.handle and o.id != EOS
        ]
        drafts = {
            o.sequence: o.ids
            for o in outputs
            if isinstance(o, DraftTokens) and o.handle == self.handle
        }
        for sequence, position in {token.sequence: token.position + 1 for token in mine}.items():
            self.generated[sequence] = position
            if position > self.known[sequence]:
                self._answer(sequence, position, drafts.get(sequence, ()))

    def masks(self) -> list[Command]:
        """Return the answers that are due."""
        ready = [mask for wait, mask in self.due if wait == 0]
        self.due = [(wait - 1, mask) for wait, mask in self.due if wait > 0]
        return [SetMasks(ready)] if ready else []

    def _answer(self, sequence: int, position: int, draft: Sequence[int]) -> None:
        end = position
        while self.jumps and end < len(self.allowed) and len(self.allowed[end]) == 1:
            end += 1
        forced = [next(iter(ids)) for ids in self.allowed[position:end]]
        is_over = end == len(self.allowed)
        self.known[sequence] = end
        rest = draft[len(forced) :] if list(draft[: len(forced)]) == forced else ()
        draft_masks: list[tuple[int, bytes]] = []
        for at, token in enumerate(rest, start=end):
            if at + 1 >= len(self.allowed) or token not in self.allowed[at]:
                break
            draft_masks.append((token, self._bits(at + 1)))
        mask = Mask(self.handle, sequence, position, forced, self._bits(end), is_over, draft_masks)
        self.due.append((next(self.lateness), mask))

    def _bits(self, position: int) -> bytes:
        return mask_of(self.allowed[position] if position < len(self.allowed) else {EOS})
