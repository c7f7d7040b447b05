"""The CPU backend without the GIL: what the assembler calls.

The functions are exported from one module and not included as a header, so that a process has one
set of helper threads.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "_rowmath.h" nogil:
    enum:
        KALOS_METRIC_COSINE
        KALOS_METRIC_IP
        KALOS_METRIC_L2
        KALOS_SCORE_LANES
        KALOS_QUERY_ZERO
    uint64_t KALOS_PADDED_DIM(uint64_t dim)


cdef extern from "_recall.h" nogil:
    enum:
        KALOS_MAX_HITS
        KALOS_MAX_QUERIES
        KALOS_LEVEL_AUTO

    ctypedef struct kalos_rows:
        const void *const *segments
        const float *const *factors
        uint64_t rows_per_segment
        uint64_t stride_nbytes
        uint64_t factor_stride_nbytes
        uint32_t dim
        uint32_t half

    ctypedef struct kalos_row_run:
        uint64_t start
        uint64_t count

    ctypedef struct kalos_scan:
        kalos_rows rows
        const kalos_row_run *extents
        uint64_t num_extents
        const uint64_t *tombstones
        const uint64_t *allowed
        const uint64_t *ids
        const float *queries
        uint32_t num_queries
        uint32_t k
        int metric
        float min_score
        int threads
        int level

    ctypedef struct kalos_hit:
        float score
        uint32_t row
        uint64_t id


# Exact top-k of a checked scan. hits: [num_queries][k], counts: [num_queries]. 0 or -ENOMEM.
cdef int c_topk(const kalos_scan *scan, kalos_hit *hits, uint32_t *counts) noexcept nogil

# Scores of the listed rows against one prepared query, in the order of the list.
cdef void c_score_rows(
    const kalos_rows *rows, const uint32_t *listed, uint64_t count, const float *query,
    int metric, int level, float *scores,
) noexcept nogil

# Fill `prepared` (KALOS_PADDED_DIM(dim) floats). -1: good; KALOS_QUERY_ZERO; else the place of a
# value that is not finite.
cdef int64_t c_prepare_query(
    const float *query, uint64_t dim, int metric, float *prepared
) noexcept nogil

# The least float32 that is not below a bound; -inf for None. Raises for NaN and for no number.
cdef float c_lower_bound(object value) except? -1
