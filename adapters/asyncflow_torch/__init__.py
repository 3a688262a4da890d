"""Engines on PyTorch and Hugging Face transformers: generate and train anywhere, without a GPU if
need be.

The parts are for other adapters too: ``collate`` and ``logprobs`` turn rows into log-probs,
``packing`` into a loss. Importing this package imports no torch.
"""
