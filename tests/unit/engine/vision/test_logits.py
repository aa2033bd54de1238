"""Prompts with images: every family's log-probabilities equal transformers'.

The engine gets what the image encoder makes of files. A test runs whole prompts through the step
loop, so that chunks, cached prefixes and several requests at once see the same images.
"""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.common.images import decode
from services.engine.batch.step_batch import StepBatch
from services.engine.checked_request import PlacedImage
from services.engine.engine import Engine, Generation
from services.engine.execution import loaded_model
from services.engine.execution.model_runner import StepCapacity
from services.engine.execution.step_graphs import StepGraphs
from services.engine.frontend.image_client import ClientImage
from services.engine.frontend.image_placement import place_images
from services.engine.messages import Output, RequestDone, Score, ScoredPrompt, Token
from services.engine.model.loader import load_spec
from services.engine.settings import EngineSettings
from services.engine.vision.encoder import ImageEncoder
from services.engine.vision.encoder_process import encoded
from tests.unit.engine.checkpoints.shapes import VOCABULARY
from tests.unit.engine.vision_checkpoints import (
    IMAGE_TOKEN,
    VISION_MODELS,
    inputs,
    make_vision_checkpoint,
    png,
)
from tokenwire.pb.engine.v1.engine_pb2 import PromptImage

GENERATED = 6
BEGIN, END = 91, 92
"""Ids around an image, as most models have them"""
NONE: list[bytes] = []
ONE = [png(40, 40, 1)]
THREE = [png(70, 30, 2), png(30, 90, 3), png(40, 40, 1)]


class Models:
    """A checkpoint as transformers runs it, and as our engine does."""

    def __init__(self, name: str, directory: Path, max_step_tokens: int = 4_096) -> None:
        self.processor = VISION_MODELS[name].processor
        self.theirs: PreTrainedModel = make_vision_checkpoint(directory, name)
        self._encoder = ImageEncoder.load(directory, torch.float32, torch.device("cpu"))
        self.engine = Engine(
            directory,
            EngineSettings(
                dtype="float32",
                device="cpu",
                kv_memory="16MiB",
                max_step_tokens=max_step_tokens,
            ),
        )

    def prompt(self, files: Sequence[bytes], text: int = 7) -> tuple[list[int], list[PlacedImage]]:
        """Return ids with text before, between and behind the images, and where they lie."""
        images = [
            ClientImage(file[-12:] + file[60:64], encoded(features))
            for file, features in zip(files, self._encoder.encode(files), strict=True)
        ]
        ids = list(range(3, 3 + text))
        for index, image in enumerate(images):
            count = image.encoded.num_tokens  # type: ignore[union-attr]
            ids += [BEGIN, *[IMAGE_TOKEN] * count, END, *range(20 + index, 24 + index)]
        requested = [PromptImage(prompt=0) for _ in files]
        placed = place_images([ids], requested, images, IMAGE_TOKEN, consecutive=False)
        return ids, placed.get(0, [])

    @torch.no_grad()
    def expected(self, ids: list[int], files: Sequence[bytes]) -> Tensor:
        """Return transformers' log-probabilities, float32 [ids, vocabulary]."""
        whole: Any = self.theirs
        tokens = torch.tensor([ids])
        kinds = (tokens == IMAGE_TOKEN).int()
        given: dict[str, Tensor] = {}
        if files:
            given = inputs(self.processor, [[decode(file) for file in files]])
            match whole.config.model_type.partition("_")[0]:
                case "gemma3":
                    given["token_type_ids"] = kinds
                case "gemma4" | "glm4v" | "glm46v" | "glm" | "qwen2" | "qwen3":
                    given["mm_token_type_ids"] = kinds
        if whole.config.model_type == "gemma4_unified":
            # forward lets images see ahead in all layers, unlike Google's code, and unlike these
            given["attention_mask"] = whole.create_masks_for_generate(
                config=whole.config,
                inputs_embeds=torch.empty(1, len(ids), 0),
                attention_mask=None,
                cache=None,
                position_ids=None,
                mm_token_type_ids=given.get("mm_token_type_ids"),
            )
        logits: Tensor = whole(input_ids=tokens, **given).logits[0]
        return logits.log_softmax(-1)


