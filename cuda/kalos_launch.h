// kalos_launch.h: what a kernel is launched with. Plain structs, the same for the host (C, Cython)
// and the device (NVRTC). Addresses are device addresses in 64 bits; the host fills a struct, and
// it travels as the kernel's one parameter.
#ifndef KALOS_LAUNCH_H
#define KALOS_LAUNCH_H

#include "kalos_layout.h"

// ---- gather.cu: runs of tokens into a window
// -----------------------------------------------------
#define KALOS_GATHER_BLOCK 128u   // threads of a block; each copies four tokens
#define KALOS_PIECE_TOKENS 512u   // tokens of a piece, which one block copies
#define KALOS_GATHER_INLINE 124u  // pieces that travel as a parameter: 4 KB in all

// A piece of a run of tokens. A run is cut into pieces of KALOS_PIECE_TOKENS from its beginning.
typedef struct kalos_piece {
  uint64_t source;  // address of the piece's first token ID, 16-byte aligned
  uint32_t start;   // place in the window of the first token that is copied
  uint32_t crc;     // CRC-32C of the whole run
  uint16_t length;  // tokens of the piece, 1 to KALOS_PIECE_TOKENS
  uint16_t skip;    // tokens of the piece before those that are copied
  uint16_t copied;  // tokens that are copied
  uint16_t run;     // number of the run among those of several pieces
  uint32_t behind;  // tokens of the run behind this piece
  uint32_t total;   // tokens of the run; 0: it has no checksum
} kalos_piece;
KALOS_STATIC_ASSERT(sizeof(kalos_piece) == 32, "kalos_piece");

// One run of several pieces while they come in; zero between launches.
typedef struct kalos_run_sum {
  uint32_t crc;   // of the pieces that came in, each shifted to its place
  uint32_t done;  // tokens that came in
} kalos_run_sum;

// Powers of x modulo the polynomial of CRC-32C, as a reflected register holds them (x^0 is bit 31):
// multiplying by one moves a checksum in front of so many tokens. The host fills them in once.
#define KALOS_CRC_NEAR (2u * KALOS_PIECE_TOKENS)
#define KALOS_CRC_FAR 256u
typedef struct kalos_crc_powers {
  uint32_t near[KALOS_CRC_NEAR];    // by i tokens
  uint32_t far[KALOS_CRC_FAR];      // by i pieces
  uint32_t farther[KALOS_CRC_FAR];  // by i * KALOS_CRC_FAR pieces
} kalos_crc_powers;

// What a launch says when it is done, in memory that host and device share.
typedef struct kalos_done {
  uint32_t ticket;  // of the launch that is done, written last
  uint32_t bad;     // number + 1 of a piece whose run does not hold its checksum, 0 for none
  uint32_t reserved[14];
} kalos_done;
KALOS_STATIC_ASSERT(sizeof(kalos_done) == 64, "kalos_done");

// Counters of a launch in the device's memory; zero between launches.
typedef struct kalos_counters {
  uint32_t blocks;  // that are done
  uint32_t bad;     // as kalos_done
} kalos_counters;

typedef struct kalos_gather_args {
  uint64_t pieces;    // kalos_piece [num_pieces - KALOS_GATHER_INLINE], host or device
  uint64_t out;       // int32 [tokens], device
  uint64_t host_out;  // the same in pinned host memory; 0: not written
  uint64_t sums;      // kalos_run_sum [runs of several pieces], device
  uint64_t powers;    // kalos_crc_powers, device
  uint64_t counters;  // kalos_counters, device
  uint64_t done;      // kalos_done, host
  uint32_t num_pieces;
  uint32_t ticket;
  kalos_piece first[KALOS_GATHER_INLINE];  // the first pieces; `pieces` holds those behind them
} kalos_gather_args;
KALOS_STATIC_ASSERT(sizeof(kalos_gather_args) <= 4096, "a kernel's parameters");

