"""The live web page of a run."""
