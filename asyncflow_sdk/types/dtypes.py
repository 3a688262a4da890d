"""Names of element types, as torch says them, and the numpy dtype that carries each.

A dtype numpy has no number for (``complex32``, packed 4-bit floats, torch's sub-byte integers, which take a
byte each) is carried as opaque bytes of the same size: values are moved bit for bit, never interpreted.
Quantised tensors are refused: their values lie in a scale and a zero point beside the bytes.
"""

from __future__ import annotations

import difflib
import sys
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ConfigError, SchemaError

_CARRIER: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
} | {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
} | {
    "complex32": np.dtype([("re", np.float16), ("im", np.float16)]),
    "float4_e2m1fn_x2": np.dtype([("float4_x2", np.uint8)]),
    "bits16": np.dtype([("bits16", np.uint16)]),
} | {
    name: np.dtype([(name, np.uint8)])
    for name in (
        "bits8", "bits1x8", "bits2x4", "bits4x2",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    )
}  # fmt: skip
_NAME: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _CARRIER.items()}


def carrier(name: str) -> np.dtype[Any]:
    """The numpy dtype that carries elements of dtype ``name``. Raises SchemaError for an unknown name."""
    try:
        return _CARRIER[name]
    except KeyError:
        raise SchemaError(f"dtype {name!r} is not supported; known: {', '.join(sorted(_CARRIER))}") from None


FLOATS = ("float16", "bfloat16", "float32", "float64", *(name for name in _CARRIER if name.startswith("float8_")))
"""What floating-point tensors may be converted to."""
_ALSO = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "double": "float64",
}


def check_floating(dtype: Any) -> None:
    """Raises ConfigError, with the name that may be meant, unless ``dtype`` names one of floating-point numbers."""
    if isinstance(dtype, str) and dtype in FLOATS:
        return
    plain = str(dtype).removeprefix("torch.")
    near = (
        plain if plain in FLOATS else _ALSO.get(plain) or next(iter(difflib.get_close_matches(plain, FLOATS, 1)), "")
    )
    meant = f": say {near!r}" if near else ""
    raise ConfigError(f"dtype is one of {', '.join(FLOATS)}, by its name, not {dtype!r}{meant}")


def floating_name(name: Any) -> str:
    """The name of a dtype of floating-point numbers, of which torch and others have several: "half" is "float16". "" for what is
    none."""
    plain = str(name).removeprefix("torch.")
    plain = _ALSO.get(plain, plain)
    return plain if plain in FLOATS else ""


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a numpy dtype. Raises SchemaError for object arrays and what torch does not know."""
    name = _NAME.get(dtype)  # dtypes hash by their byte order too
    try:
        return name or _NAME[dtype.newbyteorder("=")]
    except KeyError:
        hint = "; convert it to numbers, text or bytes first" if dtype.hasobject else ""
        raise SchemaError(f"numpy dtype {dtype} cannot be stored{hint}") from None


def is_torch(value: object) -> bool:
    """Whether ``value`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def storable(tensor: Any) -> str:
    """The name of a torch tensor's dtype. Raises SchemaError for layouts and dtypes that have no plain bytes
    (sparse, quantised, meta)."""
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        raise SchemaError(
            f"a quantised tensor of {name} cannot be stored; store its int_repr(), scale and zero point"
        )
    if tensor.layout != sys.modules["torch"].strided:
        raise SchemaError(f"a {tensor.layout} tensor of {name} cannot be stored; make it dense first")
    if tensor.is_meta:
        raise SchemaError(f"a tensor of {name} on the meta device holds no values")
    carrier(name)
    return name


def from_torch(tensor: Any) -> np.ndarray[Any, Any]:
    """A numpy view of a tensor's elements (a copy only when it is not contiguous or not on the CPU).

    Shape (*tensor.shape,), the carrier of its dtype. Raises SchemaError as ``storable`` does.
    """
    torch, dtype = sys.modules["torch"], carrier(storable(tensor))
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    return raw.view(dtype).reshape(tuple(tensor.shape))


def to_torch(array: np.ndarray[Any, Any]) -> Any:
    """A torch tensor over the memory of ``array``, which must be writable and contiguous."""
    import importlib

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
