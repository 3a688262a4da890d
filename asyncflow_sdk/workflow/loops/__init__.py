"""The loops of workers, rollout, stage and train, and their events."""
