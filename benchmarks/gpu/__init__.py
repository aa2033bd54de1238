"""Check of the GPU path within a short loan of a card: what is unknown first, a report as it goes.

    make gpu-check

It needs torch with CUDA and nothing from the network: `make gpu-bundle` gathers the other packages.
README.md says how it works, and how a part is added.
"""
