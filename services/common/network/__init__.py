"""Addresses, names and reach of servers, and probes of their health."""
