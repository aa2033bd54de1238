"""Facts of a checkpoint's files: the types in which its weights are stored."""

from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from services.common.gguf.checkpoint_files import PARTS
from services.common.model_files.checkpoint_facts import bytes_by_type


def test_bytes_of_a_gguf_file_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    """Files named Q4_K_M often hold most of their bytes in other types."""
    path = tmp_path / PARTS / "m.gguf"
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, "llama")
    weights = np.linspace(-1, 1, 64 * 256, dtype=np.float32).reshape(64, 256)
    for name, kind in (("a", "Q8_0"), ("b", "Q4_0"), ("c", "Q8_0")):
        quantization = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(weights, quantization), raw_dtype=quantization)
    writer.add_tensor("d", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected: dict[str, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = tensor.tensor_type.name
        expected[name] = expected.get(name, 0) + int(tensor.n_bytes)
    found = bytes_by_type(tmp_path)
    assert found == expected
    assert list(found) == ["Q8_0", "Q4_0", "F32"]


def test_bytes_of_safetensors_are_added_over_the_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file(
        {"b": torch.zeros(8, dtype=torch.bfloat16), "c": torch.zeros(1, dtype=torch.int64)},
        tmp_path / "model-2.safetensors",
    )
    assert bytes_by_type(tmp_path) == {"BF16": 24, "I64": 8}


def test_damaged_file_has_no_types(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    assert bytes_by_type(tmp_path) == {}
