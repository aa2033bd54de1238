"""Tenant of the request that a task answers, who is charged for shared resources."""

from contextvars import ContextVar

__all__ = ["current_tenant"]

current_tenant: ContextVar[str] = ContextVar("tenant", default="")
"""The API key's id, or the tenant that a trusted caller names; empty = neither. Tasks and threads
that a request starts inherit it"""
