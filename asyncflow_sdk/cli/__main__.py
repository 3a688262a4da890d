"""``python -m asyncflow_sdk.cli``: the command ``asyncflow``."""

from . import main

main()
