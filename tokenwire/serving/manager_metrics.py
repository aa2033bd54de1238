"""Prometheus metrics of the models that are loaded on demand."""

from prometheus_client import Counter, Gauge, Histogram

__all__ = ["FAILURES", "LOADED", "LOADS", "LOAD_SECONDS", "MEMORY", "UNLOADS", "WAITING"]

LOADS = Counter("tokenwire_model_loads", "Loads that succeeded.", ["model"])
FAILURES = Counter("tokenwire_model_load_failures", "Loads that failed.", ["model"])
UNLOADS = Counter(
    "tokenwire_model_unloads",
    "Models that left the memory, by cause: idle, memory, operator, lost.",
    ["model", "cause"],
)
LOAD_SECONDS = Histogram(
    "tokenwire_model_load_seconds",
    "Seconds from the start of a model's services until they serve.",
    buckets=(0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
WAITING = Gauge("tokenwire_model_waiting_users", "Users that wait for a model to be loaded.")
LOADED = Gauge("tokenwire_models_loaded", "Models in memory.")
MEMORY = Gauge("tokenwire_models_memory_bytes", "Estimated memory of the loaded models.")
