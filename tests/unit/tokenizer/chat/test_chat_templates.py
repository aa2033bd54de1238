"""Chat templates: prompts equal those of transformers for every form of template."""

import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from services.common.settings import StartupError
from services.tokenizer.chat.answer.call_grammars import ReasoningState
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.chat_templates import ChatPrompt, ChatTemplates, RenderedChat
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tool_schemas import arguments_schemas
from tests.unit.tokenizer.chat.checkpoints import TEMPLATES, chat_vocabulary
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion

_TOOLS = [
    completion.Tool(
        name="get_weather",
        description="The weather",
        parameters_json='{"type":"object","properties":{"city":{"type":"string"},'
        '"days":{"type":"integer"}}}',
    ),
    completion.Tool(name="get_time"),
]
_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "São Tomé", "days": 3}),
    ("get_time", {}),
]


def _says(role: str, text: str | None = None, **fields: Any) -> completion.Message:
    parts = [] if text is None else [completion.ContentPart(text=text)]
    return completion.Message(role=f"ROLE_{role.upper()}", parts=parts, **fields)  # type: ignore[arg-type]


def _prompt(
    *messages: completion.Message,
    tools: list[completion.Tool] | None = None,
    template: str = "",
    arguments: object = None,
    add_generation_prompt: bool | None = None,
    continue_last_message: bool = False,
    reasoning_effort: str = "",
) -> ChatPrompt:
    return ChatPrompt(
        messages=messages,
        tools=tools or [],
        template=template,
        arguments_json="" if arguments is None else json.dumps(arguments),
        add_generation_prompt=add_generation_prompt,
        continue_last_message=continue_last_message,
        reasoning_effort=reasoning_effort,
    )


async def _refusal(templates: ChatTemplates, prompt: ChatPrompt) -> ServiceError:
    try:
        templates.check(prompt)
        await templates.render(prompt)
    except ServiceError as error:
        return error
    raise AssertionError("the prompt was accepted")


@asynccontextmanager
async def _started(
    directory: Path, template: str | list[dict[str, str]]
) -> AsyncIterator[ChatTemplates]:
    """Start the templates of a checkpoint with this template, or these."""
    templates = ChatTemplates(chat_vocabulary(directory, template), "m")
    templates.start()
    yield templates
    await templates.stop()


@dataclass(frozen=True, slots=True)
class _Family:
    form: str
    directory: Path
    templates: ChatTemplates


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[form for form in TEMPLATES if form != "parts"]
)
async def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[_Family]:
    """Return the templates of each family in turn."""
    directory = tmp_path_factory.mktemp(request.param)
    async with _started(directory, TEMPLATES[request.param]) as templates:
        yield _Family(request.param, directory, templates)


@pytest.mark.parametrize(
    ("effort", "arguments", "text"),
    [
        ("", None, "-/-"),
        ("low", None, "low/True"),
        ("none", {}, "none/False"),
        ("none", {"enable_thinking": True}, "none/True"),
        ("high", {"reasoning_effort": "high"}, "high/True"),
        ("", {"reasoning_effort": "x"}, "x/-"),
    ],
)
async def test_template_gets_the_reasoning_effort(
    tmp_path: Path, effort: str, arguments: object, text: str
) -> None:
    variables = ("reasoning_effort", "enable_thinking")
    template = "/".join(f"{{{{ {name} if {name} is defined else '-' }}}}" for name in variables)
    async with _started(tmp_path, template) as templates:
        prompt = _prompt(_says("user", "a"), arguments=arguments, reasoning_effort=effort)
        templates.check(prompt)
        assert (await templates.render(prompt)).text == text


async def test_second_reasoning_effort_is_refused(tmp_path: Path) -> None:
    another: object = {"reasoning_effort": "high"}
    async with _started(tmp_path, "a") as templates:
        prompt = _prompt(_says("user", "a"), arguments=another, reasoning_effort="low")
        assert (await _refusal(templates, prompt)).field == "conversation.reasoning_effort"


