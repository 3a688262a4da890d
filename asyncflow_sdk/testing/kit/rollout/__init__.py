"""Checks of rollout engines."""
