"""The contract of stores, kept by those of the SDK. Those of contrib run it in their own tests."""

from collections.abc import Iterator

import pytest

from asyncflow_sdk.testing.store_contract import StoreContract, StoredRun


class TestShared(StoreContract):
    homes = False

    @pytest.fixture
    def stored(self) -> Iterator[StoredRun]:
        with StoredRun() as stored:
            yield stored


class TestInline(StoreContract):
    homes = False

    @pytest.fixture
    def stored(self) -> Iterator[StoredRun]:
        with StoredRun(shared_memory=False) as stored:
            yield stored


class TestHosts(StoreContract):
    @pytest.fixture
    def stored(self) -> Iterator[StoredRun]:
        with StoredRun(store="hosts", shared_memory=False) as stored:
            stored.start_unit()
            yield stored
