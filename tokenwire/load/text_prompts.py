"""Prompts of common words, for servers whose vocabulary is not known."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tokenwire.load.workloads import Workload

__all__ = ["TextPrompts"]

_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car
city community name president team minute idea body information back parent face level office door
health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy process
"""
"""Words that are one token each in the vocabularies of today, with the space before them"""


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Random prompts of about as many tokens as a workload asks for, or one fixed text.

    Random prompts begin differently, so that no server answers them from its cache of prefixes.
    """

    seed: str
    text: str = ""
    """Prompt of all requests; empty = random ones"""

    def of(self, workload: Workload) -> Iterator[list[int] | str]:
        """Yield prompts without end."""
        words = _TEXT.split()
        rng = random.Random(f"{self.seed} {workload}")
        while True:
            yield self.text or " ".join(rng.choices(words, k=workload.prompt))
