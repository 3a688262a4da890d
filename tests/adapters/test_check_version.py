"""The check of a version against a model's tensors, before an engine sees it."""

from types import SimpleNamespace

import pytest

from asyncflow_http.model_folder import check_version
from asyncflow_sdk.errors import WeightMismatch
from asyncflow_sdk.interfaces import TensorType

HELD = {name: TensorType("float32", (2,)) for name in ("w", "mtp.norm.weight")}


def test_a_version_may_lack_only_what_it_names_as_untrained() -> None:
    given = {"w": TensorType("float32", (2,))}
    check_version(
        SimpleNamespace(version=1, tensors=given, untrained=["mtp.norm.weight"]), HELD, lambda held: (held,)
    )
    with pytest.raises(WeightMismatch, match="mtp.norm.weight: missing"):
        check_version(SimpleNamespace(version=1, tensors=given, untrained=[]), HELD, lambda held: (held,))


def test_a_version_with_a_tensor_that_it_names_as_untrained_is_refused() -> None:
    update = SimpleNamespace(version=1, tensors=HELD, untrained=["w"])
    with pytest.raises(WeightMismatch, match="w: the version has it, and says that it is not trained"):
        check_version(update, HELD, lambda held: (held,))
