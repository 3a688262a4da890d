"""Every dtype torch knows goes into a column and comes out bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Batch, Ragged, carrier, dtype_name, from_torch, pack, to_torch

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", "ignore:.*quantized tensor")

# A quantised tensor's values are its bytes, a scale and a zero point: bytes alone are not the tensor.
QUANTISED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
KNOWN_TO_TORCH = sorted(
    {str(each).removeprefix("torch.") for each in vars(torch).values() if type(each) is torch.dtype}
)
PLAIN = [name for name in KNOWN_TO_TORCH if name not in QUANTISED]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


def tensor_of(name: str, raw: bytes) -> torch.Tensor:
    """A tensor over arbitrary bytes: NaN payloads, -0.0, infinities and subnormals included."""
    dtype = getattr(torch, name)
    whole = np.frombuffer(raw, np.uint8)[: len(raw) // dtype.itemsize * dtype.itemsize].copy()
    return torch.from_numpy(whole % 2 if name == "bool" else whole).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_torch_knows_the_dtypes_that_matter() -> None:
    assert {"bfloat16", "bool", "complex32", "float4_e2m1fn_x2", "float8_e4m3fn", "float8_e8m0fnu"} <= set(PLAIN)


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=15)
@given(raw=st.binary(min_size=64, max_size=64))
def test_any_bits_of_any_dtype_come_back(name: str, raw: bytes) -> None:
    # given a tensor of any bits
    tensor = tensor_of(name, raw).reshape(-1, 2)
    # when it goes through a fixed and a ragged column
    ragged = Ragged.from_lengths(from_torch(tensor), np.array([1, len(tensor) - 1]))
    batch = Batch.of({"fixed": tensor[:2], "ragged": ragged})
    # then dtype, shape and every bit are the same
    for found, wanted in ((batch.torch("fixed"), tensor[:2]), (batch.torch("ragged")[0], tensor)):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert bits(found) == bits(wanted)
    assert batch.torch("ragged")[1].tolist() == [0, 1, len(tensor)]


@pytest.mark.parametrize("name", FLOATS)
def test_special_values_keep_their_bits(name: str) -> None:
    # given -0.0, infinities, both signs of NaN and the smallest subnormal
    dtype = getattr(torch, name)
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")], dtype=dtype)
    smallest = torch.zeros(dtype.itemsize, dtype=torch.uint8)
    smallest[0] = 1
    values = torch.cat([values, -values, smallest.view(dtype)])
    # when / then
    assert bits(Batch.of({"x": values}).torch("x")) == bits(values)
    assert Batch.of({"x": values})["x"].tobytes() == bits(values)


@pytest.mark.parametrize("name", sorted(QUANTISED & {"qint8", "quint8", "qint32"}))
def test_quantised_tensors_are_refused_by_name(name: str) -> None:
    quantised = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, getattr(torch, name))
    with pytest.raises(SchemaError, match=f"column 'w': a quantised tensor of {name}"):
        pack("w", quantised)


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_bytes_that_claim_to_be_quantised_are_refused(name: str) -> None:
    with pytest.raises(SchemaError, match=name):
        pack("w", torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name)))


@pytest.mark.parametrize("name", PLAIN)
def test_names_and_carriers_agree(name: str) -> None:
    assert dtype_name(carrier(name)) == name
    assert carrier(name).itemsize == getattr(torch, name).itemsize


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_and_zero_size(name: str) -> None:
    # given no rows, and rows of no elements
    for shape in ((0,), (0, 3), (4, 0)):
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        # when / then
        found = Batch.of({"x": tensor}).torch("x")
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)


def test_layouts_without_plain_bytes_are_refused() -> None:
    with pytest.raises(SchemaError, match="sparse"):
        pack("x", torch.eye(3).to_sparse())
    with pytest.raises(SchemaError, match="meta"):
        pack("x", torch.empty(3, device="meta"))


def test_numpy_dtypes_torch_does_not_know_are_refused_by_name() -> None:
    for dtype in ("datetime64[s]", "V3", "float128", "complex256"):
        with pytest.raises(SchemaError, match="column 'x': numpy dtype"):
            pack("x", np.zeros(3, dtype))
    with pytest.raises(SchemaError, match="no_such"):
        carrier("no_such")


def test_views_that_torch_only_pretends_to_have_negated_or_conjugated() -> None:
    # given tensors whose bits differ from their values until they are resolved
    z = torch.tensor([1 + 2j, 3 - 4j])
    # when / then
    assert from_torch(z.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert from_torch(z.conj().imag).tolist() == [-2.0, 4.0]
    assert from_torch(torch.nn.Parameter(torch.ones(2))).tolist() == [1.0, 1.0]


def test_numpy_gives_and_takes_bfloat16_and_float8() -> None:
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn):
        array = np.array([0.5, -0.0, 1.5], dtype)
        column = pack("x", array)
        assert column.values.dtype == dtype
        assert to_torch(column.values.copy()).float().tolist() == [0.5, -0.0, 1.5]
