"""Stage functions that Ray's workers can import."""

import os
import time


def pid(x):
    time.sleep(0.02)
    return [os.getpid() for _ in x]