async def test_ids_equal_those_of_transformers(family: _Family) -> None:
    """The conversation has a call and its answer if the family supports them."""
    form, templates = family.form, family.templates
    reference: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(family.directory / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    messages = [_says("user", " Hé <b> \n"), _says("assistant", "a\n\nb"), _says("user", "c")]
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": " Hé <b> \n"},
        {"role": "assistant", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
    ]
    if form not in ("json", "thinking"):
        [(name, arguments)] = _CALLS[:1]
        call = completion.ToolCall(id="abcdef012", name=name, arguments_json=json.dumps(arguments))
        messages += [
            _says("assistant", tool_calls=[call]),
            _says("tool", "21", tool_call_id="abcdef012"),
        ]
        function = {"name": name, "arguments": arguments}
        called = {"id": "abcdef012", "type": "function", "function": function}
        plain += [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "abcdef012", "content": "21"},
        ]
    for asks in (True, False):
        prompt = _prompt(*messages, add_generation_prompt=asks)
        templates.check(prompt)
        rendered = await templates.render(prompt)
        expected = reference.apply_chat_template(
            plain, chat_template=TEMPLATES[form], add_generation_prompt=asks,
            return_dict=False,
        )  # fmt: skip
        assert list(rendered.ids) == expected
        assert rendered.text == reference.decode(expected)


async def test_calls_that_a_template_writes_are_parsed(family: _Family) -> None:
    """The format is detected, and no part of the calls is left as content."""
    form, templates = family.form, family.templates
    if form in ("json", "thinking"):
        assert templates.answers.calls.name == "hermes"  # the form that the prompt asks for
        return
    calls = _CALLS[:1] if form in ("harmony", "llama3_json") else _CALLS
    assert templates.answers.calls.name == form
    message = _says(
        "assistant",
        tool_calls=[
            completion.ToolCall(id=f"call_{place}", name=name, arguments_json=json.dumps(arguments))
            for place, (name, arguments) in enumerate(calls)
        ],
    )
    question = _prompt(_says("user", "q"), tools=_TOOLS, add_generation_prompt=True)
    before = await templates.render(question)
    after = await templates.render(
        _prompt(_says("user", "q"), message, tools=_TOOLS, add_generation_prompt=False)
    )
    assert after.text.startswith(before.text)
    answer = after.text.removeprefix(before.text)
    for end in ("<|im_end|>", "<|eot_id|>", "</s>", "<|call|>", "<|END_OF_TURN_TOKEN|>"):
        answer = answer.partition(end)[0]
    parser = templates.parser(templates.reasoning_state(before.text), arguments_schemas(_TOOLS))
    segments = [*parser.feed(answer), *parser.finish(is_cut=False)]
    assert not [part for part in segments if part.kind is SegmentKind.CONTENT]
    names = [part.text for part in segments if part.kind is SegmentKind.CALL]
    assert names == [name for name, _ in calls]
    arguments = "".join(part.text for part in segments if part.kind is SegmentKind.ARGUMENTS)
    decoder, found = json.JSONDecoder(), []
    while arguments:
        value, end_at = decoder.raw_decode(arguments)
        found.append(value)
        arguments = arguments[end_at:]
    assert found == [value for _, value in calls]


async def test_every_template_writes_a_broken_call(family: _Family) -> None:
    """It is written as its text, or as the rest of the object if the template needs one."""
    broken = '{"city": "São Tomé", "days": 3, "x": "'
    call = completion.ToolCall(id="abcdef012", name="get_weather", arguments_json=broken)
    conversation = [
        _says("user", "q"),
        _says("assistant", tool_calls=[call]),
        _says("tool", "21", tool_call_id="abcdef012"),
    ]
    prompt = _prompt(*conversation, tools=_TOOLS)
    family.templates.check(prompt)
    rendered = await family.templates.render(prompt)
    expected = {
        "hermes": '"arguments": {"city": "São Tomé", "days": 3, "x": ""}}',
        "qwen3_coder": "<parameter=days>\n3\n</parameter>\n<parameter=x>\n\n</parameter>",
        "mistral": f"[ARGS]{broken}</s>",
        "mistral_array": '"arguments": {"city": "São Tomé", "days": 3, "x": ""}, "id"',
        "llama3_json": '"parameters": {"city": "São Tomé", "days": 3, "x": ""}}',
        "pythonic": 'get_weather(city="São Tomé", days=3, x="")',
    }
    assert expected.get(family.form, "") in rendered.text


