"""Coding agents as their users run them, each from npm, in front of a scripted engine."""
