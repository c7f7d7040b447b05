"""The sessions that an assembler knows."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._index cimport EntryTable, Index
from kalos_ctx._planner cimport kalos_plan_resume
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._session_view cimport SessionView
from kalos_ctx._window_parts cimport Head, WindowParts

cdef enum:
    WALKS = 4          # resume states kept for a session

cdef object shown(bytes name)


cdef class TenantRef:
    cdef bytes name
    cdef uint64_t slot_off         # 0: no slot when `num_slots` slots were there
    cdef uint64_t name_lsn
    cdef uint64_t num_slots


cdef class SessionRef:
    """What the assembler remembers of a session. Nothing that a window depends on."""
    cdef bytes tenant
    cdef bytes session
    cdef object key
    cdef object shown              # the name as `ContextWindow.session` gives it
    cdef TenantRef owner
    cdef uint64_t slot_off         # 0: look it up
    cdef uint64_t name_lsn
    cdef uint64_t tenant_key
    cdef kalos_plan_resume walks[WALKS]
    cdef uint64_t walk_states[WALKS]   # epoch or view version that each walk is of
    cdef uint32_t next_walk
    cdef SessionView view
    cdef Head head
    cdef uint64_t head_tenant
    cdef uint64_t head_session
    cdef object head_date
    cdef bint head_system
    cdef WindowParts previous      # of the window before
    cdef void* latest              # newest live ContextWindow, not counted as a reference


cdef class SessionTable:
    cdef StoreReader reader
    cdef readonly bint closed
    cdef Index index               # as last seen; another one means another generation
    cdef dict young                # sessions by key; every ROOM the old half goes
    cdef dict old
    cdef dict tenants
    cdef dict live                 # sessions that have live windows
    cdef dict heads                # heads by what they are made of
    cdef object views              # sessions that have a view, the least recently used first
    cdef size_t view_bytes
    cdef size_t parts_bytes        # of the windows before
    cdef object clock
    cdef bint dated                # the head depends on the time
    cdef int follow(self) except -1
    cdef SessionRef find_session(self, bytes tenant, bytes session, EntryTable* table)
    cdef SessionRef remember(self, object key, bytes tenant, bytes session)
    cdef uint64_t tenant_segments(self, SessionRef ref) except? 1
    cdef Head head_of(self, SessionRef ref, EntryTable* table, bint include_system)
    cdef SessionView view_of(self, SessionRef ref, EntryTable* table, uint32_t count)
    cdef SessionView new_view(self, EntryTable* table, uint32_t count, double now)
    cdef int keep_view(self, SessionRef ref, SessionView view) except -1
    cdef int keep_parts(self, SessionRef ref, WindowParts parts) except -1
