"""SLURM for AsyncFlow SDK: workers as jobs, ``launcher="slurm"``."""
