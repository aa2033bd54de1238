"""MobileNet-V5: the features equal timm's."""

import zlib

import numpy as np
import pytest
import torch

from services.engine.vision.mobilenet_v5 import MobileNetV5

# fmt: off
WHOLE_POOLS = [
    -0.15548, 0.19752, 0.22145, 0.29332, 0.89270, 1.18907, 0.85451, 0.49372,
    0.24309, -0.05929, 1.08318, 0.49566, -1.83362, -2.08786, -2.33298, -0.09145,
    1.66180, 1.45345, 1.66976, 1.76946, 0.78731, 0.66521, 0.71669, 0.72777,
    -1.29752, -1.27232, -0.79028, -1.87786, 0.01978, 0.35517, 0.57692, 0.58679,
]
"""timm's features of the first image of 64 pixels: every 256th channel, then rows and columns"""
BETWEEN_POOLS = [
    0.04778, -0.66544, -0.01532, -0.04263, 0.59090, 0.46977, 0.38009, 0.37058,
    0.49649, 0.02306, 0.81173, 0.94861, -1.02878, -0.41906, -1.34628, -0.07511,
    1.74897, 1.82757, 2.14707, 1.93781, 0.89687, 0.65826, 0.86966, 0.78596,
    -1.17066, -1.68910, -0.86116, -1.55046, 0.32219, -0.19294, -0.13202, -0.51457,
]
"""The same of the second image of 50 pixels, which are resized to the features' rows"""
# fmt: on


@pytest.fixture(scope="module")
def tower() -> MobileNetV5:
    """The tower of timm's `mobilenetv5_300m_enc` with a channel_multiplier of 1/16."""
    tower = MobileNetV5(2048, 2, 1 / 16).eval()
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            random = np.random.default_rng(zlib.crc32(name.encode()))
            if parameter.ndim == 1:
                values = random.uniform(0.5, 1.5, parameter.shape)
            else:
                values = random.standard_normal(parameter.shape) * parameter[0].numel() ** -0.5
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    return tower


@pytest.mark.parametrize(
    ("edge", "image", "expected"), [(64, 0, WHOLE_POOLS), (50, 1, BETWEEN_POOLS)]
)
def test_features_equal_those_of_timm(
    tower: MobileNetV5, edge: int, image: int, expected: list[float]
) -> None:
    """timm 1.0.31 computed the numbers, in float32, from the same weights and pixels."""
    pixels = np.random.default_rng(1).uniform(0, 1, (2, 3, edge, edge)).astype(np.float32)
    with torch.no_grad():
        features = tower(torch.from_numpy(pixels))
    assert features.shape == (2, 2048, 2, 2)
    found = features[image, ::256].flatten()
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


def test_published_model_has_300_million_parameters() -> None:
    with torch.device("meta"):
        tower = MobileNetV5(2048, 16)
    assert sum(parameter.numel() for parameter in tower.parameters()) == 294_126_912
