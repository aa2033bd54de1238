"""Encoders in GGUF files: vectors of texts against transformers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    PoolingType,
    TokenType,
    dequantize,
    get_tensor_name_map,
    quantize,
)
from safetensors.torch import load_file
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    NomicBertConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from services.common.model_files.checkpoint import opened_checkpoint
from services.common.settings import StartupError
from services.engine.engine import Engine
from services.engine.settings import EngineSettings
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.engine.gguf_checkpoints import write_gguf

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁w{i}" for i in range(85))]
TOKENS = [*WORDS, *"abcdefg"]
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
ENCODERS: dict[str, tuple[MODEL_ARCH, PreTrainedConfig]] = {
    "bert": (MODEL_ARCH.BERT, BertConfig(**SHAPE)),
    "nomic": (MODEL_ARCH.NOMIC_BERT, NomicBertConfig(**SHAPE)),
}
TEXTS = ["w1 w2", "w3a W4bc w5! w6", "w7 " * 50]


@pytest.mark.parametrize("pooling", [PoolingType.MEAN, PoolingType.CLS, PoolingType.LAST])
@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_equal_those_of_the_checkpoint(
    tmp_path: Path, name: str, pooling: PoolingType
) -> None:
    model = write(tmp_path, *ENCODERS[name], pooling=pooling)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        vocabulary = Vocabulary(directory)
        ids = [vocabulary.encode(text) for text in TEXTS]
        with Engine(directory, settings()) as engine:
            vectors = engine.embed(ids)
    assert all(each[0] == 2 and each[-1] == 3 for each in ids)
    torch.testing.assert_close(vectors, expected(model, ids, pooling), atol=1e-5, rtol=1e-5)


def test_quantized_encoder_computes_with_its_numbers(tmp_path: Path) -> None:
    model = write(tmp_path, *ENCODERS["nomic"], kind=GGMLQuantizationType.Q8_0)
    ids = [[2, 7, 8, 9, 3]]
    with (
        opened_checkpoint(tmp_path / "model.gguf") as directory,
        Engine(directory, settings()) as engine,
    ):
        vectors = engine.embed(ids)
    torch.testing.assert_close(vectors, expected(model, ids), atol=1e-5, rtol=1e-5)


def test_words_are_cut_into_the_longest_tokens(tmp_path: Path) -> None:
    """A word's first token is marked in the file, and its others are in tokenizer.json."""
    write(tmp_path, *ENCODERS["bert"])
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        vocabulary = Vocabulary(directory)
    names = {text: TOKENS.index(text) for text in ("▁w1", "▁w12", *"abc")}
    assert vocabulary.encode("W12ab  wÀ1 w1c") == [
        *(2, names["▁w12"], names["a"], names["b"]),
        *(1, names["▁w1"], names["c"], 3),
    ]


def test_ranking_without_a_head_is_refused(tmp_path: Path) -> None:
    write(tmp_path, *ENCODERS["bert"], pooling=PoolingType.RANK)
    with pytest.raises(StartupError, match="says that it ranks texts, but has no head"):
        open_and_close(tmp_path / "model.gguf")


@pytest.mark.parametrize("causal", [None, True])
def test_architecture_decides_that_tokens_see_their_whole_text(
    causal: bool | None, tmp_path: Path
) -> None:
    """Files without the key pool as they say; a causal encoder is refused."""
    model = write(tmp_path, *ENCODERS["bert"], pooling=PoolingType.CLS, causal=causal)
    if causal:
        with pytest.raises(StartupError, match=r"bert\.attention\.causal is true"):
            open_and_close(tmp_path / "model.gguf")
        return
    ids = [[2, 7, 8, 9, 3]]
    with (
        opened_checkpoint(tmp_path / "model.gguf") as directory,
        Engine(directory, settings()) as engine,
    ):
        vectors = engine.embed(ids)
    torch.testing.assert_close(vectors, expected(model, ids, PoolingType.CLS), atol=1e-5, rtol=1e-5)


def test_decoder_without_a_causal_mask_embeds_as_transformers_does(tmp_path: Path) -> None:
    config = Qwen3Config(**SHAPE | {"num_key_value_heads": 1, "head_dim": 32, "is_causal": False})
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config).eval()

    def further(writer: GGUFWriter) -> None:
        writer.add_causal_attention(False)
        writer.add_pooling_type(PoolingType.MEAN)

    write_gguf(tmp_path / "model.gguf", model, further=further)
    ids = [[2, 7, 8, 9, 3]]
    with (
        opened_checkpoint(tmp_path / "model.gguf") as directory,
        Engine(directory, settings()) as engine,
    ):
        vectors = engine.embed(ids)
        assert not engine.model.generates
    torch.testing.assert_close(vectors, expected(model.model, ids), atol=1e-5, rtol=1e-5)


def open_and_close(path: Path) -> None:
    with opened_checkpoint(path):
        pass


def settings() -> EngineSettings:
    return EngineSettings(
        dtype="float32", weights="decoded", kv_memory="64MiB", max_running=8, device="cpu"
    )


def expected(
    model: Any, ids: list[list[int]], pooling: PoolingType = PoolingType.MEAN
) -> torch.Tensor:
    """Return vectors of length 1, as llama.cpp's server makes them."""
    found = []
    for each in ids:
        with torch.no_grad():
            states = model(input_ids=torch.tensor([each])).last_hidden_state[0]
        vector = {
            PoolingType.MEAN: states.mean(dim=0),
            PoolingType.CLS: states[0],
            PoolingType.LAST: states[-1],
        }[pooling]
        found.append(normalize(vector, dim=0))
    return torch.stack(found)


def write(
    folder: Path,
    architecture: MODEL_ARCH,
    config: PreTrainedConfig,
    *,
    pooling: PoolingType = PoolingType.MEAN,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    causal: bool | None = False,
) -> Any:
    """Write a random model as the converter does. Return transformers' model of its numbers."""
    torch.manual_seed(0)
    auto: Any = AutoModel
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms begin as zeros and ones
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            elif kind is not GGMLQuantizationType.F32:
                parameter.copy_(
                    torch.from_numpy(dequantize(quantize(parameter.numpy(), kind), kind))
                )
    model.save_pretrained(folder / "checkpoint")
    tensors = load_file(folder / "checkpoint" / "model.safetensors")

    def further(writer: GGUFWriter) -> None:
        if causal is not None:
            writer.add_causal_attention(causal)
        writer.add_pooling_type(pooling)

    write_file(folder, architecture, config, tensors, further, kind=kind)
    return model


def write_file(
    folder: Path,
    architecture: MODEL_ARCH,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    further: Callable[[GGUFWriter], None],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> None:
    """Write tensors by their names in checkpoints. further: writes what only this file has."""
    writer = GGUFWriter(folder / "model.gguf", MODEL_ARCH_NAMES[architecture])
    _write_metadata(writer, config)
    further(writer)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in tensors.items():
        if name.startswith("pooler."):
            continue
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        numbers = tensor.contiguous().numpy()
        if numbers.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(place, numbers)
        else:
            writer.add_tensor(place, quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", 1e-5))
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_token_type_count(getattr(config, "type_vocab_size", 1))
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("bert-bge")
    writer.add_token_list(TOKENS)
    kinds = [TokenType.CONTROL] * 5 + [TokenType.NORMAL] * (len(TOKENS) - 5)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)
