"""Memory of images: running requests hold a bounded amount, and give it back."""

from contextvars import copy_context

import pytest

from services.common.sharing.tenant import current_tenant
from services.tokenizer.images.held_images import HeldBytes, HeldImages
from services.tokenizer.images.request_images import RequestImage
from tokenwire.errors import ServiceError


def images(*sizes: int) -> list[RequestImage]:
    return [RequestImage(f"images[{i}]", bytes(size)) for i, size in enumerate(sizes)]


def test_images_beyond_the_memory_wait_for_others_to_end() -> None:
    """Long streams about large images would fill the memory of the service."""
    held = HeldImages(most_bytes=100)
    first = held.hold(images(50, 40))
    with pytest.raises(ServiceError) as refused:
        held.hold(images(11))
    assert refused.value.reason == "QUEUE_FULL"
    held.release(first)
    held.hold(images(11))


def test_images_of_a_tenant_leave_memory_to_another() -> None:
    held = HeldImages(most_bytes=100)

    def hold(tenant: str, size: int) -> HeldBytes:
        context = copy_context()
        context.run(current_tenant.set, tenant)
        return context.run(held.hold, images(size))

    first = hold("a", 50)
    with pytest.raises(ServiceError):
        hold("a", 10)
    hold("b", 20)
    held.release(first)
    hold("a", 30)


def test_a_request_alone_is_never_too_large() -> None:
    """It would wait for memory that it can never get."""
    held = HeldImages(most_bytes=100)
    held.release(held.hold(images(101)))
    assert held.hold(images(101)).size == 101


def test_text_needs_no_memory_of_images() -> None:
    held = HeldImages(most_bytes=100)
    held.hold(images(100))
    assert held.hold([]).size == 0
