"""The render process at the stop of the service."""

import asyncio

import pytest

from services.tokenizer.chat.template.render_protocol import RenderJob
from services.tokenizer.chat.template.renderer import Renderer
from tokenwire.errors import ServiceError


@pytest.mark.parametrize("turns", [1, 2, 10])
async def test_stop_while_the_process_starts_is_no_error(
    turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C during the start must neither look like a crash nor leave a process."""
    renderer = Renderer({"default": "{{ messages }}"}, {})
    job = RenderJob(
        messages=[],
        tools=None,
        template="default",
        variables={},
        add_generation_prompt=False,
        continue_last_message=False,
    )
    rendering = asyncio.ensure_future(renderer.render(job))
    for _ in range(turns):
        await asyncio.sleep(0)
    await renderer.stop()
    with pytest.raises(ServiceError):
        await rendering
    assert not caplog.records