@pytest.fixture(scope="module", params=VISION_MODELS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("files", [NONE, ONE, THREE], ids=["none", "one", "three"])
def test_log_probabilities_equal_those_of_transformers(models: Models, files: list[bytes]) -> None:
    ids, images = models.prompt(files)
    answer = generate(models.engine, ids, images)
    compare(answer.prompt_scores, models.expected(ids, files)[:-1])
    compare_output(models, ids, answer, files)


def test_images_matter(models: Models) -> None:
    """Guards the other tests: with weights that ignored images, all of them would pass."""
    one, other = ([png(40, 40, seed)] for seed in (5, 6))
    first, second = (
        models.expected(ids, files)[-1]
        for files in (one, other)
        for ids in (models.prompt(files)[0],)
    )
    assert (first - second).abs().max() > 0.01


def test_cached_prefix_with_the_same_images_changes_nothing(models: Models) -> None:
    ids, images = models.prompt(THREE, text=40)
    first = generate(models.engine, ids, images, scores_prompt=False)
    again = generate(models.engine, ids, images, scores_prompt=False)
    assert first.token_ids == again.token_ids
    compare_output(models, ids, again, THREE)


def test_other_images_on_the_same_ids_are_computed_anew(models: Models) -> None:
    """Equal ids with another picture must not find the first one's blocks."""
    one, other = [png(40, 40, 11)], [png(40, 40, 12)]
    ids, images = models.prompt(one, text=40)
    generate(models.engine, ids, images, scores_prompt=False)
    same_ids, others = models.prompt(other, text=40)
    assert same_ids == ids
    answer = generate(models.engine, ids, others, scores_prompt=False)
    compare_output(models, ids, answer, other)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", VISION_MODELS)
def test_chunks_and_neighbors_change_nothing(
    name: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts are computed over several steps, beside other requests with other images.

    padded: pad steps as on a GPU, where those with image tokens run as they are only if images see
    ahead.
    """
    padded_steps: list[StepBatch] = []
    run_graph = StepGraphs.run

    def note_run(graphs: StepGraphs, batch: StepBatch) -> Tensor:
        assert not batch.images, "graphs hold images in memory that is reserved"
        padded_steps.append(batch)
        return run_graph(graphs, batch)

    if padded:
        capacity = StepCapacity(tokens=64, sequences=8, blocks=64)
        monkeypatch.setattr(loaded_model, "graph_capacity", lambda *_: capacity)
        monkeypatch.setattr(StepGraphs, "run", note_run)
    models = Models(name, tmp_path, max_step_tokens=24)
    prompts = [(files, *models.prompt(files, text=17)) for files in (THREE, NONE, ONE)]
    handles = [
        models.engine.submit(
            ids,
            images=images,
            max_tokens=GENERATED,
            temperature=0,
            ignore_eos=True,
            logprobs=VOCABULARY,
        )
        for _, ids, images in prompts
    ]
    answers = run(models.engine, handles)
    for (files, ids, _), answer in zip(prompts, answers, strict=True):
        compare_output(models, ids, answer, files)
    assert any(batch.is_decode for batch in padded_steps) == padded, "images stay in the graphs"
    if padded:
        has_images = any(_has_images(batch) for batch in padded_steps)
        sees_ahead = load_spec(tmp_path).images_see_ahead
        assert has_images != sees_ahead, "prompts with images run as graphs"


def _has_images(batch: StepBatch) -> bool:
    staged = batch.staged_images
    return staged is not None and bool(staged.are_images.any())


def generate(
    engine: Engine, ids: list[int], images: list[PlacedImage], *, scores_prompt: bool = True
) -> Generation:
    return engine.generate(
        ids,
        images=images,
        max_tokens=GENERATED,
        temperature=0,
        ignore_eos=True,
        logprobs=VOCABULARY,
        prompt_logprobs=VOCABULARY if scores_prompt else None,
    )


def run(engine: Engine, handles: list[int]) -> list[Generation]:
    """Run requests side by side to their ends."""
    answers = {handle: Generation() for handle in handles}
    unfinished = set(handles)
    while unfinished:
        for output in engine.step():
            _add(output, answers)
            if isinstance(output, RequestDone):
                unfinished.remove(output.handle)
    return list(answers.values())


def _add(output: Output, answers: dict[int, Generation]) -> None:
    match output:
        case Token(score=Score() as score):
            answers[output.handle].token_ids.append(output.id)
            answers[output.handle].scores.append(score)
        case ScoredPrompt():
            answers[output.handle].prompt_scores += output.scores


def compare_output(
    models: Models, ids: list[int], answer: Generation, files: Sequence[bytes]
) -> None:
    """Compare the scores of generated tokens, up to an image token, which transformers refuses."""
    output = list(takewhile(lambda token: token != IMAGE_TOKEN, answer.token_ids))
    expected = models.expected([*ids, *output], files)[len(ids) - 1 :]
    scores = answer.scores[: len(output) + 1]
    compare(scores, expected[: len(scores)])


def compare(scores: Sequence[Score], expected: Tensor) -> None:
    """Compare all log-probabilities, to 1e-3."""
    found = torch.empty_like(expected)
    assert len(scores) == len(found)
    for row, score in zip(found, scores, strict=True):
        row[list(score.top_ids)] = torch.tensor(score.top_logprobs)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
