"""Creator of what the service keeps and runs: who owns it, and with what rights it runs."""

from dataclasses import dataclass

import grpc

from services.common.accounts import identity
from services.common.accounts.identity import Identity
from services.common.accounts.metering import count_request
from services.common.priority import PRIORITY_LIMIT
from services.common.sharing.tenant import current_tenant
from tokenwire.errors import ServiceError
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["Creator", "admit", "stated_creator"]


@dataclass(frozen=True, slots=True)
class Creator:
    """The maker of a file, a batch or a response."""

    account: str
    """Id of the API key; empty = the installation has no keys"""
    tenant: str
    """Tenant whose prefix cache its requests use"""
    priority: int = 0
    """Scheduling priority, higher first"""
    may_schedule: bool = False
    """True if the body of a request may raise its priority"""

    @property
    def owner(self) -> str:
        """The API key, or the tenant of an installation without keys."""
        return self.account or self.tenant

    def at_lowest_priority(self) -> "Creator":
        """Return the creator of work that is in no hurry."""
        return Creator(self.account, self.tenant, -PRIORITY_LIMIT)


def stated_creator(context: jobs_pb2.RequestContext) -> Creator:
    """Return the creator that a service of the installation states."""
    return Creator(context.account, context.tenant, context.priority, context.may_schedule)


async def admit(context: jobs_pb2.RequestContext) -> Creator:
    """Return on whose behalf the rpc is called, and count the call of a key's holder.

    Raises PERMISSION_DENIED, UNAUTHENTICATED or RESOURCE_EXHAUSTED.
    """
    caller = identity.current.get()
    creator = _creator_of(caller, context)
    current_tenant.set(creator.owner)
    if caller.account is not None:
        caller.require_valid()
        await count_request(caller.account)
    return creator


def _creator_of(caller: Identity, context: jobs_pb2.RequestContext) -> Creator:
    if caller.is_peer and caller.may_schedule:
        return stated_creator(context)
    if context.account not in ("", caller.key_id):
        raise _denied("account", "it is the id of the caller's API key")
    if context.may_schedule and not caller.may_schedule:
        raise _denied("may_schedule", "a caller may only lower the priority of its requests")
    return Creator(
        caller.key_id,
        caller.tenant(context.tenant, "context.tenant"),
        caller.priority(context.priority, "context.priority"),
        context.may_schedule,
    )


def _denied(name: str, why: str) -> ServiceError:
    field = f"context.{name}"
    message = f"{field} can't be set on this server: {why}."
    code = grpc.StatusCode.PERMISSION_DENIED
    return ServiceError(code, "CONTEXT_NOT_ALLOWED", message, field=field)
