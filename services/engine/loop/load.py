"""Load of the step loop, as it is reported with each step."""

from services.engine.execution.model_runner import ModelRunner
from services.engine.loop.draft_counts import draft_counts
from services.engine.messages import LoadSnapshot
from services.engine.scheduling.scheduler import Scheduler

__all__ = ["load_of"]


def load_of(scheduler: Scheduler, runner: ModelRunner, steps: int) -> LoadSnapshot:
    """Return the present load. steps: number of steps since the start."""
    return LoadSnapshot(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        queued_tokens=scheduler.queued_tokens,
        free_blocks=scheduler.caches.num_free,
        total_blocks=scheduler.caches.num_blocks,
        preemptions=scheduler.preemptions,
        steps=steps,
        pools=scheduler.caches.uses(),
        drafts=draft_counts([scheduler.drafter.totals]),
        oversized_steps=runner.oversized_steps,
        ungraphed_steps=runner.ungraphed_steps,
    )
