"""Factory of processors, which share vocabulary, templates and image reader."""

from dataclasses import dataclass

from services.tokenizer.chat.chat_templates import ChatTemplates
from services.tokenizer.chat.conversation_processor import ConversationProcessor
from services.tokenizer.completion.prompt_processor import PromptProcessor
from services.tokenizer.completion.request_processor import RequestProcessor
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["ProcessorFactory"]


@dataclass(frozen=True, slots=True)
class ProcessorFactory:
    """Factory that makes the processor of each request."""

    vocabulary: Vocabulary
    infill: InfillTemplate | None
    templates: ChatTemplates
    images: ImageReader

    def processor(self, request: completion_pb2.GenerateRequest) -> RequestProcessor:
        """Return the processor of a request; one without input is refused by its `check`."""
        if request.HasField("conversation"):
            return ConversationProcessor(request, self.vocabulary, self.templates, self.images)
        return PromptProcessor(request, self.vocabulary, self.infill, self.images)
