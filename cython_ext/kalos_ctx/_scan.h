// Exact top-k over rows: the scope's extents are cut into parts, threads take parts, each thread
// keeps the best k it saw per query, and the lists are merged. (score descending, id ascending, row
// ascending) is a total order, so the result does not depend on threads or parts. Rows that are
// dead or filtered out are never read.
#ifndef KALOS_SCAN_H
#define KALOS_SCAN_H

#include <errno.h>
#include <stdlib.h>

#include "_score.h"
#include "_workers.h"

#define KALOS_SCAN_TILE \
  128u  // rows scored at a time: two bitmap words, so that sparse words fill up
#define KALOS_SCAN_MIN_NBYTES (128u << 10)  // row bytes that are worth a thread
#define KALOS_SCAN_PARTS 16u  // parts per thread, so that a slow thread does not hold all up

typedef struct kalos_part {
  uint64_t extent;  // first extent of the part
  uint64_t offset;  // rows of it that belong to earlier parts
  uint64_t count;   // rows
} kalos_part;

typedef struct kalos_scan_job {
  const kalos_scan* scan;
  kalos_score_fn score;
  kalos_part* parts;
  uint32_t num_parts;
  uint32_t next_part;  // atomic
  kalos_hit* heaps;    // [thread][query][k]
  uint32_t* counts;    // [thread][query]
} kalos_scan_job;

// ---- The best k -----------------------------------------------------------------------------
static inline int kalos_hit_before(const kalos_hit* a, const kalos_hit* b) {
  if (a->score != b->score) return a->score > b->score;
  if (a->id != b->id) return a->id < b->id;
  return a->row < b->row;
}

static int kalos_hit_compare(const void* a, const void* b) {
  if (kalos_hit_before((const kalos_hit*)a, (const kalos_hit*)b)) return -1;
  return kalos_hit_before((const kalos_hit*)b, (const kalos_hit*)a);
}

