import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # the right engine, from which wrong ones are made