// ---- arrange.cu: windows into one batch
// ----------------------------------------------------------
#define KALOS_ARRANGE_BLOCK 256u
#define KALOS_ARRANGE_PACKED 0u
#define KALOS_ARRANGE_LEFT 1u
#define KALOS_ARRANGE_RIGHT 2u

typedef struct kalos_arrange_row {
  uint64_t tokens;  // int32 [length]
  uint32_t start;   // packed: place of the first token; padded: row * width
  uint32_t length;
} kalos_arrange_row;

typedef struct kalos_arrange_args {
  uint64_t rows;       // kalos_arrange_row [num_rows]
  uint64_t token_ids;  // int32 or int64 [num_cells]
  uint64_t positions;  // the same type: place in the window, 0 in the padding; 0: not written
  uint64_t mask;       // the same type: 1 for tokens, 0 for padding; 0: not written
  uint64_t num_cells;
  uint64_t done;  // kalos_done, host; 0: the caller orders by stream
  uint64_t counter;
  uint32_t num_rows;
  uint32_t width;  // cells a row, padded layouts
  uint32_t layout;
  uint32_t wide;  // 1: int64
  uint32_t ticket;
  int32_t pad_id;
} kalos_arrange_args;

// ---- kalos_scan.cuh: the best rows
// --------------------------------------------------------------------
#define KALOS_RECALL_BLOCK 256u
#define KALOS_RECALL_MAX_K 1024u
#define KALOS_RECALL_MAX_QUERIES 64u
#define KALOS_RECALL_EXTENTS 16u
#define KALOS_RECALL_INLINE 704u  // floats of a query that travel as a parameter: 4 KB in all
#define KALOS_RECALL_FEW 32u      // largest k whose lists the warps hold in registers

// What one query may return: the rows of some extents that are set in a bitmap.
typedef struct kalos_recall_scope {
  uint64_t allowed;  // uint32 bitmap by row, device; 0: every row of the extents
  uint32_t num_extents;
  float min_score;
  struct {
    uint32_t begin;
    uint32_t end;
  } extents[KALOS_RECALL_EXTENTS];  // ascending, disjoint
} kalos_recall_scope;
KALOS_STATIC_ASSERT(sizeof(kalos_recall_scope) == 144, "kalos_recall_scope");

// A hit as a key: larger is better, and no two rows have one key.
//   bits 63..32  the score, orderable: as IEEE bits, inverted where negative, else with bit 31 set
//   bits 31..0   ~row
typedef struct kalos_recall_args {
  uint64_t rows;      // device: row i at rows + i * stride_nbytes, padded with zeros to dim
  uint64_t factors;   // device: float by row; read for cosine alone
  uint64_t dead;      // device: uint32 bitmap by row
  uint64_t queries;   // device: float [num_queries][dim], padded with zeros; 0: query, below
  uint64_t scopes;    // device: kalos_recall_scope [num_queries]; 0: scope, below, for every query
  uint64_t lists;     // device: uint64 [num_queries][blocks][k]: scratch
  uint64_t counters;  // device: uint32 [num_queries + 1], zero between launches
  uint64_t hits;      // host: uint64 keys [num_queries][k], best first, 0 behind the last
  uint64_t done;      // kalos_done, host
  uint32_t stride_nbytes;
  uint32_t dim;  // multiple of 32
  uint32_t metric;
  uint32_t num_queries;
  uint32_t k;
  uint32_t begin;  // rows [begin, end) hold all extents of all scopes
  uint32_t end;
  uint32_t ticket;
  kalos_recall_scope scope;
  float query[KALOS_RECALL_INLINE];
} kalos_recall_args;
KALOS_STATIC_ASSERT(sizeof(kalos_recall_args) <= 4096, "a kernel's parameters");

