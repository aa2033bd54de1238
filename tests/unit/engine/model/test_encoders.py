"""Encoders and poolings against transformers and sentence-transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    EuroBertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GteConfig,
    JinaEmbeddingsV3Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from services.engine.engine import Engine
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import load_spec
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.images import IMAGES
from tests.unit.engine.checkpoints.shapes import SHAPE, WIDE

ENCODER: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
ENCODERS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**ENCODER),
    "roberta": RobertaConfig(**ENCODER | {"pad_token_id": 1}),
    "xlm roberta": XLMRobertaConfig(**ENCODER | {"pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": ModernBertConfig(**ENCODER, local_attention=8),
    "modernbert, biases": ModernBertConfig(
        **ENCODER, local_attention=8, attention_bias=True, mlp_bias=True, norm_bias=True
    ),
    "nomic": NomicBertConfig(**ENCODER),
    "mpnet": MPNetConfig(**ENCODER | {"pad_token_id": 1, "max_position_embeddings": 180}),
    "distilbert": DistilBertConfig(**ENCODER),
    "deberta v2": DebertaV2Config(
        **ENCODER,
        relative_attention=True,
        pos_att_type="c2p|p2c",
        max_relative_positions=40,
        type_vocab_size=2,
    ),
    "deberta v2, keys of distances": DebertaV2Config(
        **ENCODER | {"relative_attention": True, "pos_att_type": ["c2p"], "position_buckets": 14}
    ),
    "deberta v3": DebertaV2Config(
        **ENCODER
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "position_buckets": 16,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
        }
    ),
    "jina v3": JinaEmbeddingsV3Config(**ENCODER | {"pad_token_id": 1}),
    "gte": GteConfig(**ENCODER | {"pad_token_id": 1}),
    "gte, no token types": GteConfig(**ENCODER, type_vocab_size=0),
    "eurobert": EuroBertConfig(**WIDE),
    "qwen2, not causal": Qwen2Config(**SHAPE | {"is_causal": False}),
    "mistral, not causal": MistralConfig(**WIDE | {"is_causal": False}, sliding_window=11),
    "gemma2, not causal": Gemma2Config(**WIDE | {"is_causal": False}, sliding_window=11),
    "embeddinggemma": Gemma3TextConfig(
        **WIDE,
        sliding_window=14,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_bidirectional_attention=True,
    ),
}
DECODERS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**WIDE),
    "qwen2": Qwen2Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=11),
}
CLASSIFIERS: dict[str, PreTrainedConfig] = {
    **DECODERS,
    "llama": LlamaConfig(**SHAPE),
    "gemma2": Gemma2Config(**WIDE, sliding_window=11),
    "qwen2, not causal": Qwen2Config(**SHAPE | {"is_causal": False}),
}
LENGTHS = (1, 2, 5, 33, 64, 100)
FAR = 175
"""Tokens of a text that MPNet's farthest distance lies within"""


def settings(**changes: Any) -> EngineSettings:
    base = EngineSettings(dtype="float32", kv_memory="64MiB", max_running=16, device="cpu")
    return replace(base, **changes)


def texts(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 97, (n,), generator=generator).tolist() for n in LENGTHS]


def save_model(path: Path, config: PreTrainedConfig, kind: Any = AutoModel) -> Any:
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    # biases and norms begin as zeros and ones, which would hide a mistake
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


def hidden_states(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        states: Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


def save_tokenizer(path: Path) -> None:
    words = {"[UNK]": 3, **{f"w{i}": i for i in range(97) if i != 3}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="w0"
    ).save_pretrained(path)


@pytest.mark.parametrize("family", ENCODERS)
def test_encoder_equals_transformers(family: str, tmp_path: Path) -> None:
    """The mean of all hidden states, of texts of many lengths in one step."""
    model = save_model(tmp_path, ENCODERS[family])
    with Engine(tmp_path, settings()) as engine:
        vectors = engine.embed(texts())
    expected = torch.stack([hidden_states(model, ids).mean(dim=0) for ids in texts()])
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_token_states_equal_transformers(family: str, tmp_path: Path) -> None:
    """Also of prompts that take several steps, or that the prefix cache has."""
    model = save_model(tmp_path, {**ENCODERS, **DECODERS}[family])
    steps = {} if family in ENCODERS else {"pooling": "last", "max_step_tokens": 16}
    with Engine(tmp_path, settings(**steps)) as engine:
        vectors = engine.embed(texts())
        found = [engine.token_vectors(texts()) for _ in range(2)]
        torch.testing.assert_close(engine.embed(texts()), vectors, atol=1e-6, rtol=1e-5)
    for states in found:
        for ids, state in zip(texts(), states, strict=True):
            expected = hidden_states(model, ids)
            torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-5)


