"""Names of element types, in torch's spelling, with their numpy dtypes and safetensors codes.

Element types unknown to numpy (``complex32``, packed 4-bit floats, torch's sub-byte integers of one byte each) get
an opaque numpy dtype of the same size: their values are copied bit for bit and never interpreted. Quantised tensors
are refused, because their values depend on a scale and a zero point stored beside the bytes."""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ConfigError, SchemaError

_TABLE: dict[str, tuple[Any, str]] = {  # name: (numpy dtype, safetensors code or "")
    "bool": (np.bool_, "BOOL"),
    "uint8": (np.uint8, "U8"), "int8": (np.int8, "I8"),
    "uint16": (np.uint16, "U16"), "int16": (np.int16, "I16"),
    "uint32": (np.uint32, "U32"), "int32": (np.int32, "I32"),
    "uint64": (np.uint64, "U64"), "int64": (np.int64, "I64"),
    "float16": (np.float16, "F16"), "float32": (np.float32, "F32"), "float64": (np.float64, "F64"),
    "bfloat16": (ml_dtypes.bfloat16, "BF16"),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    "float8_e5m2": (ml_dtypes.float8_e5m2, "F8_E5M2"),
    "float8_e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": (ml_dtypes.float8_e8m0fnu, "F8_E8M0"),
    "float4_e2m1fn_x2": ([("float4_x2", np.uint8)], ""),
    "complex32": ([("re", np.float16), ("im", np.float16)], ""),
    "complex64": (np.complex64, "C64"), "complex128": (np.complex128, ""),
    "bits16": ([("bits16", np.uint16)], ""),
} | {
    name: ([(name, np.uint8)], "")
    for name in (
        "bits8", "bits1x8", "bits2x4", "bits4x2",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    )
}  # fmt: skip
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for name, (dtype, _) in _TABLE.items()}
SAFETENSORS_CODES = {name: code for name, (_, code) in _TABLE.items() if code}
FLOATS = tuple(name for name in _TABLE if name.startswith(("float16", "bfloat16", "float32", "float64", "float8_")))
"""Floating-point dtypes, to which weights can be converted."""
_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
_SYNONYMS = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "double": "float64",
}  # fmt: skip


def carrier(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for a dtype's name. Raises SchemaError for an unknown name."""
    try:
        return NUMPY_DTYPES[name]
    except KeyError:
        raise SchemaError(f"dtype {name!r} is not supported; known: {', '.join(sorted(NUMPY_DTYPES))}") from None


def floating_name(dtype: Any) -> str:
    """Return the name in ``FLOATS`` of a dtype or synonym ("half": "float16"), else ""."""
    plain = str(dtype).removeprefix("torch.")
    plain = _SYNONYMS.get(plain, plain)
    return plain if plain in FLOATS else ""


def check_floating(dtype: Any) -> None:
    """Raise ConfigError, suggesting a name, unless ``dtype`` is a name in ``FLOATS``."""
    if isinstance(dtype, str) and dtype in FLOATS:
        return
    plain = str(dtype).removeprefix("torch.")
    near = floating_name(dtype) or next(iter(difflib.get_close_matches(plain, FLOATS, 1)), "")
    hint = f": use {near!r}" if near else ""
    raise ConfigError(f"dtype must be the name of one of {', '.join(FLOATS)}, not {dtype!r}{hint}")


@functools.lru_cache(256)  # the hash of a dtype depends on its byte order
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a numpy dtype's name. Raises SchemaError for objects, and if unknown to torch."""
    try:
        return _NAMES.get(dtype) or _NAMES[dtype.newbyteorder("=")]
    except KeyError:
        hint = "; convert it to numbers, text or bytes first" if dtype.hasobject else ""
        raise SchemaError(f"numpy dtype {dtype} cannot be stored{hint}") from None


def is_torch(value: object) -> bool:
    """True if ``value`` is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def storable(tensor: Any) -> str:
    """Return the name of a tensor's dtype. Raises SchemaError for sparse, quantised, meta and unknown ones."""
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        raise SchemaError(f"a quantised tensor of {name} cannot be stored; store int_repr(), scale and zero point")
    if tensor.layout != sys.modules["torch"].strided:
        raise SchemaError(f"a {tensor.layout} tensor of {name} cannot be stored; make it dense first")
    if tensor.is_meta:
        raise SchemaError(f"a tensor of {name} on the meta device holds no values")
    carrier(name)
    return name


def from_torch(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a numpy view of a tensor's elements, of shape (*tensor.shape,) and dtype ``carrier``; a copy only if the
    tensor is not contiguous or not on the CPU. Raises SchemaError as ``storable`` does."""
    torch, dtype = sys.modules["torch"], carrier(storable(tensor))
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    return raw.view(dtype).reshape(tuple(tensor.shape))


def to_torch(array: np.ndarray[Any, Any]) -> Any:
    """Return a torch tensor over the memory of ``array``, which must be writable and contiguous."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise ModuleNotFoundError(
            "torch is needed for this; install it with: pip install 'asyncflow-sdk[torch]'"
        ) from None
    dtype = getattr(torch, dtype_name(array.dtype))
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).reshape(array.shape)
