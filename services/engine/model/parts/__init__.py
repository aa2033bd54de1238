"""Parts of layers: their stored tensors, how ranks share them, and feed-forward layers."""
