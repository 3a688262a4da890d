"""Screens in the terminal: a run, a queue, and their parts."""
