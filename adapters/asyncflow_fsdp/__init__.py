"""FSDP2 as a train engine: a Hugging Face model in shards over N processes. Imports no torch."""
