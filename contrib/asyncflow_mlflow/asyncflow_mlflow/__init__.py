"""A MLflow tracker for AsyncFlow SDK."""
