"""What the kit takes for the dtype of a policy."""

import numpy as np
import pytest

from asyncflow_sdk.testing.kit.precision import dtype_of

pytestmark = pytest.mark.fast


def test_the_dtype_of_a_policy_is_that_of_most_of_its_weights() -> None:
    # three tensors: the two small ones together have more elements than the large one
    weights = {
        "a": np.zeros(10, np.float32),
        "b": np.zeros(10, np.float32),
        "c": np.zeros(15, np.float16),
    }
    assert dtype_of(weights) == "float32"
