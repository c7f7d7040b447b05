"""A DLPack consumer by ctypes: takes capsules of both kinds as another framework would."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

api = ctypes.pythonapi
api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_void_p]

# CFUNCTYPE lets go of the GIL around the call, as a framework's own thread would run without it.
Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Legacy(ctypes.Structure):
    _fields_ = (
        ("tensor", Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


KINDS = {b"dltensor": Legacy, b"dltensor_versioned": Versioned}
# Renamed capsules keep the pointer to their name, so it has to live as long as they may.
_USED = {name: ctypes.create_string_buffer(b"used_" + name) for name in KINDS}


@dataclass
class Taken:
    """What a consumer owns after it took a capsule: it must call `drop` exactly once."""

    name: bytes
    managed: Any
    address: int
    capsule: Any = field(repr=False)

    @property
    def tensor(self) -> Tensor:
        return self.managed.tensor

    def values(self) -> list[int]:
        count = self.tensor.shape[0]
        return list((ctypes.c_int32 * count).from_address(self.tensor.data)) if count else []

    def drop(self) -> None:
        Deleter(self.managed.deleter)(self.address)


def capsule_name(capsule: Any) -> bytes:
    (name,) = [name for name in KINDS if api.PyCapsule_IsValid(capsule, name)]
    return name


def take(capsule: Any) -> Taken:
    """Take ownership: read the struct, rename the capsule so that its destructor does nothing."""
    name = capsule_name(capsule)
    address = api.PyCapsule_GetPointer(capsule, name)
    assert api.PyCapsule_SetName(capsule, ctypes.addressof(_USED[name])) == 0
    return Taken(name, KINDS[name].from_address(address), address, capsule)
