"""Rolling back: old bytes become current again, under a new number."""

from __future__ import annotations

from ..errors import ConfigError
from . import commands as cmd
from .state import Session
from .swapping import Swapping


class RollingBack(Swapping):
    """Gives versions up."""

    def _roll_back(self, session: Session, command: cmd.Rollback) -> cmd.Reply:
        raise ConfigError("this run cannot roll back yet")
