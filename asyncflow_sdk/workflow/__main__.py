"""``python -m asyncflow_sdk.workflow``: a worker process, told by its driver what to be."""

import os
import sys

from .worker import main

status = main()
if status:  # a thread of a failed engine must not hold up the news of its failure
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
