"""Generation by the engine `transformers`: prefill, batches of sequences, sampling, and the thread
of both."""
