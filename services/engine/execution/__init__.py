"""The loaded model: memory budget, CUDA graphs, and the runner of step plans."""
