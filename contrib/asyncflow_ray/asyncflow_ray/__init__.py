"""Workers of AsyncFlow SDK as Ray actors: ``launcher="ray"``."""