def save_token_modules(path: Path, **values: Any) -> torch.nn.Linear:
    """Let a checkpoint make vectors of tokens, as PyLate saves them."""
    projection = torch.nn.Linear(64, 24, bias=False)
    (path / "1_Dense").mkdir()
    config = {"in_features": 64, "out_features": 24, "bias": False, **values}
    (path / "1_Dense/config.json").write_text(json.dumps(config))
    save_file({"linear.weight": projection.weight.detach()}, path / "1_Dense/model.safetensors")
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    listed = [{"type": kind, "path": place} for place, kind in kinds.items()]
    (path / "modules.json").write_text(json.dumps(listed))
    return projection


UNATTENDED = {1: 1, 2: 3, 3: 2, 4: 2, 5: 4}
"""By index of a text, tokens at its end to which no token attends"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["bert", "modernbert", "mpnet", "nomic", "qwen3", "qwen2, not causal"]
)
def test_tokens_alone_have_vectors(family: str, dtype: str, tmp_path: Path) -> None:
    """As ColBERT's: projected, of length 1, of queries with masks to which no token attends."""
    model = save_model(tmp_path, {**ENCODERS, **DECODERS}[family])
    projection = save_token_modules(tmp_path)
    hidden = {} if family == "qwen3" else UNATTENDED
    with Engine(tmp_path, settings(dtype=dtype)) as engine:
        assert (engine.model.vector_width, engine.model.token_width) == (0, 24)
        found = engine.token_vectors(texts(), hidden)
        raw = engine.token_vectors(texts(), hidden, is_raw=True)
    for index, ids in enumerate(texts()):
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        mask[0, len(ids) - hidden.get(index, 0) :] = 0
        with torch.no_grad():
            inputs = {"input_ids": torch.tensor([ids]), "attention_mask": mask}
            expected = projection(model(**inputs).last_hidden_state[0])
        unit = torch.nn.functional.normalize(expected)
        if dtype == "float32":
            torch.testing.assert_close(raw[index], expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found[index], unit, atol=1e-5, rtol=1e-4)
        assert torch.cosine_similarity(found[index], unit, dim=1).min() > 0.98


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["modernbert", "mistral, not causal"])
def test_tokens_attend_to_none_where_their_window_is_hidden(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """ColBERT's masks behind a short query may be more than a window of the layers has."""
    model = save_model(tmp_path, ENCODERS[family])
    save_token_modules(tmp_path)
    hidden = {3: 30, 4: 50, 5: 95}
    with Engine(tmp_path, settings(dtype=dtype)) as engine:
        found = engine.token_vectors(texts(), hidden)
    projection = load_file(tmp_path / "1_Dense/model.safetensors")["linear.weight"]
    for index, ids in enumerate(texts()):
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        mask[0, len(ids) - hidden.get(index, 0) :] = 0
        with torch.no_grad():
            states = model(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
        unit = torch.nn.functional.normalize(states @ projection.T)
        if dtype == "float32":
            torch.testing.assert_close(found[index], unit, atol=1e-5, rtol=1e-4)
        assert torch.cosine_similarity(found[index], unit, dim=1).min() > 0.98


def test_projection_may_be_added_to_its_input(tmp_path: Path) -> None:
    model = save_model(tmp_path, ENCODERS["bert"])
    projection = save_token_modules(tmp_path, use_residual=True)
    residual = torch.randn(24, 64)
    tensors = {"linear.weight": projection.weight.detach(), "residual.weight": residual}
    save_file(tensors, tmp_path / "1_Dense/model.safetensors")
    with Engine(tmp_path, settings()) as engine:
        [found] = engine.token_vectors(texts()[3:4], is_raw=True)
    with torch.no_grad():
        states = hidden_states(model, texts()[3])
        expected = projection(states) + states @ residual.T
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_colbert_has_its_projection_beside_its_encoder(tmp_path: Path) -> None:
    config = BertConfig(**ENCODER)
    model = save_model(tmp_path, config)
    projection = torch.randn(24, 64)
    tensors = {f"bert.{name}": each for name, each in model.state_dict().items()}
    save_file({**tensors, "linear.weight": projection}, tmp_path / "model.safetensors")
    _change("config.json", architectures=["HF_ColBERT"])(tmp_path)
    with Engine(tmp_path, settings()) as engine:
        found = engine.token_vectors(texts())
    for ids, vectors in zip(texts(), found, strict=True):
        expected = torch.nn.functional.normalize(hidden_states(model, ids) @ projection.T)
        torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-4)
    _change("config.json", model_type="xlm-roberta")(tmp_path)
    with pytest.raises(CheckpointError, match="HF_ColBERT is not supported"):
        Engine(tmp_path, settings())


@pytest.mark.parametrize(("strategy", "tied"), [("max", True), ("sum", False)])
@pytest.mark.parametrize("family", ["bert", "distilbert", "xlm roberta", "mpnet", "modernbert"])
def test_weights_of_the_vocabulary_equal_those_of_sentence_transformers(
    family: str, strategy: str, tied: bool, tmp_path: Path
) -> None:
    """SPLADE, from the head of a masked language model, whose weights may be the embedding's."""
    base, saved = tmp_path / "base", tmp_path / "saved"
    values = ENCODERS[family].to_dict() | {"tie_word_embeddings": tied}
    save_model(base, type(ENCODERS[family])(**values), AutoModelForMaskedLM)
    save_tokenizer(base)
    activation: Any = "relu" if tied else "log1p_relu"
    pooling = SpladePooling(strategy, activation)  # type: ignore[arg-type]
    encoder = SparseEncoder(
        modules=[Transformer(str(base), transformer_task="fill-mask"), pooling], device="cpu"
    )
    encoder.save(str(saved))
    words = [" ".join(f"w{i}" for i in ids) for ids in texts()]
    expected = encoder.encode(words, convert_to_sparse_tensor=False)
    with Engine(saved, settings()) as engine:
        assert engine.model.vector_width == 97
        vectors = engine.embed(texts())
    assert (vectors == 0).any()
    torch.testing.assert_close(vectors, torch.as_tensor(expected), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_raw_vectors_keep_their_length(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, {**ENCODERS, **DECODERS}[family])
    with Engine(tmp_path, settings(pooling="mean")) as engine:
        vectors = engine.embed(texts(), is_raw=True)
    expected = torch.stack([hidden_states(model, ids).mean(dim=0) for ids in texts()])
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)


def test_distances_beyond_the_farthest_are_alike(tmp_path: Path) -> None:
    model = save_model(tmp_path, ENCODERS["mpnet"])
    ids = torch.randint(4, 97, (FAR,), generator=torch.Generator().manual_seed(1)).tolist()
    with Engine(tmp_path, settings()) as engine:
        vectors = engine.embed([ids, ids[:5]])
    expected = torch.stack([hidden_states(model, each).mean(dim=0) for each in (ids, ids[:5])])
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ENCODERS)
def test_bfloat16_kernels_are_close(family: str, tmp_path: Path) -> None:
    """On a machine with tiled kernels they compute these shapes."""
    model = save_model(tmp_path, ENCODERS[family])
    with Engine(tmp_path, settings(dtype="bfloat16")) as engine:
        vectors = engine.embed(texts())
    expected = torch.stack([hidden_states(model, ids).mean(dim=0) for ids in texts()])
    similarity = torch.cosine_similarity(vectors, expected, dim=1)
    assert similarity.min() > 0.99


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_decoder_equals_transformers(family: str, pooling: str, tmp_path: Path) -> None:
    """In steps of 16 tokens, over which the hidden states of long prompts add up."""
    model = save_model(tmp_path, DECODERS[family])
    with Engine(tmp_path, settings(pooling=pooling, max_step_tokens=16)) as engine:
        vectors = engine.embed(texts())
        again = engine.embed(texts())
    states = [hidden_states(model, ids) for ids in texts()]
    pooled = [each[-1] if pooling == "last" else each.mean(dim=0) for each in states]
    expected = torch.nn.functional.normalize(torch.stack(pooled))
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


