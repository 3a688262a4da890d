"""Common parts of the adapters of inference servers: HTTP client, claimed server, model folder, limits of requests."""
