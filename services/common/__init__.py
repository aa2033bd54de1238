"""The modules that all services share: settings, server bootstrap, logs and metrics."""

import os

# gRPC reads both variables when it is imported. Its event engine hands every message that a client
# reads from thread to thread. Without it, the thread that waits for messages also reads them.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
# gRPC's log lines are not JSON, and it logs every fork: keep only its errors.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
