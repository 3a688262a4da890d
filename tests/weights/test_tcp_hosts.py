"""Weights from a trainer on one host to a replica on another, in a run with keys, over a cable that does what cables do."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from children import Child
from tcp_host_children import replicate, train
from two_hosts import HERE, two_hosts

ADDRESS = f"tcp://{HERE}:7000"


@pytest.mark.parametrize("insecure", [False, True], ids=["keys", "insecure"])
def test_a_replica_on_another_host_follows_its_trainer(tmp_path: Path, insecure: bool) -> None:
    def befall(**what: Any) -> None:
        hosts.link.say(what)
        assert hosts.link.hear() == "done"

    options = {"insecure": True} if insecure else {}
    with two_hosts() as hosts, Child(train, str(tmp_path / "run"), ADDRESS, options, within=hosts.here) as trainer:
        assert trainer.hear() == ADDRESS
        key = tmp_path / "copy.key"
        shutil.copy(tmp_path / "run" / "run.key", key)
        with Child(replicate, ADDRESS, str(key), within=hosts.there) as replica:
            assert replica.hear() == "ready"
            # when versions are published, while the cable is good, slow, and lossy
            for version, cable in enumerate(({}, {"delay_s": 0.005}, {"delay_s": 0.002, "loss": 0.02}), 1):
                befall(**cable)
                trainer.say("publish")
                total = trainer.hear()
                # then each arrives, the later ones as what differs
                got, encoding, moved, nbytes = replica.hear()
                assert got == [version, total]
                assert encoding == ("full" if version == 1 else "delta")
                assert moved == nbytes if version == 1 else moved < nbytes / 20
            befall(delay_s=0.0, loss=0.0)
            # and when the trainer dies, the replica has what it had
            trainer.kill()
            replica.say("what is loaded")
            assert replica.hear() == [3, total]