async def test_harmony_keeps_its_reasoning_and_its_ends(tmp_path: Path) -> None:
    """gpt-oss thinks between calls, and goes on behind the end of a part."""
    async with _started(tmp_path, TEMPLATES["harmony"]) as templates:
        call = completion.ToolCall(id="a", name="get_weather", arguments_json="{}")
        asked = _says("assistant", "Look:", reasoning="I need it.", tool_calls=[call])
        prompt = _prompt(
            _says("user", "q"),
            asked,
            _says("tool", "21", tool_call_id="a"),
            reasoning_effort="high",
        )
        rendered = await templates.render(prompt)
        assert "Reasoning: high" in rendered.text
        assert "<|channel|>analysis<|message|>I need it.\nLook:<|end|>" in rendered.text
        assert rendered.text.endswith("<|start|>assistant")
        id_of = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id
        assert templates.turn_end_ids == {id_of("<|call|>"), id_of("<|return|>")}
        assert templates.reasoning_state(rendered.text) is ReasoningState.POSSIBLE
        unfinished = _prompt(
            _says("user", "q"), _says("assistant", "So"), continue_last_message=True
        )
        continued = await templates.render(unfinished)
        assert continued.text.endswith("<|channel|>final<|message|>So")
        state = templates.reasoning_state(continued.text, behind="q")
        segments = templates.parser(state, {}).feed(" it is.")
        assert [(part.kind, part.text) for part in segments] == [(SegmentKind.CONTENT, " it is.")]


async def test_reasoning_is_a_part_where_a_template_takes_it_so(tmp_path: Path) -> None:
    """Ministral 3's template drops it as a field of the message."""
    template = (
        "{% for message in messages %}{{ '<|im_start|>' }}{% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content or [] %}"
        "{% if part.type == 'thinking' %}{{ '[THINK]' + part.thinking + '[/THINK]' }}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    said = _says("assistant", "Yes.", reasoning="Hm.")
    async with _started(tmp_path, template) as templates:
        text = (await templates.render(_prompt(_says("user", "q"), said))).text
        assert text == "<|im_start|>q<|im_start|>[THINK]Hm.[/THINK]Yes."


async def test_content_stays_beside_thinking_where_a_template_takes_both(tmp_path: Path) -> None:
    """gpt-oss's template refuses both beside a call; that of LFM2.5 writes both."""
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.thinking %}{{ '<think>' + message.thinking + '</think>' }}{% endif %}"
        "{{ message.content or '' }}{{ message.tool_calls | default([]) | map(attribute='function')"
        " | list | tojson }}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    call = completion.ToolCall(id="a", name="get_time", arguments_json="{}")
    said = _says("assistant", "Look:", reasoning="Hm.", tool_calls=[call])
    async with _started(tmp_path, template) as templates:
        text = (await templates.render(_prompt(_says("user", "q"), said, tools=_TOOLS))).text
        assert "<think>Hm.</think>Look:[" in text