// ---- kalos_tensor.cuh: the best rows for many queries -------------------------------------------
#define KALOS_BATCH_FEW 16u   // queries of a group, kalos_recall_batch_*_few
#define KALOS_BATCH_MANY 64u  // queries of a group, kalos_recall_batch_*_many
// Most warps of a block, which may have fewer where its memory is small. So many sums as those of
// 64 queries leave registers for 12.
#define KALOS_BATCH_FEW_WARPS 16u
#define KALOS_BATCH_MANY_WARPS 12u
#define KALOS_BATCH_MAX_K 32u
#define KALOS_BATCH_TILE 32u   // rows that a warp works on at a time
#define KALOS_BATCH_STAGES 4u  // pieces of tiles that a warp has in flight or in work
#define KALOS_BATCH_STAGE_NBYTES 2048u
#define KALOS_BATCH_KEPT 64u     // rows that a block keeps for a query until they are scored
#define KALOS_BATCH_COUNTERS 8u  // words before those of the queries in `counters`
#define KALOS_BATCH_QUERY_NBYTES 672u
#define KALOS_BATCH_WARP_NBYTES \
  (KALOS_BATCH_STAGES * KALOS_BATCH_STAGE_NBYTES + (KALOS_BATCH_STAGES + 1u) * 144u)
// Dynamic shared memory of a block whose group has `queries` queries, rounded up to 16.
#define KALOS_BATCH_SHARED_NBYTES(queries, dim, warps)                       \
  (((queries) + 15u) / 16u * 16u * (KALOS_BATCH_QUERY_NBYTES + 2u * (dim)) + \
   (warps) * KALOS_BATCH_WARP_NBYTES)

// Queries come in groups of KALOS_BATCH_FEW or KALOS_BATCH_MANY, one for each y of the grid.
typedef struct kalos_recall_batch_args {
  uint64_t rows;      // device: row i at rows + i * stride_nbytes, padded with zeros to dim
  uint64_t lengths;   // device: float by row; cosine: factors, else what kalos_row_norms wrote
  uint64_t dead;      // device: uint32 bitmap by row
  uint64_t queries;   // device: float [num_queries][dim], padded with zeros, 16-byte aligned
  uint64_t scopes;    // device: kalos_recall_scope [num_scopes]
  uint64_t lists;     // device: uint64 [num_queries][k][blocks]: scratch
  uint64_t counters;  // device: uint32 [KALOS_BATCH_COUNTERS + 2 * num_queries]; zero when idle
  uint64_t hits;      // host: uint64 keys [num_queries][k], best first, 0 behind the last
  uint64_t lost;      // host: uint32 [num_queries]: 1: the hits may lack a row, ask another kernel
  uint64_t done;      // kalos_done, host
  uint32_t stride_nbytes;
  uint32_t dim;  // multiple of 32
  uint32_t metric;
  uint32_t num_queries;
  uint32_t num_scopes;  // 1: of every query; else num_queries
  uint32_t k;           // at most KALOS_BATCH_MAX_K
  uint32_t begin;       // rows [begin, end) hold all extents of all scopes
  uint32_t end;
  uint32_t ticket;
  uint32_t reserved;
} kalos_recall_batch_args;
KALOS_STATIC_ASSERT(sizeof(kalos_recall_batch_args) == 120, "kalos_recall_batch_args");

// ---- row_norms.cu: an upper bound of each row's norm --------------------------------------------
#define KALOS_NORMS_BLOCK 256u

typedef struct kalos_row_norms_args {
  uint64_t rows;   // device: row i at rows + i * stride_nbytes, padded with zeros to dim
  uint64_t norms;  // device: float by row
  uint32_t stride_nbytes;
  uint32_t dim;   // multiple of 32
  uint32_t half;  // 1: float16 rows, 0: float32
  uint32_t begin;
  uint32_t end;
  uint32_t reserved;
} kalos_row_norms_args;
KALOS_STATIC_ASSERT(sizeof(kalos_row_norms_args) == 40, "kalos_row_norms_args");

#endif  // KALOS_LAUNCH_H
