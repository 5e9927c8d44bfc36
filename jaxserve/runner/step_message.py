"""Planned steps as bytes: what host 0 sends to the others. msgpack; arrays as dtype, shape and their memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from jaxserve.runner.planned_step import PlannedSamples, PlannedStep

_ARRAY = 1  # msgpack extension type
_DTYPES = ("int32", "int16", "float32", "int64")


class _Frame(msgspec.Struct, array_like=True):
    """One of the two."""

    step: PlannedStep | None = None
    samples: PlannedSamples | None = None


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray) or value.dtype.name not in _DTYPES:
        raise TypeError(f"a step cannot carry {type(value).__name__}")
    head = msgspec.msgpack.encode((value.dtype.name, value.shape))
    return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(2, "big") + head + value.tobytes())


def _decode_extension(code: int, data: memoryview) -> np.ndarray:
    size = int.from_bytes(data[:2], "big")
    name, shape = msgspec.msgpack.decode(data[2 : 2 + size], type=tuple[str, tuple[int, ...]])
    if code != _ARRAY or name not in _DTYPES:
        raise ValueError(f"an array of a step: got type {code}, {name!r}")
    return np.frombuffer(data[2 + size :], name).reshape(shape).copy()


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise TypeError(f"got {type(value).__name__} for {kind}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(_Frame, dec_hook=_decode_array, ext_hook=_decode_extension)


def encode_step(planned: PlannedStep | PlannedSamples) -> bytes:
    frame = _Frame(step=planned) if isinstance(planned, PlannedStep) else _Frame(samples=planned)
    return _encoder.encode(frame)


def decode_step(data: bytes) -> PlannedStep | PlannedSamples:
    """Raises msgspec.DecodeError or ValueError for anything else."""
    frame = _decoder.decode(data)
    planned = frame.step if frame.step is not None else frame.samples
    if planned is None:
        raise ValueError("a message without a step")
    return planned
