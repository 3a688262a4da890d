"""Checks of train engines."""
