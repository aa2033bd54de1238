"""The engine: continuous batching over a paged KV cache. Token ids in, token ids out.

`application` speaks gRPC on an event loop; `loop_process` runs the steps in a process of its own;
they meet in the messages of `messages`. Of a model over several ranks, `worker_process` is the
others.
"""
