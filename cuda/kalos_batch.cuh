// kalos_batch.cuh: what a block of kalos_tensor.cuh holds in shared memory: the state of each
// query with its candidates, and the tiles that its warps have in flight. No kernel here.
#ifndef KALOS_BATCH_CUH
#define KALOS_BATCH_CUH

#include "kalos_bounds.cuh"

// Scores as orderable words, as in the upper half of a key.
__device__ __forceinline__ uint32_t ordered(float score) {
  return (uint32_t)(key_floor(score) >> 32);
}
__device__ __forceinline__ float score_of(uint32_t word) {
  return __uint_as_float(word ^ (word >> 31 ? 0x80000000u : 0xffffffffu));
}
#define KALOS_ORDERED_INFINITY 0xff800000u

// ---- What a block holds -------------------------------------------------------------------------
// A query's state in shared memory. A warp that holds the lock changes it; `bound` only ever rises,
// and is raised without the lock, too.
struct query_state {
  uint64_t kept[KALOS_BATCH_KEPT];  // keys of upper bounds of rows that may be hits, in any order
  uint32_t lower[KALOS_WARP];       // the best lower bounds, ordered words, the best first; 0: none
  score_terms terms;
  uint32_t bound;  // a hit's score, as an ordered word, is at least this
  uint32_t count;  // of `kept`
  uint32_t lost;   // best upper bound, as an ordered word, of rows that found no room; 0: none
  uint32_t lock;
};
static_assert(sizeof(query_state) == KALOS_BATCH_QUERY_NBYTES, "query_state");

struct tile_slot {
  float lengths[KALOS_BATCH_TILE];
  uint32_t row;    // the first
  uint32_t alive;  // bit i: row + i may be a hit of some query
  uint32_t reserved[2];
};
struct warp_ring {
  uint4 stages[KALOS_BATCH_STAGES][KALOS_BATCH_STAGE_NBYTES / sizeof(uint4)];
  tile_slot slots[KALOS_BATCH_STAGES + 1];  // of the tiles in flight and the one in work
};
static_assert(sizeof(warp_ring) == KALOS_BATCH_WARP_NBYTES, "warp_ring");

// Rows [row, row + 32) as bits: which of them lie in [begin, end).
__device__ __forceinline__ uint32_t bits_within(uint32_t row, uint32_t begin, uint32_t end) {
  const uint64_t all = 0xffffffffull;
  const uint32_t from = begin > row ? begin - row : 0, to = end > row ? end - row : 0;
  if (from >= 32 || to == 0) return 0;
  return (uint32_t)(all << from) & (uint32_t)(to >= 32 ? all : all >> (32 - to));
}

__device__ __forceinline__ uint32_t bits_of_scope(const kalos_recall_scope& scope, uint32_t row) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < scope.num_extents; ++i)
    bits |= bits_within(row, scope.extents[i].begin, scope.extents[i].end);
  if (bits && scope.allowed) bits &= ((const uint32_t*)scope.allowed)[row / 32];
  return bits;
}

// ---- The tiles of a warp, in flight -------------------------------------------------------------
// Asks for the pieces of the warp's tiles one after the other. Of 32 tiles at a time, one a lane,
// it looks up which have a row that may be a hit, and passes over the others.
template <bool HALF>
struct tile_stream {
  static constexpr uint32_t STEP = HALF ? 32 : 16;  // columns of a stage
  const kalos_recall_batch_args& args;
  const char* from;     // this lane's next 16 bytes of row g = lane / 4 of the tile,
  uint32_t further[3];  // and how far behind them are those of rows g + 8, g + 16 and g + 24
  uint32_t window;      // number of the first of the 32 tiles; they are `stride` apart
  uint32_t alive;       // rows of this lane's tile that may be hits
  uint32_t wanted;      // tiles that are still to come
  uint32_t column;      // of the tile that is asked for
  uint32_t asked;       // tiles that were begun

  __device__ __forceinline__ tile_stream(const kalos_recall_batch_args& args_, uint32_t warp)
      : args(args_), column(0), asked(0) {
    window = args.begin / KALOS_BATCH_TILE + blockIdx.x + warp * gridDim.x;
    look();
  }

