"""``python -m asyncflow_sdk.workflow``: a worker process, told by its driver what to be."""

import gc
import os
import sys

from .worker import main

status = main()
if status:  # a thread of a failed engine must not hold up the news of its failure
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
gc.freeze()  # the interpreter's last collection would look through all that the engine's libraries hold, for up to a second
