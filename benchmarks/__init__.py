"""Benchmarks a person can run: each is one make target, prints a table, and writes rows with JSON=PATH."""
