"""Prometheus metrics of the jobs service. Requests that it makes count as those of a shim."""

from prometheus_client import Gauge

__all__ = ["BACKGROUND", "BATCHES", "UPLOADS"]

BATCHES = Gauge("tokenwire_jobs_running_batches", "Batches whose requests run.")
BACKGROUND = Gauge("tokenwire_jobs_background_responses", "Responses that run in the background.")
UPLOADS = Gauge("tokenwire_jobs_uploads", "Files that are being uploaded.")
