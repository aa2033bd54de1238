"""Processor of a translated request."""

from collections.abc import Coroutine
from dataclasses import replace

from services.tokenizer.completion.plan import CompletionPlan
from services.tokenizer.completion.prompt_processor import PromptProcessor
from services.tokenizer.model_limits import ModelLimits

__all__ = ["GenerateProcessor"]


class GenerateProcessor(PromptProcessor):
    """Prompts with the limits of conversations: gateways send the chats of their clients."""

    def check(self, limits: ModelLimits) -> None:
        super().check(_of_chats(limits))

    def plan(self, limits: ModelLimits) -> CompletionPlan | Coroutine[None, None, CompletionPlan]:
        return super().plan(_of_chats(limits))


def _of_chats(limits: ModelLimits) -> ModelLimits:
    return replace(limits, max_logprobs=limits.max_chat_logprobs)
