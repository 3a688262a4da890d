"""Traces of the steps of an AsyncFlow run for OpenTelemetry."""
