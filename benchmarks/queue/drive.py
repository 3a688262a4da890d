"""One contender through one workload: ``python -m benchmarks.queue.drive ours put_get '{"batches": 9, ...}'``.

Runs in the contender's own environment; the last line it prints is the result, as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings

from . import workloads

if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # the peer's libraries talk a lot
    name, workload, options = sys.argv[1:]
    print(json.dumps(getattr(workloads, workload)(name, **json.loads(options))))
