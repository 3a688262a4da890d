"""The processes of a run's workers: launchers, supervision, ranks."""
