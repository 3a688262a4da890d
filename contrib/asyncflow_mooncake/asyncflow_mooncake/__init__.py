"""Payload of AsyncFlow SDK in Mooncake Store: ``store="mooncake"``."""