// A heap whose root is the worst hit that is kept.
static void kalos_heap_push(kalos_hit* heap, uint32_t* count, uint32_t k, kalos_hit hit) {
  uint32_t i;
  if (*count < k) {
    for (i = (*count)++; i > 0; i = (i - 1) / 2) {
      uint32_t parent = (i - 1) / 2;
      if (!kalos_hit_before(&heap[parent], &hit)) break;
      heap[i] = heap[parent];
    }
    heap[i] = hit;
    return;
  }
  if (!kalos_hit_before(&hit, &heap[0])) return;
  for (i = 0;;) {
    uint32_t child = 2 * i + 1;
    if (child >= k) break;
    if (child + 1 < k && kalos_hit_before(&heap[child], &heap[child + 1])) ++child;
    if (!kalos_hit_before(&hit, &heap[child])) break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = hit;
}

// ---- One tile -------------------------------------------------------------------------------
typedef struct kalos_tile {
  uint32_t count;
  uint32_t rows[KALOS_SCAN_TILE];
  const void* pointers[KALOS_SCAN_TILE];
  float factors[KALOS_SCAN_TILE];
} kalos_tile;

static void kalos_tile_locate(kalos_tile* tile, const kalos_rows* rows, int metric) {
  uint64_t base = 0, end = 0, segment = 0;
  for (uint32_t i = 0; i < tile->count; ++i) {
    uint64_t row = tile->rows[i];
    if (row < base || row >= end) {
      segment = row / rows->rows_per_segment;
      base = segment * rows->rows_per_segment;
      end = base + rows->rows_per_segment;
    }
    tile->pointers[i] = (const char*)rows->segments[segment] + (row - base) * rows->stride_nbytes;
    if (metric == KALOS_METRIC_COSINE)
      tile->factors[i] = *(const float*)((const char*)rows->factors[segment] +
                                         (row - base) * rows->factor_stride_nbytes);
  }
}

static void kalos_tile_select(const kalos_scan* scan, const kalos_tile* tile, const float* scores,
                              kalos_hit* heap, uint32_t* count) {
  const uint32_t k = scan->k;
  float floor = *count == k ? heap[0].score : scan->min_score;
  int any = 0;
  for (uint32_t i = 0; i < tile->count; ++i) any |= scores[i] >= floor;
  if (!any) return;
  for (uint32_t i = 0; i < tile->count; ++i) {
    if (!(scores[i] >= floor)) continue;
    uint32_t row = tile->rows[i];
    kalos_hit hit = {scores[i], row, scan->ids ? scan->ids[row] : row};
    kalos_heap_push(heap, count, k, hit);
    if (*count == k && heap[0].score > floor) floor = heap[0].score;
  }
}

static void kalos_tile_flush(const kalos_scan_job* job, kalos_tile* tile, kalos_hit* heaps,
                             uint32_t* counts) {
  const kalos_scan* scan = job->scan;
  float scores[KALOS_MAX_QUERIES][KALOS_SCAN_TILE];
  if (tile->count == 0) return;
  kalos_tile_locate(tile, &scan->rows, scan->metric);
  job->score(tile->pointers, tile->count, scan->queries, scan->num_queries, scan->rows.dim,
             scores[0], KALOS_SCAN_TILE);
  for (uint32_t q = 0; q < scan->num_queries; ++q) {
    kalos_finish_scores(scores[q], tile->factors, tile->count, scan->metric);
    kalos_tile_select(scan, tile, scores[q], heaps + (uint64_t)q * scan->k, counts + q);
  }
  tile->count = 0;
}

// Bit i: row start + i may be returned. Reads the words that hold the span; start + n stays in one
// word.
static inline uint64_t kalos_live_mask(const kalos_scan* scan, uint64_t start, uint64_t n) {
  uint64_t word = start / 64, mask = ~(uint64_t)0;
  if (scan->tombstones) mask &= ~__atomic_load_n(&scan->tombstones[word], __ATOMIC_RELAXED);
  if (scan->allowed) mask &= __atomic_load_n(&scan->allowed[word], __ATOMIC_RELAXED);
  mask >>= start % 64;
  return n < 64 ? mask & (((uint64_t)1 << n) - 1) : mask;
}

static void kalos_scan_run(const kalos_scan_job* job, uint64_t row, uint64_t stop, kalos_tile* tile,
                           kalos_hit* heaps, uint32_t* counts) {
  const kalos_scan* scan = job->scan;
  const int masked = scan->tombstones || scan->allowed;
  while (row < stop) {
    uint64_t n = 64 - row % 64;
    if (n > stop - row) n = stop - row;
    if (tile->count + n > KALOS_SCAN_TILE) kalos_tile_flush(job, tile, heaps, counts);
    if (masked) {
      for (uint64_t mask = kalos_live_mask(scan, row, n); mask; mask &= mask - 1)
        tile->rows[tile->count++] = (uint32_t)(row + (uint64_t)__builtin_ctzll(mask));
    } else {
      for (uint64_t i = 0; i < n; ++i) tile->rows[tile->count + i] = (uint32_t)(row + i);
      tile->count += (uint32_t)n;
    }
    row += n;
  }
}

// ---- Threads --------------------------------------------------------------------------------
static void kalos_scan_work(void* context, int thread) {
  kalos_scan_job* job = (kalos_scan_job*)context;
  const kalos_scan* scan = job->scan;
  kalos_hit* heaps = job->heaps + (uint64_t)thread * scan->num_queries * scan->k;
  uint32_t* counts = job->counts + (uint64_t)thread * KALOS_MAX_QUERIES;
  kalos_tile tile;
  tile.count = 0;
  uint64_t mode = kalos_fp_enter();
  for (;;) {
    uint32_t p = __atomic_fetch_add(&job->next_part, 1, __ATOMIC_RELAXED);
    if (p >= job->num_parts) break;
    kalos_part part = job->parts[p];
    while (part.count > 0) {
      kalos_row_run extent = scan->extents[part.extent++];
      uint64_t start = extent.start + part.offset, n = extent.count - part.offset;
      if (n > part.count) n = part.count;
      kalos_scan_run(job, start, start + n, &tile, heaps, counts);
      part.offset = 0;
      part.count -= n;
    }
  }
  kalos_tile_flush(job, &tile, heaps, counts);
  kalos_fp_leave(mode);
}

// Threads that pay for total rows; never more than asked for, than processors, or than the limit.
static int kalos_scan_threads(const kalos_scan* scan, uint64_t total) {
  double nbytes = (double)total * (double)scan->rows.dim * (scan->rows.half ? 2.0 : 4.0);
  double pay = nbytes * scan->num_queries / KALOS_SCAN_MIN_NBYTES;
  int most = scan->threads > 0 ? scan->threads : kalos_num_processors();
  if (most > (int)KALOS_MAX_THREADS) most = (int)KALOS_MAX_THREADS;
  if (pay < most) most = (int)pay;
  return most < 1 ? 1 : most;
}

// Cut the extents into parts of equal rows, one walk for all.
static uint32_t kalos_scan_cut(const kalos_scan* scan, uint64_t total, uint32_t wanted,
                               kalos_part* parts) {
  uint64_t size = (total + wanted - 1) / wanted, extent = 0, offset = 0, left = total;
  uint32_t num_parts = 0;
  while (left > 0) {
    uint64_t count = size < left ? size : left, skip = count;
    kalos_part part = {extent, offset, count};
    parts[num_parts++] = part;
    left -= count;
    while (skip > 0 && skip >= scan->extents[extent].count - offset) {
      skip -= scan->extents[extent].count - offset;
      ++extent;
      offset = 0;
    }
    offset += skip;
  }
  return num_parts;
}

// Merge the threads' heaps of one query; returns how many hits were written.
static uint32_t kalos_scan_merge(const kalos_scan_job* job, int threads, uint32_t q,
                                 kalos_hit* room, kalos_hit* hits) {
  const kalos_scan* scan = job->scan;
  uint32_t found = 0;
  for (int t = 0; t < threads; ++t) {
    uint32_t count = job->counts[(uint64_t)t * KALOS_MAX_QUERIES + q];
    const kalos_hit* heap = job->heaps + ((uint64_t)t * scan->num_queries + q) * scan->k;
    memcpy(room + found, heap, count * sizeof(kalos_hit));
    found += count;
  }
  qsort(room, found, sizeof(kalos_hit), kalos_hit_compare);
  if (found > scan->k) found = scan->k;
  memcpy(hits, room, found * sizeof(kalos_hit));
  return found;
}

// hits: [num_queries][k], counts: [num_queries]; each query's hits are sorted. Returns 0 or
// -ENOMEM. The caller has checked the struct: k, num_queries, metric, level and the extents against
// the rows.
static int kalos_topk(const kalos_scan* scan, kalos_hit* hits, uint32_t* counts) {
  uint64_t total = 0;
  for (uint64_t e = 0; e < scan->num_extents; ++e) total += scan->extents[e].count;
  for (uint32_t q = 0; q < scan->num_queries; ++q) counts[q] = 0;
  if (total == 0) return 0;
  int threads = kalos_scan_threads(scan, total);
  uint32_t wanted = threads == 1 ? 1 : (uint32_t)threads * KALOS_SCAN_PARTS;
  uint64_t heap_hits = (uint64_t)threads * scan->num_queries * scan->k;
  uint64_t num_counts = (uint64_t)threads * KALOS_MAX_QUERIES;
  uint64_t room_hits = (uint64_t)threads * scan->k;
  uint64_t nbytes = (heap_hits + room_hits) * sizeof(kalos_hit) + wanted * sizeof(kalos_part) +
                    num_counts * sizeof(uint32_t);
  kalos_hit* memory = (kalos_hit*)malloc(nbytes);
  if (!memory) return -ENOMEM;
  kalos_hit* room = memory + heap_hits;
  kalos_part* parts = (kalos_part*)(room + room_hits);
  kalos_scan_job job = {scan,
                        kalos_score_function(scan->level, scan->metric, (int)scan->rows.half),
                        parts,
                        0,
                        0,
                        memory,
                        (uint32_t*)(parts + wanted)};
  memset(job.counts, 0, num_counts * sizeof(uint32_t));
  job.num_parts = kalos_scan_cut(scan, total, wanted, parts);
  kalos_workers_run(kalos_scan_work, &job, threads);
  uint64_t mode = kalos_fp_enter();  // comparing subnormals depends on the mode as well
  for (uint32_t q = 0; q < scan->num_queries; ++q)
    counts[q] = kalos_scan_merge(&job, threads, q, room, hits + (uint64_t)q * scan->k);
  kalos_fp_leave(mode);
  free(memory);
  return 0;
}

// Scores of listed rows, in their order, without top-k.
static void kalos_score_rows(const kalos_rows* rows, const uint32_t* listed, uint64_t count,
                             const float* query, int metric, int level, float* scores) {
  kalos_score_fn score = kalos_score_function(level, metric, (int)rows->half);
  kalos_tile tile;
  uint64_t mode = kalos_fp_enter();
  for (uint64_t i = 0; i < count; i += tile.count) {
    tile.count = count - i < KALOS_SCAN_TILE ? (uint32_t)(count - i) : KALOS_SCAN_TILE;
    memcpy(tile.rows, listed + i, tile.count * sizeof(uint32_t));
    kalos_tile_locate(&tile, rows, metric);
    score(tile.pointers, tile.count, query, 1, rows->dim, scores + i, tile.count);
    kalos_finish_scores(scores + i, tile.factors, tile.count, metric);
  }
  kalos_fp_leave(mode);
}

#endif  // KALOS_SCAN_H
