"""A Trackio tracker for AsyncFlow SDK."""