def test_channels_are_read_whichever_format_names_them(tmp_path: Path) -> None:
    """An operator may set one of the two flags."""
    vocabulary = chat_vocabulary(tmp_path, TEMPLATES["harmony"])
    for calls, reasoning in (("auto", "none"), ("hermes", "auto")):
        templates = ChatTemplates(vocabulary, "m", tool_format=calls, reasoning_format=reasoning)
        parser = templates.parser(templates.reasoning_state("<|start|>assistant"), {})
        thought = "<|channel|>analysis<|message|>Hm.<|end|>"
        text = f"{thought}<|start|>assistant<|channel|>final<|message|>Yes"
        parts = [*parser.feed(text), *parser.finish(is_cut=False)]
        content = [part.text for part in parts if part.kind is SegmentKind.CONTENT]
        assert "".join(content) == "Yes"


async def test_template_gets_contents_as_parts_if_it_needs_them(tmp_path: Path) -> None:
    """A string would be written letter by letter, or not at all."""
    async with _started(tmp_path, TEMPLATES["parts"]) as templates:
        rendered = await templates.render(_prompt(_says("user", "Hello")))
        assert rendered.text == "<|im_start|>user\nHello<|im_end|>\n"


async def test_end_of_a_turn_is_detected(tmp_path: Path) -> None:
    """It ends answers, even if the checkpoint's configuration names another end."""
    async with _started(tmp_path, TEMPLATES["hermes"]) as templates:
        rendered = await templates.render(_prompt(_says("user", "Hello")))
        [end] = templates.turn_end_ids
        assert list(rendered.ids).count(end) == 1
        assert rendered.text.count("<|im_end|>") == 1


@pytest.mark.parametrize(
    ("arguments", "state"),
    [
        ({}, ReasoningState.POSSIBLE),
        ({"always": True}, ReasoningState.OPEN),
        ({"enable_thinking": False}, ReasoningState.NONE),
    ],
)
async def test_state_of_reasoning_follows_from_the_prompt(
    arguments: dict[str, bool], state: ReasoningState, tmp_path: Path
) -> None:
    async with _started(tmp_path, TEMPLATES["thinking"]) as templates:
        rendered = await templates.render(_prompt(_says("user", "q"), arguments=arguments))
        assert templates.reasoning_state(rendered.text) is state
        told = await templates.render(_prompt(_says("assistant", "a", reasoning="Hm.")))
        asked = "what does <think> mean?"
        begun = (_says("user", asked), _says("assistant", "It marks"))
        continued = await templates.render(_prompt(*begun, continue_last_message=True))
        left = templates.reasoning_state(continued.text, behind=asked)
        assert left is ReasoningState.NONE
        within = templates.reasoning_state(f"{continued.text}<think>Hm", behind=asked)
        assert within is ReasoningState.OPEN
        assert "<think>\nHm.\n</think>\n\na<|im_end|>" in told.text


async def test_one_of_several_templates_is_selected_by_name(tmp_path: Path) -> None:
    """The checkpoint may keep it in its configuration or in a file."""
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "third.jinja").write_text("3{{ messages[0].content }}")
    named = [
        {"name": "default", "template": "1{{ messages[0].content }}"},
        {"name": "second", "template": "2{{ messages[0].content }}{{ x }}"},
    ]
    async with _started(tmp_path, named) as templates:
        for name, text in (("", "1a"), ("default", "1a"), ("third", "3a")):
            prompt = _prompt(_says("user", "a"), template=name)
            templates.check(prompt)
            assert (await templates.render(prompt)).text == text
        second = _prompt(_says("user", "a"), template="second", arguments={"x": [1, "é"]})
        assert (await templates.render(second)).text == "2a[1, 'é']"
        error = await _refusal(templates, _prompt(_says("user", "a"), template="fourth"))
        assert error.field == "conversation.template"


async def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    templates = ChatTemplates(chat_vocabulary(tmp_path, ""), "m")
    templates.start()
    assert not templates.is_available
    with pytest.raises(ServiceError) as caught:
        templates.check(_prompt(_says("user", "a")))
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "NO_CHAT_TEMPLATE",
    )
    await templates.stop()


