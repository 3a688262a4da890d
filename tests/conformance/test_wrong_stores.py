"""The kit, of stores: each check finds the store that is wrong in it, and those that ship pass."""

from pathlib import Path

import pytest
from plugin_packages import install_plugin
from wrong_stores import FAULTS, FOLDER

from asyncflow_sdk.testing import Conformance, checks_of

HERE = Path(__file__).parent
PLUGIN = f"""
import sys
import asyncflow_sdk as af
sys.path += {[str(HERE), str(HERE.parent)]}
@af.hookimpl
def asyncflow_adapters():
    from wrong_stores import ADAPTERS
    return ADAPTERS
"""


@pytest.mark.parametrize("name", ["local", "hosts"])
def test_what_ships(name: str) -> None:
    report = Conformance("store", name).run()

    assert report.ok, report.to_dict()
    assert report.level == "full"


def test_there_is_a_wrong_store_for_each_check() -> None:
    assert {check for check, *_ in FAULTS.values()} == {each.name for each in checks_of("store")}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_caught(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, "af_wrong_stores", PLUGIN)
    check, says, _ = FAULTS[fault]
    folder = tmp_path / "folder"
    folder.mkdir()
    name, options = ("wrong-folder", {"folder": str(folder)}) if fault in FOLDER else ("wrong-local", {})

    report = Conformance("store", name, options={"fault": fault, **options}, only=[check]).run()

    assert [result.outcome for result in report.results] == ["failed"]
    assert says in report.results[0].detail
