"""Turns of the image encoder: time that the loop leaves to it between steps."""

import time

__all__ = ["EncoderTurns"]

_MOST_SECONDS = 0.1
"""Longest turn in seconds, because new requests wait for its end"""


class EncoderTurns:
    """Pauses after steps, while the encoder works on the same cores.

    If both computed at once, each barrier of the step's threads would wait for a thread that the
    encoder has displaced, and single steps would take several times as long as others.
    """

    def __init__(self, share: float) -> None:
        """share: length of a turn, as a multiple of the length of a step without prompts."""
        self._share = share
        self._step_seconds = _MOST_SECONDS
        """Length of the last step without prompts, in seconds"""

    def give(self, step_seconds: float, *, had_prompts: bool) -> None:
        """Sleep for a turn after a step that took `step_seconds`.

        A step with prompts takes longer, so its turn is as long as that of a step without prompts.
        """
        if not had_prompts:
            self._step_seconds = step_seconds
        seconds = self._share * min(step_seconds, self._step_seconds)
        time.sleep(min(seconds, _MOST_SECONDS))
