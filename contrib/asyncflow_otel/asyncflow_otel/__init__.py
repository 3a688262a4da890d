"""Traces of the rows of an AsyncFlow run for OpenTelemetry."""