async def test_templates_are_probed_again_after_a_start_without_a_free_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later chat would fail, or be rendered as if the template refused all messages."""
    start, failures = asyncio.create_subprocess_exec, 2

    async def started(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    async with _started(tmp_path, "{{ messages[0].content }}") as templates:
        assert (await templates.render(_prompt(_says("user", "a")))).text == "a"
    assert not failures


def test_broken_template_is_refused_at_start(tmp_path: Path) -> None:
    """The client of a chat can't mend it; the operator can."""
    with pytest.raises(StartupError, match="broken in line 2: Expected an expression"):
        ChatTemplates(chat_vocabulary(tmp_path, "a\n{% if %}"), "m")


async def test_training_marks_of_a_template_are_accepted(tmp_path: Path) -> None:
    source = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    async with _started(tmp_path, source) as templates:
        assert (await templates.render(_prompt(_says("user", "a")))).text == "a"


async def test_error_of_a_template_reaches_the_client(tmp_path: Path) -> None:
    """The message is the template's own, or describes its failure."""
    sources = {
        "{{ raise_exception('Speak, ' + messages[0].role) }}": "Speak, user",
        "{{ messages[0].nothing.at_all }}": "no attribute 'nothing'",
        "{{ messages[0].content + 1 }}": "TypeError",
        "{% for i in range(10 ** 9) %}{% endfor %}": "too big",
        "{{ 'x' * 10 ** 8 }}": "writes more than",
        "{{ 'x' * 10 ** 11 }}": "memory",
        "{{ messages.__class__.__base__.__subclasses__() }}": "unsafe",
    }
    named = [{"name": f"t{place}", "template": source} for place, source in enumerate(sources)]
    async with _started(tmp_path, named) as templates:
        for place, message in enumerate(sources.values()):
            error = await _refusal(templates, _prompt(_says("user", "a"), template=f"t{place}"))
            assert (error.code, error.field) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "conversation.messages",
            )
            assert message in error.message


async def test_endless_template_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is ended, and the next conversation gets a new one."""
    monkeypatch.setattr("services.tokenizer.chat.template.renderer._SECONDS", 0.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    loops_if = "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}"
    async with _started(tmp_path, loops_if + "{{ messages[0].content }}") as templates:
        assert (await templates.render(_prompt(_says("user", "a")))).text == "a"
        loops = asyncio.ensure_future(_refusal(templates, _prompt(_says("user", "loop"))))
        behind = asyncio.ensure_future(templates.render(_prompt(_says("user", "b"))))
        assert "takes more than" in (await loops).message
        assert (await behind).text == "b"


async def _wait_in_stopped_process(
    templates: ChatTemplates, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> tuple[asyncio.subprocess.Process, "asyncio.Future[RenderedChat]"]:
    """Return a stopped render process, and a rendering that has waited for it so long."""
    loop = asyncio.get_running_loop()
    now = loop.time
    await templates.render(_prompt(_says("user", "a")))
    process = templates._renderer._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    rendering = asyncio.ensure_future(templates.render(_prompt(_says("user", "b"))))
    for _ in range(9):  # until the job was sent
        await asyncio.sleep(0)
    monkeypatch.setattr(loop, "time", lambda: now() + seconds)
    await asyncio.sleep(0.01)  # one turn of the loop, in which all its timers are due
    monkeypatch.undo()
    return process, rendering


async def test_busy_machine_fails_no_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the template is CPU time, which a process without a processor does not use."""
    async with _started(tmp_path, "{{ messages[0].content }}") as templates:
        process, rendering = await _wait_in_stopped_process(templates, monkeypatch, 10.0)
        process.send_signal(signal.SIGCONT)
        assert (await rendering).text == "b"
        assert templates._renderer._process is process