  __device__ __forceinline__ static uint32_t stride() {
    return gridDim.x * (blockDim.x / KALOS_WARP);
  }
  __device__ __forceinline__ static uint64_t row_of(uint32_t tile) {
    return (uint64_t)tile * KALOS_BATCH_TILE;
  }

  __device__ __forceinline__ void look() {
    const uint64_t row = row_of(window + threadIdx.x % KALOS_WARP * stride());
    alive = 0;
    if (row < args.end) {
      const uint32_t first = (uint32_t)row;
      const kalos_recall_scope* scopes = (const kalos_recall_scope*)args.scopes;
      for (uint32_t i = 0; i < args.num_scopes; ++i) alive |= bits_of_scope(scopes[i], first);
      alive &= bits_within(first, args.begin, args.end);
      if (alive) alive &= ~((const uint32_t*)args.dead)[first / 32];
    }
    wanted = __ballot_sync(KALOS_ALL_LANES, alive != 0);
  }

  // Asks for the next piece, into a stage whose bytes were read.
  __device__ __forceinline__ void ask(warp_ring& ring, uint32_t stage) {
    const uint32_t lane = threadIdx.x % KALOS_WARP;
    if (column == 0) {
      while (!wanted && row_of(window) < args.end) {
        window += KALOS_WARP * stride();
        look();
      }
      if (wanted) begin(ring.slots[asked++ % (KALOS_BATCH_STAGES + 1)], lane);
    }
    if (row_of(window) < args.end) {
      uint4* to = &ring.stages[stage][lane];
      kalos_copy_16(to, from);
#pragma unroll
      for (uint32_t i = 0; i < 3; ++i) kalos_copy_16(to + (i + 1) * KALOS_WARP, from + further[i]);
      from += STEP * (HALF ? 2 : 4);
      column += STEP;
      if (column == args.dim) column = 0;
    }
    kalos_copies_end();
  }

  __device__ __forceinline__ void begin(tile_slot& slot, uint32_t lane) {
    const uint32_t tile = __ffs(wanted) - 1;
    wanted &= wanted - 1;
    const uint32_t bits = __shfl_sync(KALOS_ALL_LANES, alive, tile);
    const uint32_t row = (uint32_t)row_of(window + tile * stride());
    if (lane == 0) {
      slot.row = row;
      slot.alive = bits;
    }
    const uint32_t last = args.end - 1;
    kalos_copy_4(&slot.lengths[lane],
                 (const float*)args.lengths + (row + lane < last ? row + lane : last));
    const uint32_t one = row + lane / 4 < last ? row + lane / 4 : last;
    from = (const char*)args.rows + (uint64_t)one * args.stride_nbytes + lane % 4 * 16;
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i)
      further[i] = ((i + 1) * 8 < last - one ? (i + 1) * 8 : last - one) * args.stride_nbytes;
  }
};

// ---- Rows that may be hits ----------------------------------------------------------------------
__device__ __forceinline__ void take_lock(uint32_t* lock) {
  if (threadIdx.x % KALOS_WARP == 0)
    while (atomicCAS(lock, 0u, 1u)) __nanosleep(32);
  __threadfence_block();
  __syncwarp();
}

__device__ __forceinline__ void give_lock(uint32_t* lock) {
  __threadfence_block();
  __syncwarp();
  if (threadIdx.x % KALOS_WARP == 0) atomicExch(lock, 0u);
}

// Steps of a bitonic sort of the warp's words, one a lane, the largest first, from `step` to 1.
__device__ __forceinline__ uint32_t sort_steps(uint32_t word, uint32_t width, uint32_t step) {
  const uint32_t lane = threadIdx.x % KALOS_WARP;
#pragma unroll
  for (; step; step /= 2) {
    const uint32_t other = __shfl_xor_sync(KALOS_ALL_LANES, word, step);
    const bool larger = ((lane & width) == 0) == ((lane & step) == 0);
    word = larger ? max(word, other) : min(word, other);
  }
  return word;
}

__device__ __forceinline__ uint32_t sort_words(uint32_t word) {
#pragma unroll
  for (uint32_t width = 2; width <= KALOS_WARP; width *= 2)
    word = sort_steps(word, width % KALOS_WARP, width / 2);
  return word;
}

