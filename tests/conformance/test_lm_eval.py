"""Scores of lm-evaluation-harness through the stack, against transformers.

The harness does not check the alignment of logprobs: a shift by one token gives plausible, wrong
scores. So the tests compute every number that it reads again with transformers.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.stack import Stack

TASKS = Path(__file__).parent / "lm_eval"
WINDOW = 256  # tokens; shorter than the longest text, so that the harness cuts it into windows
TOLERANCE = 1e-3  # of the log-likelihood of one request, in nats

Samples = list[dict[str, Any]]
Evaluate = Callable[..., Samples]


class Reference:
    """The embedded model in transformers, in float32."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]

    @property
    def prefix(self) -> int:
        """Token id that the harness puts before a text without context."""
        bos = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if bos is None else bos)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def loglikelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the continuation's log-likelihood in nats, and True if it is greedy."""
        ids = torch.tensor([context + continuation])
        logprobs = self.model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        chosen = ids[0, len(context) :]
        is_greedy = bool((logprobs.argmax(-1) == chosen).all())
        return float(logprobs.gather(1, chosen[:, None]).double().sum()), is_greedy

    def rolling(self, text: str, window: int) -> float:
        """Return a text's log-likelihood in nats, with the harness's context for each window."""
        ids = self.encode(text)
        total = self.loglikelihood([self.prefix], ids[:window])[0]
        done = min(window, len(ids))
        while done < len(ids):
            new = ids[done : done + window]
            end = done + len(new)
            context = ids[end - window - 1 : done]
            total += self.loglikelihood(context, new)[0]
            done = end
        return total

    def generate(self, text: str, tokens: int, until: list[str]) -> str:
        """Return the greedy continuation up to the first stop string."""
        return self._generate(self.encode(text), tokens, until)

    def answer(self, text: str, tokens: int, until: list[str]) -> str:
        """Return the greedy answer to a message up to the first stop string."""
        messages = [{"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self._generate(self.encode(prompt), tokens, until)

    @torch.no_grad()
    def _generate(self, prompt: list[int], tokens: int, until: list[str]) -> str:
        ids = torch.tensor([prompt])
        out = self.model.generate(ids, max_new_tokens=tokens, do_sample=False)
        answer = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return min((str(answer.split(stop)[0]) for stop in until), key=len)


@pytest.fixture(scope="module")
def reference(embedded_model: Path) -> Reference:
    return Reference(embedded_model)


@pytest.fixture(scope="module")
def evaluate(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluate]:
    """Return a function that runs a task through the stack and returns the harness's samples."""
    here = os.getcwd()
    os.chdir(TASKS)  # The tasks' data paths are relative to this directory.
    cache = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(cache))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        import datasets
        from lm_eval.api.registry import get_model
        from lm_eval.evaluator import evaluate as run_tasks
        from lm_eval.tasks import TaskManager

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        manager = TaskManager(include_path=str(TASKS), include_defaults=False)

        def run(task: str, *, chat: bool = False, **model_args: object) -> Samples:
            if chat:
                model = get_model("local-chat-completions")(
                    model=stack.model_id, base_url=f"{stack.url}/v1/chat/completions", max_retries=1
                )
                return scored(model, task, apply_chat_template=True)
            shared = {
                "model": stack.model_id,
                "base_url": f"{stack.url}/v1/completions",
                "tokenizer": str(stack.model),
                "tokenizer_backend": "huggingface",
                "max_length": WINDOW
                + 2,  # the harness keeps one token for context and one to generate
                "num_concurrent": 4,
                "max_retries": 1,
            }
            return scored(get_model("local-completions")(**(shared | model_args)), task)

        def scored(model: Any, task: str, **how: Any) -> Samples:
            tasks = manager.load([task])
            results = run_tasks(model, tasks, bootstrap_iters=0, log_samples=True, **how)
            samples: Samples = results["samples"][task]
            return samples

        yield run
    os.chdir(here)


@pytest.fixture(scope="module")
def generated(reference: Reference) -> dict[str, str]:
    """Greedy continuations of the generation task's prompts."""
    lines = (TASKS / "generate.jsonl").read_text().splitlines()
    prompts = [str(json.loads(line)["code"]) for line in lines]
    return {prompt: reference.generate(prompt, 16, ["\n\n", "\ndef "]) for prompt in prompts}


BACKENDS = [
    pytest.param({}, id="ids"),
    pytest.param({"tokenized_requests": False}, id="text"),
    pytest.param(
        {"tokenizer_backend": "auto", "tokenizer": None, "model": "default"}, id="nothing-local"
    ),
    pytest.param({"batch_size": 4}, id="batched"),
]


@pytest.mark.parametrize("model_args", BACKENDS)
def test_multiple_choice_log_likelihoods_equal_those_of_transformers(
    evaluate: Evaluate, reference: Reference, model_args: dict[str, object]
) -> None:
    samples = evaluate("tokenwire_choice", **model_args)
    assert len(samples) == 6
    for sample in samples:
        for (context, continuation), answer in zip(
            sample["arguments"], sample["filtered_resps"], strict=True
        ):
            ids = reference.encode(context.rstrip())  # The harness moves spaces over, too.
            following = reference.encode(context + continuation)[len(ids) :]
            expected, is_greedy = reference.loglikelihood(ids, following)
            assert answer[0] == pytest.approx(expected, abs=TOLERANCE), (context, continuation)
            assert answer[1] == is_greedy


@pytest.mark.parametrize("model_args", BACKENDS)
def test_rolling_log_likelihoods_equal_those_of_transformers(
    evaluate: Evaluate, reference: Reference, model_args: dict[str, object]
) -> None:
    samples = evaluate("tokenwire_rolling", **model_args)
    texts = [sample["doc"]["text"] for sample in samples]
    assert any(len(reference.encode(text)) > 2 * WINDOW for text in texts)
    for sample, text in zip(samples, texts, strict=True):
        (answer,) = sample["filtered_resps"]
        windows = -(-len(reference.encode(text)) // WINDOW)  # one request per window
        expected = reference.rolling(text, WINDOW)
        assert answer == pytest.approx(expected, abs=windows * TOLERANCE), text


@pytest.mark.parametrize("model_args", BACKENDS)
def test_generated_texts_equal_those_of_transformers(
    evaluate: Evaluate, generated: dict[str, str], model_args: dict[str, object]
) -> None:
    samples = evaluate("tokenwire_generate", **model_args)
    answers = {sample["doc"]["code"]: sample["filtered_resps"] for sample in samples}
    assert answers == {prompt: [text] for prompt, text in generated.items()}


def test_chat_answers_equal_those_of_transformers(evaluate: Evaluate, reference: Reference) -> None:
    """The server applies the chat template. transformers applies it for the reference."""
    samples = evaluate("tokenwire_generate", chat=True)
    for sample in samples:
        code = sample["doc"]["code"]
        expected = reference.answer(code, 16, ["\n\n", "\ndef "])
        assert sample["filtered_resps"] == [expected], code
