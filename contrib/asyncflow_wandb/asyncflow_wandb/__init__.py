"""A Weights & Biases tracker for AsyncFlow SDK."""
