"""The plan of a workflow: what it will run, and what is wrong with it."""
