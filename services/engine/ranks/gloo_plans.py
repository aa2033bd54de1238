"""Plans over gloo, for ranks on several machines."""

import struct

import torch
import torch.distributed as dist

from services.engine.ranks.plan_channel import PlanChannel, RankLostError

__all__ = ["GlooPlans"]

_LENGTH = struct.Struct("=q")
_BLOCK = 8192
"""Bytes of the broadcast that holds a plan's length and beginning"""


class GlooPlans(PlanChannel):
    """Channel of plans over gloo: one broadcast per plan, two for a long plan."""

    def __init__(self, hosts: "dist.ProcessGroup") -> None:
        self._hosts = hosts

    def send(self, plan: bytes) -> None:
        message = bytearray(_LENGTH.pack(len(plan)) + plan)
        message += bytes(max(0, _BLOCK - len(message)))
        self._broadcast(message[:_BLOCK])
        if len(message) > _BLOCK:
            self._broadcast(message[_BLOCK:])

    def receive(self) -> bytearray:
        message = self._broadcast(bytearray(_BLOCK))
        [length] = _LENGTH.unpack_from(message)
        if (rest := length + _LENGTH.size - _BLOCK) > 0:
            message += self._broadcast(bytearray(rest))
        return message[_LENGTH.size : _LENGTH.size + length]

    def _broadcast(self, message: bytearray) -> bytearray:
        try:
            dist.broadcast(torch.frombuffer(message, dtype=torch.uint8), 0, group=self._hosts)
        except RuntimeError as error:
            raise RankLostError(str(error)) from error
        return message
