"""The sessions that an assembler knows: where they lie, their heads and views.

Nothing that a window depends on: with it and without it a window is the same.
"""

from collections import OrderedDict

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from kalos_ctx._index cimport EntryTable, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_IMAGE_DEAD, KALOS_IMAGE_TTL, KALOS_ROLE_USER, KALOS_SLOT_SESSION, KALOS_SLOT_TENANT,
    kalos_entry, kalos_image,
)
from kalos_ctx._session_view cimport SessionView, kalos_span
from kalos_ctx._window_parts cimport Head, WindowParts
from kalos_ctx._windows cimport c_tenant_key

from kalos_ctx.errors import SessionNotFound, StoreClosed

cdef extern from *:
    """
    #define KALOS_NUM_SLOTS(head) __atomic_load_n(&(head)->num_slots, __ATOMIC_ACQUIRE)
    """
    uint64_t KALOS_NUM_SLOTS(void* head) nogil

cdef Py_ssize_t ROOM = 4096         # sessions remembered are one to two times this
cdef Py_ssize_t HEADS_ROOM = 1024
cdef size_t VIEW_BYTES = 128 << 20
cdef size_t PARTS_BYTES = 64 << 20


class Moved(Exception):
    """The session changed under the call."""


cdef object shown(bytes name):
    """A name as it is given out: str, or bytes where it is not UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name


cdef class TenantRef:
    pass


cdef class SessionRef:
    pass


cdef class SessionTable:
    """Sessions by name. A subclass gives the hooks `make_head`, `date_key`, `read_summaries`."""

    def __cinit__(self, *args, **kwargs):
        self.young, self.old, self.tenants, self.live, self.heads = {}, {}, {}, {}, {}
        self.views = OrderedDict()

    def set_dated(self, bint dated):
        """Say whether heads depend on the time."""
        self.dated = dated

    # ---- Sessions -------------------------------------------------------------------------------

    cdef int follow(self) except -1:
        """Called first: is everything open, and are these still the files we remember?"""
        if self.closed:
            raise StoreClosed("the assembler is closed")
        self.reader.enter()
        if self.reader.index is not self.index:
            for ref in [*self.young.values(), *self.old.values(), *self.live.values()]:
                self.strip(ref)
            self.tenants.clear()
            self.heads.clear()
            self.index = self.reader.index
        return 0

    cdef SessionRef remember(self, object key, bytes tenant, bytes session):
        """The session's reference, made where there is none."""
        cdef SessionRef ref = self.young.get(key)
        if ref is not None:
            return ref
        ref = self.old.pop(key, None)
        if ref is None:
            ref = self.live.get(key)
        if ref is None:
            ref = SessionRef.__new__(SessionRef)
            ref.tenant, ref.session, ref.key = tenant, session, key
            ref.shown = shown(session)
            ref.tenant_key = c_tenant_key(<const unsigned char*><char*>tenant, len(tenant))
        if len(self.young) >= ROOM:
            for gone in self.old.values():
                self.drop_view(gone)
                self.drop_parts(gone)
            self.old = self.young
            self.young = {}
        self.young[key] = ref
        return ref

    def strip(self, SessionRef ref):
        """Forget what depends on where the session lies."""
        ref.slot_off = 0
        ref.owner = None
        ref.head = None
        self.drop_parts(ref)
        memset(ref.walk_states, 0, sizeof(ref.walk_states))
        self.drop_view(ref)

    def forget(self, bytes tenant, bytes session):
        """Forget a session altogether; its live windows stay with their owners."""
        cdef object key = session if not tenant else (tenant, session)
        for table in (self.young, self.old, self.live):
            ref = table.pop(key, None)
            if ref is not None:
                self.strip(ref)

    cdef SessionRef find_session(self, bytes tenant, bytes session, EntryTable* table):
        """The session's reference and its entries; the caller clears the table."""
        cdef object key = session if not tenant else (tenant, session)
        cdef SessionRef ref = self.remember(key, tenant, session)
        cdef kalos_image image
        cdef uint64_t slot_off
        if ref.slot_off:
            self.index.open_table(ref.slot_off, table)
            if table.image.name_lsn == ref.name_lsn and not table.image.flags & KALOS_IMAGE_DEAD:
                return ref
            table_clear(table)
            self.forget(tenant, session)
            ref = self.remember(key, tenant, session)
        slot_off = self.reader.find(KALOS_SLOT_SESSION, tenant, session, &image)
        if slot_off == 0:
            self.forget(tenant, session)
            raise SessionNotFound("there is no such session in this tenant")
        ref.slot_off, ref.name_lsn = slot_off, image.name_lsn
        self.index.open_table(slot_off, table)
        if table.image.name_lsn != ref.name_lsn or table.image.flags & KALOS_IMAGE_DEAD:
            raise Moved()
        return ref

    cdef uint64_t tenant_segments(self, SessionRef ref) except? 1:
        """Log position of the tenant's table of segments, 0 for none."""
        cdef TenantRef owner = ref.owner
        cdef kalos_image image
        cdef uint64_t slots
        if owner is None:
            owner = self.tenants.get(ref.tenant)
            if owner is None:
                owner = TenantRef.__new__(TenantRef)
                owner.name, owner.num_slots = ref.tenant, ~<uint64_t>0
                if len(self.tenants) >= ROOM:
                    self.tenants.clear()
                self.tenants[ref.tenant] = owner
            ref.owner = owner
        if owner.slot_off:
            self.index.read_image(owner.slot_off, &image)
            if image.name_lsn == owner.name_lsn and not image.flags & KALOS_IMAGE_DEAD:
                return image.segments_lsn
            owner.slot_off, owner.num_slots = 0, ~<uint64_t>0
        slots = KALOS_NUM_SLOTS(self.index.header())
        if slots == owner.num_slots:
            return 0
        owner.slot_off = self.reader.find(KALOS_SLOT_TENANT, owner.name, b"", &image)
        owner.num_slots = slots
        if owner.slot_off == 0:
            return 0
        owner.name_lsn = image.name_lsn
        return image.segments_lsn

    cdef Head head_of(self, SessionRef ref, EntryTable* table, bint include_system):
        """The session's pinned segments, encoded."""
        cdef uint64_t theirs = self.tenant_segments(ref), own = table.image.segments_lsn
        cdef object date = self.date_key() if self.dated else None
        cdef Head head = ref.head
        if head is not None and ref.head_tenant == theirs and ref.head_session == own \
                and ref.head_system == include_system and (date is None or date == ref.head_date):
            return head
        key = (theirs, own, include_system, date)
        head = self.heads.get(key)
        if head is None:
            head = self.make_head(
                self.reader.table_bytes(theirs)[0] if theirs else b"",
                self.reader.table_bytes(own)[0] if own else b"", include_system)
            if len(self.heads) >= HEADS_ROOM:
                self.heads.clear()
            self.heads[key] = head
        ref.head, ref.head_tenant, ref.head_session = head, theirs, own
        ref.head_system, ref.head_date = include_system, date
        return head

    # ---- Views ----------------------------------------------------------------------------------

    def drop_view(self, SessionRef ref):
        """Free the session's view, where it has one."""
        if ref.view is not None:
            ref.view = None
            self.view_bytes -= self.views.pop(ref.key, 0)

    def drop_parts(self, SessionRef ref):
        """Forget the session's window before."""
        if ref.previous is not None:
            self.parts_bytes -= ref.previous.spans.room * sizeof(kalos_span)
            ref.previous = None

    cdef int keep_parts(self, SessionRef ref, WindowParts parts) except -1:
        """Remember what a window is made of for the next; all others go where it is too much."""
        cdef SessionRef other
        self.drop_parts(ref)
        self.parts_bytes += parts.spans.room * sizeof(kalos_span)
        if self.parts_bytes > PARTS_BYTES:
            for known in (self.young, self.old, self.live):
                for other in known.values():
                    self.drop_parts(other)
        ref.previous = parts
        return 0

    cdef int keep_view(self, SessionRef ref, SessionView view) except -1:
        """Remember a view; the least recently used go where all take too much memory."""
        cdef size_t nbytes = view.nbytes()
        cdef SessionRef other
        self.view_bytes -= self.views.pop(ref.key, 0)
        ref.view = view
        self.views[ref.key] = nbytes
        self.view_bytes += nbytes
        while self.view_bytes > VIEW_BYTES and len(self.views) > 1:
            key, size = self.views.popitem(last=False)
            self.view_bytes -= size
            for known in (self.young, self.old, self.live):
                other = known.get(key)
                if other is not None:
                    other.view = None
        return 0

    cdef SessionView new_view(self, EntryTable* table, uint32_t count, double now):
        """A view that has looked at nothing yet."""
        cdef SessionView view = SessionView.__new__(SessionView)
        cdef const kalos_entry* e
        view.index = self.index
        view.epoch = table.image.epoch
        view.summaries_lsn = table.image.summaries_lsn
        view.built_at = now
        view.summaries = []
        if view.summaries_lsn:
            view.summaries = self.read_summaries(
                self.reader.table_bytes(view.summaries_lsn)[0], count)
        view.last_user = table.image.last_user
        if count < table.image.num_entries:
            view.last_user = count
            while view.last_user:
                e = table_entry(table, view.last_user - 1)
                self.index.check_entry(e, view.last_user - 1)
                if e.role == KALOS_ROLE_USER:
                    break
                view.last_user -= 1
        return view

    cdef SessionView view_of(self, SessionRef ref, EntryTable* table, uint32_t count):
        """The session's view, up to date, of at least `count` turns."""
        cdef bint past = count < table.image.num_entries
        cdef double now = self.clock() if table.image.flags & KALOS_IMAGE_TTL else 0
        cdef SessionView view = ref.view
        if view is not None and not view.serves(table, self.index, now):
            view = None
        if past and view is not None and (view.any_live or view.summaries):
            view = None
        if view is None:
            view = self.new_view(table, count, now)
            if past:
                view.extend(self.index, self.reader.log, table, count, now)
                return view
        if view.count < table.image.num_entries:
            view.last_user = table.image.last_user
            view.extend(self.index, self.reader.log, table, table.image.num_entries, now)
            if past and view.any_live:
                # A turn that lost its live form since had it then.
                self.keep_view(ref, view)
                view = self.new_view(table, count, now)
                view.extend(self.index, self.reader.log, table, count, now)
                return view
        self.keep_view(ref, view)
        return view

    # ---- Live windows ---------------------------------------------------------------------------

    def live_window(self, key):
        """The latest live window of a session by its key, or None."""
        cdef SessionRef ref = self.live.get(key)
        return None if ref is None or ref.latest == NULL else <object>ref.latest

    def live_keys(self):
        """Keys of the sessions that have live windows."""
        return list(self.live)

    def end(self):
        """Forget everything; live windows stay with their owners."""
        self.closed = True
        for table in (self.young, self.old, self.live):
            for ref in table.values():
                self.strip(ref)
            table.clear()
        self.heads.clear()
