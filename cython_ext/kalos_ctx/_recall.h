// What a scan is asked and what it answers: plain structs for C, C++ and Cython.
#ifndef KALOS_RECALL_H
#define KALOS_RECALL_H

#include <stdint.h>

#define KALOS_MAX_HITS 1024u  // largest k
#define KALOS_MAX_QUERIES 8u  // queries that share one pass over the rows
#define KALOS_MAX_THREADS 64u

// How a score is computed. All levels give the same bits.
#define KALOS_LEVEL_AUTO (-1)
#define KALOS_LEVEL_REFERENCE \
  0  // one dim after the other, fused multiply-add from double arithmetic
#define KALOS_LEVEL_NATIVE \
  1  // the compiler's own vectors, where its target has a fused multiply-add
#define KALOS_LEVEL_AVX2 2
#define KALOS_LEVEL_AVX512 3

// Rows of one vector file: a list of mappings with the same number of rows each.
typedef struct kalos_rows {
  const void* const* segments;  // base of each mapping: float32 or float16, row after row
  const float* const* factors;  // cosine: the factors of the same rows, same division; else NULL
  uint64_t rows_per_segment;
  uint64_t stride_nbytes;         // from row to row
  uint64_t factor_stride_nbytes;  // from factor to factor
  uint32_t dim;
  uint32_t half;  // 1: float16
} kalos_rows;

typedef struct kalos_row_run {
  uint64_t start;  // first row
  uint64_t count;  // rows
} kalos_row_run;

typedef struct kalos_scan {
  kalos_rows rows;
  const kalos_row_run* extents;  // ascending, disjoint: the scope
  uint64_t num_extents;
  const uint64_t* tombstones;  // bit r: row r is dead. NULL: none
  const uint64_t* allowed;     // bit r: row r passes the filter. NULL: all pass
  const uint64_t* ids;         // one a row, breaks ties. NULL: the row number does
  const float* queries;        // num_queries prepared queries of KALOS_PADDED_DIM(dim) each
  uint32_t num_queries;        // 1 to KALOS_MAX_QUERIES
  uint32_t k;                  // 1 to KALOS_MAX_HITS
  int metric;                  // KALOS_METRIC_*
  float min_score;             // inclusive; -inf for none
  int threads;                 // 0: as many as pay
  int level;                   // KALOS_LEVEL_*
} kalos_scan;

typedef struct kalos_hit {
  float score;
  uint32_t row;
  uint64_t id;
} kalos_hit;

#endif  // KALOS_RECALL_H
