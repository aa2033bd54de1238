"""Tenant of the request that a task answers, for the accounting of shared resources."""

from contextvars import ContextVar

__all__ = ["current_tenant"]

current_tenant: ContextVar[str] = ContextVar("tenant", default="")
"""Id of the API key, or the tenant that a trusted caller names; empty = neither. Tasks and threads
that a request starts inherit the value."""