def test_texts_of_a_model_that_reads_images_have_the_mean_of_their_states(tmp_path: Path) -> None:
    """As Jina v4's checkpoints with a task's adapter in their weights, which are Qwen 2.5-VL."""
    model = make_checkpoint(tmp_path, IMAGES["qwen2.5 vl, tied"])
    with Engine(tmp_path, settings(pooling="mean", max_step_tokens=16)) as engine:
        vectors = engine.embed(texts())
    states = [hidden_states(model.model, ids).mean(dim=0) for ids in texts()]
    expected = torch.nn.functional.normalize(torch.stack(states))
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)


def test_jina_v4_is_refused_with_what_is_served_instead(tmp_path: Path) -> None:
    save_model(tmp_path, ENCODERS["bert"])
    _change("config.json", architectures=["JinaEmbeddingsV4Model"])(tmp_path)
    with pytest.raises(CheckpointError, match="jina-embeddings-v4-vllm-retrieval, with --pooling"):
        load_spec(tmp_path)


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_vectors_equal_those_of_sentence_transformers(mode: str, tmp_path: Path) -> None:
    """With everything that modules.json names behind the transformer."""
    base, saved = tmp_path / "base", tmp_path / "saved"
    save_model(base, ENCODERS["bert"])
    save_tokenizer(base)
    sentences = SentenceTransformer(
        modules=[
            Transformer(str(base)),
            modules.Pooling(64, mode),
            Dense(64, 24, activation_function=torch.nn.Tanh()),
            Normalize(),
        ],
        device="cpu",
    )
    sentences.save(str(saved))
    words = [" ".join(f"w{i}" for i in ids) for ids in texts()]
    expected = torch.as_tensor(sentences.encode(words))
    with Engine(saved, settings()) as engine:
        vectors = engine.embed(texts())
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_pooling_leaves_instructions_out(mode: str, family: str, tmp_path: Path) -> None:
    """As sentence-transformers does, for means even if nothing but the instruction is left."""
    if (mode, family) == ("cls", "qwen3"):
        pytest.skip("the first token of a decoder sees no other")
    model = save_model(tmp_path, {**ENCODERS, **DECODERS}[family])
    (tmp_path / "modules.json").write_text('[{"type": "x.Pooling", "path": "1_Pooling"}]')
    (tmp_path / "1_Pooling").mkdir()
    config = {"pooling_mode": mode, "include_prompt": False}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(config))
    lengths = dict(enumerate((0 if mode == "lasttoken" else 1, 1, 3, 0, 20, 37)))
    pooling = modules.Pooling(64, mode, include_prompt=False)
    expected = []
    for index, ids in enumerate(texts()):
        states = hidden_states(model, ids)[None]
        mask = torch.ones(1, len(ids))
        features: dict[str, Any] = {"token_embeddings": states, "attention_mask": mask}
        if lengths[index]:
            features["prompt_length"] = lengths[index]
        expected.append(pooling(features)["sentence_embedding"][0])
    with Engine(tmp_path, settings(max_step_tokens=128 if family == "bert" else 16)) as engine:
        vectors = engine.embed(texts(), instructions=lengths)
        alone = engine.embed(texts()[:1], instructions={0: lengths[0]})
    torch.testing.assert_close(vectors, torch.stack(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone, vectors[:1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        "bert",
        "roberta",
        "xlm roberta",
        "modernbert",
        "mpnet",
        "distilbert",
        "deberta v3",
        "jina v3",
        "gte",
        "eurobert",
    ],
)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_equal_those_of_transformers(family: str, labels: int, tmp_path: Path) -> None:
    config = type(ENCODERS[family])(**ENCODERS[family].to_dict() | {"num_labels": labels})
    model = save_model(tmp_path, config, AutoModelForSequenceClassification)
    with Engine(tmp_path, settings()) as engine:
        scores = engine.embed(texts())
        assert engine.model.has_scores
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in texts()])
    expected = logits.sigmoid() if labels == 1 else logits.softmax(dim=1)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_problem_type_decides_what_several_labels_mean(kind: str, tmp_path: Path) -> None:
    config = BertConfig(**ENCODER | {"num_labels": 3, "problem_type": kind})
    model = save_model(tmp_path, config, AutoModelForSequenceClassification)
    with Engine(tmp_path, settings()) as engine:
        scores = engine.embed(texts())
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in texts()])
    expected = logits if kind == "regression" else logits.sigmoid()
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_second_text_of_a_pair_has_its_own_type(tmp_path: Path) -> None:
    config = BertConfig(**ENCODER | {"num_labels": 1})
    model = save_model(tmp_path, config, AutoModelForSequenceClassification)
    ids = texts()[-2:]
    with Engine(tmp_path, settings()) as engine:
        scores = engine.embed(ids, {0: 20, 1: 50})
    expected = []
    for text, second in zip(ids, (20, 50), strict=True):
        types = torch.tensor([[0] * second + [1] * (len(text) - second)])
        with torch.no_grad():
            expected.append(model(input_ids=torch.tensor([text]), token_type_ids=types).logits)
    torch.testing.assert_close(scores, torch.cat(expected).sigmoid(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_decoder_with_a_head_scores(family: str, labels: int, tmp_path: Path) -> None:
    """Rewards are the logits of a single label."""
    values = CLASSIFIERS[family].to_dict() | {"pad_token_id": 0, "num_labels": labels}
    config = type(CLASSIFIERS[family])(**values)
    model = save_model(tmp_path, config, AutoModelForSequenceClassification)
    with Engine(tmp_path, settings(max_step_tokens=16)) as engine:
        scores = engine.embed(texts())
        rewards = engine.embed(texts(), is_raw=True)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in texts()])
    expected = logits.sigmoid() if labels == 1 else logits.softmax(dim=1)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rewards, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["bos", "mean"])
