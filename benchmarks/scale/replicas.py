"""Some replicas in one process, each with a session of its own: ``python -m benchmarks.scale.replicas ADDRESS PLAN NUMBER...``."""

from __future__ import annotations

import sys

import msgspec

from ..overlap.replicas import main
from .plan import ScalePlan

if __name__ == "__main__":
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=ScalePlan), sys.argv[3:])
