"""Engine service: continuous batching over a paged KV cache, for prompts and answers in token ids.

`frontend` serves gRPC on an event loop; `loop` runs the steps in a process of its own. They share
only the messages of `messages`. With tensor parallelism, each other rank runs
`loop.follower_process`.
"""