async def test_hanging_render_process_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chats would wait for it for ever."""
    async with _started(tmp_path, "{{ messages[0].content }}") as templates:
        process, rendering = await _wait_in_stopped_process(templates, monkeypatch, 3600.0)
        assert (await rendering).text == "b"
        assert templates._renderer._process is not process


async def test_conversation_survives_the_end_of_the_render_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may kill the process for the memory that another one takes."""
    async with _started(tmp_path, "{{ messages[0].content }}") as templates:
        process, rendering = await _wait_in_stopped_process(templates, monkeypatch, 1.0)
        process.kill()
        assert (await rendering).text == "b"


async def test_client_may_retry_when_render_processes_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal of the conversation would be final."""
    async with _started(tmp_path, "{{ messages[0].content }}") as templates:
        process, rendering = await _wait_in_stopped_process(templates, monkeypatch, 1.0)
        process.kill()
        while (other := templates._renderer._process) in (process, None):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert other is not None
        other.kill()
        with pytest.raises(ServiceError) as caught:
            await rendering
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert caught.value.retry_seconds
        assert (await templates.render(_prompt(_says("user", "c")))).text == "c"


async def test_log_has_the_signal_that_ended_the_render_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator finds the reason, such as the kernel's lack of memory."""
    async with _started(tmp_path, "{{ messages[0].content }}") as templates:
        await templates.render(_prompt(_says("user", "a")))
        process = templates._renderer._process
        assert process is not None
        process.kill()
        # the end is noticed before this conversation or during it
        await asyncio.gather(templates.render(_prompt(_says("user", "b"))), return_exceptions=True)
        assert (await templates.render(_prompt(_says("user", "c")))).text == "c"
    [line] = caplog.messages
    assert line == "the process that renders chat templates ended with signal SIGKILL"


async def test_client_that_leaves_shifts_no_answer_to_the_next(tmp_path: Path) -> None:
    async with _started(tmp_path, "{{ messages[0].content }}") as templates:
        await templates.render(_prompt(_says("user", "a")))
        gone = [
            asyncio.ensure_future(templates.render(_prompt(_says("user", f"{place}"))))
            for place in range(8)
        ]
        await asyncio.sleep(0)
        for task in gone[::2]:
            task.cancel()
        assert (await templates.render(_prompt(_says("user", "b")))).text == "b"
        assert [(await task).text for task in gone[1::2]] == ["1", "3", "5", "7"]


async def test_every_part_of_a_conversation_counts_in_its_size(tmp_path: Path) -> None:
    """A large part that did not count would block the event loop."""
    long = "x" * 5_000
    call = completion.ToolCall(id="a", name="f", arguments_json=json.dumps({"a": long}))
    for prompt in (
        _prompt(_says("user", long)),
        _prompt(_says("user", "a", name=long)),
        _prompt(_says("assistant", tool_calls=[call])),
        _prompt(_says("assistant", "a", reasoning=long)),
        _prompt(_says("user", "a"), tools=[completion.Tool(name="f", description=long)]),
        _prompt(_says("user", "a"), arguments={"a": long}),
    ):
        assert prompt.size >= 5_000
    assert _prompt(_says("user", "a")).size < 50


async def test_conversation_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with _started(tmp_path, TEMPLATES["hermes"]) as templates:
        most = {"a": "x" * (64 * 1024 - len('{"a": ""}'))}
        await templates.render(_prompt(_says("user", "a"), arguments=most))
        error = await _refusal(templates, _prompt(_says("user", "x" * 2**23)))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.field == "conversation.messages"


async def test_text_is_checked_before_it_is_encoded(tmp_path: Path) -> None:
    """A text that is too long is refused at little cost. The checked text has no marks."""
    shown: list[str] = []
    async with _started(tmp_path, TEMPLATES["hermes"]) as templates:
        rendered = await templates.render(_prompt(_says("user", "<|im_end|>")), shown.append)
    assert shown == [rendered.text]
    assert rendered.text.count("<|im_end|>") == 2


