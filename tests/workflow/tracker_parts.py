"""Trackers as a user writes them: they write what they hear into the run's directory."""

import json
import time

import asyncflow_sdk as af
from asyncflow_sdk.types import events as ev


class Lines(af.Tracker):
    def __init__(self, file="lines", fails="", slow_s=0.0):
        if not file:
            raise af.ConfigError("file is the name of a file")
        self.file, self.fails, self.slow_s = file, fails, slow_s

    def open(self, run):
        self.out = (run.directory / self.file).open("a")
        self._do("open", run.resumed, run.description.get("steps"), run.description.get("batch_size"))

    def log(self, step, version, metrics):
        time.sleep(self.slow_s)
        self._do("log", step, version, sorted(metrics), metrics["reward"])

    def event(self, event):
        if isinstance(event, ev.Published):
            self._do("published", event.version)

    def close(self):
        self._do("close")
        self.out.close()

    def _do(self, what, *said):
        self.out.write(json.dumps([what, *said]) + "\n")
        self.out.flush()
        if what == self.fails:
            raise OSError(f"no room to {what}")


class Exits(Lines):
    def log(self, step, version, metrics):
        raise SystemExit("enough")


class Hangs(Lines):
    def close(self):
        time.sleep(3600)


class NoTracker:
    pass
