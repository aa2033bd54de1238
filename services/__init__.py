"""The four services: tokenizer, engine, grammar and http_shim. None imports another's package."""

import os

# gRPC's handlers of fork() take locks, and a child that waits for one before it runs its program
# stops its parent too. Our processes only start programs. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
