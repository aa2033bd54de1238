"""Load of all engines together, in vLLM's terms."""

from dataclasses import dataclass

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from services.tokenizer.engines.engine_pool import EnginePool

__all__ = ["PoolLoad", "load_of"]


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Sums of the last reports of the engines that serve."""

    running: int
    waiting: int
    queued_tokens: int
    """Waiting prompt tokens that are not in a prefix cache"""
    used_tokens: int
    """Tokens that fit into the KV blocks that running sequences hold"""
    total_tokens: int
    """Tokens that fit into all KV blocks"""
    tokens_per_second: float
    max_running: int

    @property
    def usage(self) -> float:
        """Share of the KV blocks that running sequences hold."""
        return self.used_tokens / max(1, self.total_tokens)

    def to_scheduler_load(self) -> vllm_engine_pb2.SchedulerLoad:
        """Return the load as a message of GetLoads."""
        return vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=self.running,
            num_waiting_reqs=self.waiting,
            num_total_reqs=self.running + self.waiting,
            num_used_tokens=_int32(self.used_tokens),
            max_total_num_tokens=_int32(self.total_tokens),
            token_usage=self.usage,
            gen_throughput=self.tokens_per_second,
            utilization=self.running / max(1, self.max_running),
            max_running_requests=self.max_running,
            num_waiting_uncached_tokens=_int32(self.queued_tokens),
        )

    def to_engine_load(self, sample: int, *, is_alone: bool) -> common_pb2.EngineLoad:
        """Return the load as a message of a stream of cache events.

        sample: number within the stream. is_alone: whether the batch has no events.
        """
        return common_pb2.EngineLoad(
            running_requests=self.running,
            waiting_requests=self.waiting,
            waiting_uncached_tokens=_int32(self.queued_tokens),
            token_usage=self.usage,
            active_token_usage=self.usage,
            gen_throughput=self.tokens_per_second,
            max_running_requests=self.max_running,
            sample=sample,
            load_only=is_alone,
            num_used_tokens=_int32(self.used_tokens),
            max_total_num_tokens=_int32(self.total_tokens),
        )


def load_of(pool: EnginePool) -> PoolLoad:
    """Return the load of a pool's engines."""
    loads = pool.loads()
    return PoolLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        queued_tokens=sum(load.queued_tokens for load in loads),
        used_tokens=sum(load.used_blocks * load.block_size for load in loads),
        total_tokens=sum(load.total_blocks * load.block_size for load in loads),
        tokens_per_second=sum(load.tokens_per_second for load in loads),
        max_running=sum(load.places for load in loads),
    )


def _int32(value: int) -> int:
    return min(value, 2**31 - 1)
