"""Metrics of an AsyncFlow run for Prometheus."""
