import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes with two threads each would only wait

REPOSITORY = Path(__file__).parent.parent
