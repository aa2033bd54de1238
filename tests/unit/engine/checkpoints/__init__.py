"""Small random checkpoints made by transformers, and a driver that runs a decoder on them."""
