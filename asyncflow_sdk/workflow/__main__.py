"""``python -m asyncflow_sdk.workflow``: the process of a worker; with "remote" its agent on another
host."""

import gc
import os
import sys

from .processes.command_launcher import run_agent
from .processes.worker import main

status = run_agent() if sys.argv[1:2] == ["remote"] else main()
if status:  # a thread of a failed engine must not delay the exit
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
gc.freeze()  # the last collection would search all objects of the engine's libraries, for up to a second
