"""Event sinks: the recorder of a run, trackers, and the statistics of both."""