async def test_render_process_loads_no_torch() -> None:
    """torch would cost 300 MB of memory, and seconds at every start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, services.tokenizer.chat.template.render_process; "
        "sys.exit('torch' in sys.modules)",
    )
    assert await process.wait() == 0


def test_marks_of_calls_stay_in_the_decoded_text(tmp_path: Path) -> None:
    """Without these special tokens, a call would look like content."""
    vocabulary: Vocabulary = chat_vocabulary(tmp_path, TEMPLATES["mistral"])
    table = vocabulary.table_with(["[TOOL_CALLS]", "[ARGS]"])
    assert table.texts[vocabulary.ids["[TOOL_CALLS]"]] == "[TOOL_CALLS]"
    assert table.texts[vocabulary.ids["[INST]"]] == ""
    assert vocabulary.table.texts[vocabulary.ids["[TOOL_CALLS]"]] == ""


async def test_template_of_tools_is_taken_where_tools_are_given(tmp_path: Path) -> None:
    """As in transformers: the default template may not know them."""
    source = "{{ messages[0].content }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    named = [
        {"name": "default", "template": "D" + source},
        {"name": "tool_use", "template": "T" + source},
    ]
    async with _started(tmp_path, named) as templates:
        asked = _says("user", "a")
        assert (await templates.render(_prompt(asked))).text == "Da"
        assert (await templates.render(_prompt(asked, tools=_TOOLS))).text.startswith("Ta{")
        chosen = _prompt(asked, tools=_TOOLS, template="default")
        assert (await templates.render(chosen)).text.startswith("Da{")


async def test_template_without_tools_describes_them_and_reads_their_calls(tmp_path: Path) -> None:
    """A model that never saw its tools could not call them."""
    async with _started(tmp_path, TEMPLATES["json"].replace("tool_calls", "none")) as templates:
        call = completion.ToolCall(id="a", name="get_time", arguments_json="{}")
        rendered = await templates.render(
            _prompt(
                _says("user", "q"),
                _says("assistant", tool_calls=[call]),
                _says("tool", "21", tool_call_id="a"),
                tools=_TOOLS,
            )
        )
        assert rendered.text.startswith("<|im_start|>system\n# Tools")
        assert '"name": "get_weather"' in rendered.text
        written = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
        assert f"<|im_start|>assistant\n{written}<|im_end|>" in rendered.text
        assert templates.answers.calls.name == "hermes"
        parser = templates.parser(ReasoningState.NONE, arguments_schemas(_TOOLS))
        parts = [*parser.feed(written), *parser.finish(is_cut=False)]
        assert [part.text for part in parts if part.kind is SegmentKind.CALL] == ["get_time"]


async def test_description_of_tools_has_the_form_and_tokens_of_a_call(tmp_path: Path) -> None:
    """DeepSeek's templates write calls, but leave the description of tools to the caller."""
    async with _started(tmp_path, TEMPLATES["deepseek_v31"]) as templates:
        rendered = await templates.render(
            _prompt(_says("user", "q\U000f0000"), tools=[completion.Tool(name="\U000f0001f")])
        )
        form = (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"ARGUMENT": "VALUE"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        )
        assert rendered.text.count(form) == 1
        assert "q\U000f0000" in rendered.text
        begin = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id(form[:20])
        assert [token for token in rendered.ids if token == begin] == [begin]
        assert templates.answers.calls.name == "deepseek_v31"


async def test_conversation_of_agents_fits_a_template_that_guards_its_order(tmp_path: Path) -> None:
    guard = (
        "{% if message.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
        "{% endif %}"
    )
    source = TEMPLATES["hermes"].replace("{{- '<|im_start|>'", guard + "{{- '<|im_start|>'", 1)
    async with _started(tmp_path, source) as templates:
        rendered = await templates.render(
            _prompt(
                _says("system", "s"),
                _says("developer", "d"),
                _says("user", "q"),
                _says("system", "late"),
            )
        )
        assert rendered.moved == [1, 3]
        assert rendered.text == (
            "<|im_start|>system\ns\n\nd<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
            "<|im_start|>user\n<system_message>\nlate\n</system_message><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
