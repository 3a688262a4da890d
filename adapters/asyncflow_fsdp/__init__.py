"""FSDP2 as a train engine: a Hugging Face model in shards over N processes. Importing this package imports no torch."""