// Enters the lanes' words into the warp's best 32, which are sorted, one a lane.
__device__ __forceinline__ uint32_t enter_words(uint32_t list, uint32_t word, uint32_t kth) {
  const uint32_t lane = threadIdx.x % KALOS_WARP;
  uint32_t left = __ballot_sync(KALOS_ALL_LANES, word > kth);
  if (__popc(left) > 4) {
    // The larger of a falling and a rising list, place by place, are the best 32, bitonic.
    word = __shfl_sync(KALOS_ALL_LANES, sort_words(word), KALOS_WARP - 1 - lane);
    return sort_steps(max(list, word), 0, KALOS_WARP / 2);
  }
  for (; left; left &= left - 1) {
    const uint32_t one = __shfl_sync(KALOS_ALL_LANES, word, __ffs(left) - 1);
    const uint32_t above = __shfl_up_sync(KALOS_ALL_LANES, list, 1);
    if (one > list) list = lane == 0 || above > one ? one : above;
  }
  return list;
}

// Drops what is kept and below the bound; returns how many are left. The warp that holds the lock.
__device__ __forceinline__ uint32_t drop_useless(query_state& state, uint32_t count,
                                                 uint32_t bound) {
  const uint32_t lane = threadIdx.x % KALOS_WARP, before = (1u << lane) - 1;
  uint64_t keys[KALOS_BATCH_KEPT / KALOS_WARP];
#pragma unroll
  for (uint32_t i = 0; i < KALOS_BATCH_KEPT / KALOS_WARP; ++i) {
    const uint32_t at = i * KALOS_WARP + lane;
    keys[i] = at < count ? state.kept[at] : 0;
  }
  __syncwarp();
  uint32_t left = 0;
#pragma unroll
  for (uint32_t i = 0; i < KALOS_BATCH_KEPT / KALOS_WARP; ++i) {
    const bool useful = keys[i] && (uint32_t)(keys[i] >> 32) >= bound;
    const uint32_t which = __ballot_sync(KALOS_ALL_LANES, useful);
    if (useful) state.kept[left + __popc(which & before)] = keys[i];
    left += __popc(which);
  }
  __syncwarp();
  return left;
}

// Takes what a tile gives for one query: each lane one row with its bounds, 0 where it is of no
// use.
__device__ __forceinline__ void keep(query_state& state, uint32_t* bound_of_all, uint32_t k,
                                     uint32_t row, uint32_t upper, uint32_t lower) {
  const uint32_t lane = threadIdx.x % KALOS_WARP;
  take_lock(&state.lock);
  uint32_t list = state.lower[lane], count = state.count;
  const uint32_t kth = __shfl_sync(KALOS_ALL_LANES, list, k - 1);
  list = enter_words(list, lower, kth);
  __syncwarp();
  state.lower[lane] = list;
  const uint32_t risen = __shfl_sync(KALOS_ALL_LANES, list, k - 1);
  uint32_t bound = *(volatile uint32_t*)&state.bound;
  bound = __shfl_sync(KALOS_ALL_LANES, bound, 0);
  if (risen > bound) {
    bound = risen;
    if (lane == 0) {
      atomicMax(&state.bound, risen);
      atomicMax(bound_of_all, risen);
    }
  }
  const bool useful = upper && upper >= bound;
  const uint32_t which = __ballot_sync(KALOS_ALL_LANES, useful), more = __popc(which);
  if (count + more > KALOS_BATCH_KEPT) count = drop_useless(state, count, bound);
  const uint32_t at = count + __popc(which & ((1u << lane) - 1));
  const bool fits = at < KALOS_BATCH_KEPT;
  if (useful && fits) state.kept[at] = (uint64_t)upper << 32 | (uint32_t)~row;
  if (count + more > KALOS_BATCH_KEPT) {
    if (useful && !fits) atomicMax(&state.lost, upper);
    count = KALOS_BATCH_KEPT - more;
  }
  __syncwarp();  // every lane has read what lane 0 writes
  if (lane == 0) state.count = count + more;
  give_lock(&state.lock);
}

#endif  // KALOS_BATCH_CUH
