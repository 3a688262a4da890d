"""``make bench-engines``: what an inference engine loses behind the SDK, in one process, against itself driven directly."""
