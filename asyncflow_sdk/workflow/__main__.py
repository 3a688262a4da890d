"""``python -m asyncflow_sdk.workflow``: the process of a worker."""

import gc
import os
import sys

from .workers.worker_process import main

status = main()
if status:  # a thread of a failed engine must not delay the exit
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
gc.freeze()  # the last collection would search all objects of the engine's libraries, for up to a second
