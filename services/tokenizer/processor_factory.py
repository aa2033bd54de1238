"""Processors of new requests, with what all of them share."""

from dataclasses import dataclass

from services.tokenizer.chat.chat_processor import ChatProcessor
from services.tokenizer.chat.chat_templates import ChatTemplates
from services.tokenizer.completion.complete_processor import CompleteProcessor
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["ProcessorFactory"]


@dataclass(frozen=True, slots=True)
class ProcessorFactory:
    """Makes the processor of each request."""

    vocabulary: Vocabulary
    infill: InfillTemplate | None
    templates: ChatTemplates
    images: ImageReader

    def complete(self, request: completion_pb2.CompleteRequest) -> CompleteProcessor:
        return CompleteProcessor(request, self.vocabulary, self.infill, self.images)

    def chat(self, request: completion_pb2.ChatRequest) -> ChatProcessor:
        return ChatProcessor(request, self.vocabulary, self.templates, self.images)
