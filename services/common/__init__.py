"""What every service shares: settings, server bootstrap, errors, logging and telemetry."""

import os

# gRPC reads this when it starts. Its event engine's threads hand every message that a client reads
# from one to another, a wake-up each; without them the thread that waits for completions reads.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
