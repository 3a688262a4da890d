"""Where version directories are: a path that can be written, found on other hosts, and nothing outside of it."""

from pathlib import Path

import msgspec
import pytest
from transport_ends import names, publishing, tensors

from asyncflow_sdk.errors import ConfigError, DigestMismatch, ProtocolError, WeightError
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.testing.transport_harness import TransportHarness
from asyncflow_sdk.weights import make_transport

pytestmark = pytest.mark.fast
PATH = "ASYNCFLOW_WEIGHTS_PATH"


def test_a_path_is_needed_and_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for options, reason in (
        ({}, 'needs a path .*for example.*path="/mnt/shared'),
        ({"path": ""}, "needs a path"),
        ({"path": tmp_path / "file"}, "cannot write into .*file: File exists"),
        ({"path": tmp_path / "file" / "inside"}, 'cannot write into .*Not a directory.*for example path="/mnt'),
        ({"path": "/proc/self"}, "cannot write into /proc/self"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make_transport("file", **options).sender(Host(directory=tmp_path, name="1-0"))


def test_where_names_only_the_version_it_is_of(files: TransportHarness, path: Path, tmp_path: Path) -> None:
    # given versions that exist, and one outside of the path
    one, two = (files.publish(version, tensors(version)) for version in (1, 2))
    (tmp_path / "version-00000002").symlink_to(path / "version-00000002")
    receiver = files.receiver()
    for place in (
        (str(path), "version-00000001"),
        (str(path), "../weights/version-00000002"),
        (str(path), "version-00000002/"),
        (str(path), "version-00000002/../version-00000002"),
        (str(path), "version-2"),
        (str(path), "version-00000002-rank-1"),
        (str(path), "version-٠٠٠٠٠٠٠٢"),
        (str(path), ""),
        ("weights", "version-00000002"),
        ("", "version-00000002"),
    ):
        with pytest.raises(ProtocolError, match="version 2: what its publisher says of its place cannot be read"):
            files.fetch(receiver, two, where=msgspec.msgpack.encode(place))
    with pytest.raises(DigestMismatch, match="symbolic link"):
        files.fetch(receiver, two, where=msgspec.msgpack.encode((str(tmp_path), "version-00000002")))
    one.check(files.fetch(receiver, one))


def test_a_directory_that_is_mounted_elsewhere_is_found_by_the_environment(
    files: TransportHarness, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = files.publish(1, tensors())
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(WeightError, match="version 1: .*weights.* is not on this host.*ASYNCFLOW_WEIGHTS_PATH"):
        files.fetch(files.receiver(), sent)
    monkeypatch.setenv(PATH, str(tmp_path / "elsewhere"))
    sent.check(files.fetch(files.receiver(), sent))
    (tmp_path / "elsewhere").rename(path)


def test_a_place_that_no_host_can_have_is_an_error_of_the_sdk(files: TransportHarness, path: Path) -> None:
    sent = files.publish(1, tensors())
    receiver = files.receiver()
    good = msgspec.msgpack.encode((str(path), "version-00000001"))
    for where, error in (
        (msgspec.msgpack.encode(("/" + "x" * 5000, "version-00000001")), WeightError),
        (msgspec.msgpack.encode(("/x" * 5000, "version-00000001")), WeightError),
        (b"\x93" + good[1:] + b"\x91" * 100_000 + b"\xc0", ProtocolError),
        (b"\x91" * 100_000 + b"\xc0", ProtocolError),
    ):
        with pytest.raises(error, match="^version 1: "):
            files.fetch(receiver, sent, where=where)
    sent.check(files.fetch(receiver, sent))


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with publishing("~/weights") as ends:
        sent = ends.publish(1, tensors())
        assert names(tmp_path / "home" / "weights") == ["version-00000001"]
        monkeypatch.setenv(PATH, "~/weights")
        sent.check(ends.fetch(ends.receiver(), sent))
    with pytest.raises(ConfigError, match="cannot write into ~nobody-of-this-name/weights: .*home"):
        make_transport("file", path="~nobody-of-this-name/weights").sender(Host(directory=None, name="1-0"))
    assert names(tmp_path) == ["home"]
