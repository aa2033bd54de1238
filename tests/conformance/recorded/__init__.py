"""Every route's answers in shape: recorded, and compared with what the stack answers now.

`python -m tests.conformance.recorded` starts a stack and records; see `__main__.py`.
"""
