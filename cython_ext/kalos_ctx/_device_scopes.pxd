"""Scopes of recall as a device takes them."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._device cimport Device
from kalos_ctx._lanes cimport DeviceBuffer, Lane
from kalos_ctx._vectors cimport Runs

cdef extern from "kalos_launch.h" nogil:
    ctypedef struct kalos_recall_extent:
        uint32_t begin
        uint32_t end

    ctypedef struct kalos_recall_scope:
        uint64_t allowed
        uint32_t num_extents
        float min_score
        kalos_recall_extent* extents


# The rows of a scope: few extents, or a bitmap of its rows.
cdef class DeviceScope:
    cdef Runs runs                  # whose it is: compared by identity
    cdef DeviceBuffer bitmap        # None: the extents say it all
    cdef kalos_recall_scope scope   # min_score is the call's
    cdef uint32_t begin, end        # rows that hold all extents


cdef class DeviceScopes:
    cdef Device device
    cdef dict kept                  # id(Runs) -> DeviceScope with a bitmap, oldest first
    cdef DeviceScope last           # most calls ask for the scope of the call before
    # `lane` brings a bitmap over where one is needed.
    cdef DeviceScope of(self, Runs runs, Lane lane)
    cdef void clear(self) noexcept
