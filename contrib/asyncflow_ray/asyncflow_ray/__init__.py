"""Ray for AsyncFlow SDK: workers as actors, ``launcher="ray"``, and payload in its object store, ``store="ray"``."""
