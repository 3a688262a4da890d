"""Accelerate as a train engine of AsyncFlow SDK."""
