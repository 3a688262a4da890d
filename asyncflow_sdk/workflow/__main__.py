"""``python -m asyncflow_sdk.workflow``: a worker process, told by its driver what to be."""

import sys

from .worker import main

sys.exit(main())
