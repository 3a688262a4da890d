"""The rollout worker: its state machine and the parts that it calls."""
