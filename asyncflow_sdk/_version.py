"""The version of the SDK: said by the package, and compared when a client meets a server."""

__version__ = "0.1.0"
