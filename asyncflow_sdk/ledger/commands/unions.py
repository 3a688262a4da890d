"""Every command and every reply: what a wire or a log decodes to."""

from __future__ import annotations

from typing import TypeAlias

from .reports import Audit, Failed, GetAudit, GetFailed, GetStatus, StatusReport
from .roots import Done
from .rows import (
    AwaitLost,
    Cancel,
    Cancelled,
    Complete,
    Completed,
    GetPut,
    GiveBack,
    LastPut,
    Lease,
    Leased,
    LoadFirst,
    Lost,
    Put,
    PutDone,
    Renew,
    RowsWanted,
    Wanted,
)
from .run import Configure, Declare, Dismiss, Dismissed, End, Join, Joined, Leave
from .training import Checkpoint, Cut, GetCut, Resume, Resumed
from .versions import (
    Announce,
    AwaitVersion,
    ClosePublisher,
    Loaded,
    NotLoaded,
    OpenPublisher,
    Permitted,
    Publish,
    Published,
    Publisher,
    Retire,
    Rollback,
    RolledBack,
    Staged,
    Swap,
    Version,
    Withdraw,
)

AnyCommand: TypeAlias = (
    Join | Configure | Declare | Put | Lease | Complete | GiveBack | Renew | AwaitLost | OpenPublisher | ClosePublisher | Announce
    | Publish | Withdraw | Rollback | AwaitVersion | Staged | Swap | Loaded | NotLoaded | Retire | Wanted | End | Cancel
    | Dismiss | Leave | GetAudit | GetFailed | GetStatus | Checkpoint | Resume | GetCut | GetPut
)  # fmt: skip
AnyReply: TypeAlias = (
    Done | Joined | PutDone | Leased | LoadFirst | Completed | Lost | Cancelled | Dismissed | Failed | Publisher | Published
    | RolledBack | Permitted | Version | RowsWanted | Audit | StatusReport | Resumed | Cut | LastPut
)  # fmt: skip
