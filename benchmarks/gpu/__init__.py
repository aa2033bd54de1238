"""Check of the GPU path on any machine with a card: correctness first, then speed beside peers.

    make gpu-check

It needs torch with CUDA and nothing from the network: `make gpu-bundle` gathers the other packages.
"""
