"""LoRA adapters (https://arxiv.org/abs/2106.09685): low-rank additions to a decoder's products."""
