"""``make bench-overlap``: how much of rollout, stages and training lies side by side, beside bounds and a simulation."""
