"""Workers: their processes, supervision and loops."""
