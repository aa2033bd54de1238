"""What every service shares: settings, server bootstrap, logs and metrics."""

import os

# gRPC reads this when it starts. Its event engine's threads hand every message that a client reads
# from one to another, a wake-up each; without them the thread that waits for completions reads.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
# Its own lines are no JSON: only errors, not what it says of each fork.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
