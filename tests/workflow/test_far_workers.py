"""Workers of a run that other hosts can reach: those started by its server need no key, those started from afar have one."""

from pathlib import Path

import functions
import pytest

import asyncflow_sdk as af


def test_workers_started_near_and_from_afar_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a run served with keys, and a client that sees none of its memory
    monkeypatch.chdir(tmp_path)  # where the far client's workers log
    with af.serve(tmp_path / "run", address="tcp://0.0.0.0:0") as run:
        address = run.address.replace("0.0.0.0", "127.0.0.1")
        with af.connect(address, key=tmp_path / "run" / "run.key", shared_memory=False) as far:
            far.queue.put({"response_ids": [[1, 2], [3], [4, 5, 6]]})
            # when
            far.start(af.Stage(functions.length, task="reward", needs=["response_ids"], gives=["reward"]))
            run.start(af.Stage(functions.doubled, task="double", needs=["reward"], gives=["twice"]))
            # then
            run.queue.declare("end", needs=["reward", "twice"])
            seen = {}
            while len(seen) < 3:
                with far.queue.get("end", 3, timeout_s=60) as batch:
                    seen.update(zip(batch.ids.tolist(), batch.array("twice").tolist(), strict=True))
                    batch.ack()
            assert seen == {0: 4.0, 1: 2.0, 2: 6.0}
