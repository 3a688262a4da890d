"""vLLM as a rollout engine: asynchronous, in processes of its own, with weights read where the SDK has put them.

Importing this package imports no vLLM.
"""
