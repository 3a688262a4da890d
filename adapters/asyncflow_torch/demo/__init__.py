"""The demo: a task and a model small enough to learn it in a minute on one CPU core."""
