"""Output of a completion: events of the engine in, responses out."""

from services.tokenizer.completion.completion_output import CompletionOutput
from services.tokenizer.completion.plan import plan_prompts
from services.tokenizer.completion.prompt_processor import PromptProcessor
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2 as types


def _scores(prompt: int, ids: list[int]) -> engine_pb2.PromptScores:
    columns = types.TokenColumns(ids=ids, logprobs=[-1.0] * len(ids), ranks=[1] * len(ids))
    return engine_pb2.PromptScores(prompt=prompt, position=1, tokens=columns)


def test_scores_repeated_after_a_resubmission_echo_a_prompt_once(
    byte_level_vocabulary: Vocabulary,
) -> None:
    """The engine scores all prompts again if one of them was not complete at its loss."""
    request = completion.GenerateRequest(
        prompts=completion.Prompts(
            items=[completion.Prompt(token_ids=types.TokenIds(ids=[3, 4, 5]))] * 2
        ),
        echo=True,
        logprobs=0,
        stopping=types.StoppingParams(max_tokens=0),
    )
    reader = ImageReader(None, byte_level_vocabulary, "m")
    processor = PromptProcessor(request, byte_level_vocabulary, None, reader)
    limits = ModelLimits("m", "fp_0", 64, 99, frozenset(), frozenset(), 5, 20, 128, 16, True)
    output = CompletionOutput(plan_prompts(request, byte_level_vocabulary, None, limits), 0.0)
    responses: list[completion.GenerateResponse] = []

    def add() -> completion.GenerateResponse:
        responses.append(completion.GenerateResponse())
        return responses[-1]

    for scores in (_scores(0, [4, 5]), _scores(0, [4, 5]), _scores(1, [4, 5])):
        output.add_prompt_scores(scores)
        assert not output.write(processor, add, lambda: False)
    assert [response.delta.index for response in responses if response.delta.is_prompt] == [0, 1]
