"""Session in, window out: the compiled part of the assembler."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kalos_ctx._context_window cimport ContextWindow
from kalos_ctx._driver cimport kalos_cu_handle
from kalos_ctx._gathering cimport Gatherer
from kalos_ctx._index cimport EntryTable
from kalos_ctx._session_table cimport SessionRef, SessionTable
from kalos_ctx._session_view cimport history
from kalos_ctx._window_parts cimport Rules, WindowParts
from kalos_ctx._windows cimport WindowPool


cdef class AssemblerCore(SessionTable):
    cdef readonly object store
    cdef readonly WindowPool pool
    cdef readonly Gatherer gatherer
    cdef object prompt
    cdef const int32_t* prompt_ids
    cdef uint32_t prompt_length
    cdef object starts             # uint8 array by token ID, or None
    cdef object last_policy
    cdef Rules last_rules
    cdef bytes name_of(self, object value, str what, bint empty)
    cdef int64_t tokens_of(self, object value, str what) except -2
    cdef Rules rules_of(self, object policy)
    cdef int open_history(self, SessionRef ref, WindowParts parts, EntryTable* table, Rules rules,
                          history* turns) except -1
    cdef int bind_table(self, EntryTable* table, uint32_t count, history* turns) except -1
    cdef int plan_history(self, SessionRef ref, WindowParts parts, history* turns,
                          bint keep) except -1
    cdef int check_plan(self, WindowParts parts, history* turns, Rules rules,
                        uint64_t used) except -1
    cdef WindowParts make_parts(self, bytes tenant, bytes session, int64_t max_tokens,
                                int64_t reserve, Rules rules, int64_t as_of, tuple recall,
                                bint explain)
    cdef int fill_parts(self, SessionRef ref, WindowParts parts, EntryTable* table,
                        int64_t max_tokens, int64_t reserve, Rules rules, int64_t as_of,
                        tuple recall) except -1
    cdef int lay_out(self, WindowParts parts, history* turns, Rules rules, list taken,
                     object placement) except -1
    cdef int lay_passages(self, WindowParts parts, list taken) except -1
    cdef list recalled(self, WindowParts parts, history* turns, Rules rules, tuple recall,
                       uint64_t fixed)
    cdef tuple read_passage(self, object place)
    cdef ContextWindow build_once(self, bytes tenant, bytes session, int64_t max_tokens,
                                  int64_t reserve, Rules rules, int64_t as_of, tuple recall,
                                  kalos_cu_handle stream)
    cdef int settle_parts(self, WindowParts parts, const int32_t* tokens) except -1
    cdef WindowParts gather_into(self, bytes tenant, bytes session, int64_t max_tokens,
                                 int64_t reserve, Rules rules, int64_t as_of, int32_t* out,
                                 uint64_t room)
    cdef object restless(self)
    cdef int explain(self, WindowParts parts, EntryTable* table) except -1
    cdef object run(self, bint only_plan, session, tenant, max_tokens, reserve, tuple recall, as_of,
                    policy, stream, out)
