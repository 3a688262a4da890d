"""A TensorBoard tracker for AsyncFlow SDK."""
