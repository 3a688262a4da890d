"""Every command and every reply: what a wire or a log decodes to."""

from __future__ import annotations

from typing import TypeAlias

from ...types.reports import Audit, StatusReport
from . import reports, roots, rows, run, training, versions

AnyCommand: TypeAlias = (
    run.Join | run.Configure | run.Declare | rows.Put | rows.Lease | rows.Complete | rows.GiveBack | rows.Renew | rows.AwaitLost | versions.OpenPublisher | versions.ClosePublisher | versions.Announce
    | versions.Publish | versions.Withdraw | versions.Rollback | versions.GetRestoration | versions.Restored | versions.AwaitVersion | versions.Staged | versions.Swap | versions.Loaded | versions.NotLoaded | versions.Retire | rows.Wanted | run.End | rows.Cancel
    | run.Dismiss | run.Prepare | run.Leave | reports.GetAudit | reports.GetFailed | reports.GetStatus | training.Checkpoint | training.Resume | training.GetCut | training.Meet | rows.GetPut
)  # fmt: skip
AnyReply: TypeAlias = (
    roots.Done | run.Joined | rows.PutDone | rows.Leased | rows.LoadFirst | rows.Completed | rows.Lost | rows.Cancelled | run.Dismissed | reports.Failed | versions.Publisher | versions.Published
    | versions.RolledBack | versions.Restoration | versions.Permitted | versions.Version | rows.RowsWanted | Audit | StatusReport | training.Resumed | training.Cut | training.Met | rows.LastPut
)  # fmt: skip