def test_head_of_eurobert_may_follow_the_pooling(pooling: str, tmp_path: Path) -> None:
    config = EuroBertConfig(**WIDE, classifier_pooling=pooling)
    model = save_model(tmp_path, config, AutoModelForSequenceClassification)
    with Engine(tmp_path, settings()) as engine:
        scores = engine.embed(texts(), is_raw=True)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in texts()])
    torch.testing.assert_close(scores, logits, atol=1e-5, rtol=1e-5)


def test_first_files_of_gte_stretch_their_rotation(tmp_path: Path) -> None:
    """By fixed NTK scaling, of the base and of all frequencies (https://kexue.fm/archives/9706)."""
    model = save_model(tmp_path, ENCODERS["gte"])
    scaling = {"type": "ntk", "factor": 8.0}
    values = {"architectures": ["NewModel"], "rope_scaling": scaling, "rope_theta": 20000}
    _change("config.json", rope_parameters=None, model_type="new", **values)(tmp_path)
    exponents = torch.arange(0, 32, 2) / 32
    model.rotary_emb.inv_freq = (8 * 20000.0) ** -exponents / 8 ** (2 / 32)
    with Engine(tmp_path, settings()) as engine:
        vectors = engine.embed(texts())
    expected = torch.stack([hidden_states(model, ids).mean(dim=0) for ids in texts()])
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("gte", {"layer_norm_type": "rms_norm"}, "GteModel can.t be served"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale is set"),
        ("gte", {"rope_parameters": {"rope_type": "ntk", "mixed_b": 0.3}}, "rope_type ntk"),
    ],
)
def test_other_layers_of_rotary_encoders_are_refused_by_name(
    family: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, ENCODERS[family])
    _change("config.json", **values)(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Engine(tmp_path, settings())


def test_generator_whose_tokens_see_their_whole_text_only_embeds(tmp_path: Path) -> None:
    """EmbeddingGemma, saved as Gemma 3 with its output projection."""
    save_model(tmp_path, ENCODERS["embeddinggemma"], AutoModelForCausalLM)
    spec = load_spec(tmp_path)
    assert spec.is_encoder
    assert not spec.family.has_logits


def test_recurrent_layers_need_a_causal_mask(tmp_path: Path) -> None:
    config = Lfm2Config(
        **SHAPE | {"is_causal": False}, layer_types=["conv", "full_attention", "conv"]
    )
    save_model(tmp_path, config)
    with pytest.raises(CheckpointError, match="without a causal mask is not supported"):
        Engine(tmp_path, settings())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size is set"),
        ({"relative_attention": False}, "relative_attention is false"),
        ({"pos_att_type": ["p2p"]}, "pos_att_type must hold c2p or p2c, got p2p"),
        ({"pooler_hidden_act": "mish"}, "the activation mish is not supported"),
    ],
)
def test_other_disentangled_attention_is_refused_by_name(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = ENCODERS["deberta v3"]
    save_model(tmp_path, config, AutoModelForSequenceClassification)
    _change("config.json", **values)(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Engine(tmp_path, settings())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"position_biased_input": "x"}, "position_biased_input"),
        ({"pooler_hidden_act": 5}, "pooler_hidden_act"),
        (
            {"max_relative_positions": 1, "position_buckets": 2},
            "position_buckets must be 0 with max_relative_positions = 1, got 2",
        ),
    ],
)
def test_wrong_value_is_not_taken_for_an_unknown_architecture(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, ENCODERS["deberta v3"])
    _change("config.json", **values)(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Engine(tmp_path, settings())


def test_unknown_architecture_is_answered_with_all_known_ones(tmp_path: Path) -> None:
    save_model(tmp_path, ENCODERS["bert"])
    _change("config.json", architectures=["MineModel"])(tmp_path)
    with pytest.raises(CheckpointError, match=r"BertModel.* EuroBertModel.* HF_ColBERT"):
        load_spec(tmp_path)


def _change(file: str, **values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(content | values))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change("1_Pooling/config.json", pooling_mode="max"), "the pooling max is not supported"),
        (_change("config.json", hidden_act="swish"), "hidden_act swish is not supported"),
        (
            lambda path: (path / "modules.json").write_text(
                '[{"type": "a.SpladePooling", "path": "1_Pooling"}]'
            ),
            "no file holds the tensor cls.predictions",
        ),
        (_change("config.json", vocab_size=98), "has the shape"),
        (
            lambda path: save_token_modules(path, in_features=48),
            "the linear layer reads 48 numbers, but what comes before it has 64",
        ),
        (
            lambda path: (path / "modules.json").write_text('[{"type": "a.Quant", "path": ""}]'),
            "Quant",
        ),
        (
            lambda path: (path / "modules.json").write_text(
                '[{"type": "a.Normalize", "path": "2"}]'
            ),
            "names no Pooling",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    change: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, ENCODERS["bert"])
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    (tmp_path / "modules.json").write_text('[{"type": "x.Pooling", "path": "1_Pooling"}]')
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Engine(tmp_path, settings())


@pytest.mark.parametrize(
    ("base", "key", "sees_all"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"is_decoder": True}, False),
        ("eurobert", {}, True),
        ("eurobert", {"is_decoder": False, "mask_token_id": None}, True),
    ],
)
def test_jina_v5_has_the_mask_of_its_base(
    base: str, key: dict[str, object], sees_all: bool, tmp_path: Path
) -> None:
    """Else the vectors of text-nano come from a causal mask."""
    save_model(tmp_path, {**ENCODERS, **DECODERS}[base])
    _change("config.json", architectures=["JinaEmbeddingsV5Model"], **key)(tmp_path)
    assert load_spec(tmp_path).is_encoder is sees_all


@pytest.mark.parametrize("tasks", [["../other"], [".."], [""], ["a", "a"]])
def test_task_names_are_no_paths(tasks: list[str], tmp_path: Path) -> None:
    save_model(tmp_path, DECODERS["qwen3"])
    names = {"architectures": ["JinaEmbeddingsV5Model"], "task_names": tasks}
    _change("config.json", **names)(tmp_path)
    with pytest.raises(CheckpointError, match="task_names must hold names of directories"):
        load_spec(tmp_path)
