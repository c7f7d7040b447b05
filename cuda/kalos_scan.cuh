// kalos_scan.cuh: kalos_recall_*, the best rows for each query, exactly, in one launch. The score
// and the order of hits are DESIGN.md's; scores are never written anywhere.
//   args.rows     rows of dim elements (float32 or float16), stride_nbytes apart   device
//   args.hits     uint64 keys [num_queries][k], best first, zeros behind the last  host
//   args.done     kalos_done                                                       host, written
//   last
// Grid: x blocks that share the rows, y queries. Block: KALOS_RECALL_BLOCK. Shared memory: the
// query, dim floats, dynamic; lists, static. Reference: _cpu_ops on the CPU, equal to the bit.
// Bound: the rows at the device's bandwidth.
//
// A row whose key beats the worst that is kept enters a list:
//   few   k <= 32: each warp keeps its best in registers, one a lane, sorted
//   many  k <= 1,024: each block keeps a buffer in shared memory and sorts it when it fills up
// A block ends with its best k, sorted. The last block takes heads of all lists first, so that few
// keys of their depths are ever looked at.
#ifndef KALOS_SCAN_CUH
#define KALOS_SCAN_CUH

#include "kalos_recall.cuh"

using many_keys = key_buffer<KALOS_MANY_KEYS>;

// ---- Lists of all blocks ----------------------------------------------------------------------
// The best of all blocks' lists, which are sorted. A bound comes first: the k-th of the threads'
// best heads, so that hardly a key is entered that is not a hit. Then the first keys of all lists,
// the second ones, and so on until none is of use.
__device__ __noinline__ void merge_few(const kalos_recall_args& args, uint32_t query) {
  const uint64_t* lists = (const uint64_t*)args.lists + (uint64_t)query * gridDim.x * args.k;
  __shared__ uint64_t bound_of_all;
  uint64_t head = 0;
  for (uint32_t list = threadIdx.x; list < gridDim.x; list += KALOS_RECALL_BLOCK) {
    const uint64_t key = __ldcg((const unsigned long long*)lists + (uint64_t)list * args.k);
    if (key > head) head = key;
  }
  const uint64_t heads = join_warps(sort_warp(head));
  if (threadIdx.x == args.k - 1) bound_of_all = heads ? heads - 1 : 0;
  __syncthreads();
  uint64_t best = 0, bound = bound_of_all;
  for (uint32_t rank = 0; rank < args.k; ++rank) {
    bool any = false;
    for (uint32_t at = threadIdx.x / KALOS_WARP * KALOS_WARP; at < gridDim.x;
         at += KALOS_RECALL_BLOCK) {
      const uint32_t list = at + threadIdx.x % KALOS_WARP;
      const uint64_t key =
          list < gridDim.x
              ? __ldcg((const unsigned long long*)lists + (uint64_t)list * args.k + rank)
              : 0;
      any |= key > bound;
      bound = enter(best, key, bound, args.k);
    }
    if (!__any_sync(KALOS_ALL_LANES, any)) break;
  }
  best = join_warps(best);
  if (threadIdx.x < args.k) ((uint64_t*)args.hits)[(uint64_t)query * args.k + threadIdx.x] = best;
}

__device__ __noinline__ void merge_many(const kalos_recall_args& args, many_keys& buffer,
                                        uint32_t query) {
  const uint64_t* lists = (const uint64_t*)args.lists + (uint64_t)query * gridDim.x * args.k;
  __syncthreads();
  if (threadIdx.x == 0) {
    buffer.count = 0;
    buffer.bound = 0;
  }
  __syncthreads();
  for (uint32_t rank = 0; rank < args.k; ++rank) {
    bool any = false;
    for (uint32_t at = 0; at < gridDim.x; at += KALOS_RECALL_BLOCK) {
      __syncthreads();
      const bool full = buffer.count + KALOS_RECALL_BLOCK > KALOS_MANY_KEYS;
      __syncthreads();
      if (full) settle(buffer, args.k);
      const uint32_t list = at + threadIdx.x;
      if (list >= gridDim.x) continue;
      const uint64_t key =
          __ldcg((const unsigned long long*)lists + (uint64_t)list * args.k + rank);
      if (key > buffer.bound) {
        any = true;
        offer(buffer, key);
      }
    }
    if (!__syncthreads_or(any)) break;
    if (buffer.count >= args.k && rank < 16) settle(buffer, args.k);
  }
  settle(buffer, args.k);
  uint64_t* hits = (uint64_t*)args.hits + (uint64_t)query * args.k;
  for (uint32_t i = threadIdx.x; i < args.k; i += KALOS_RECALL_BLOCK)
    hits[i] = i < buffer.count ? buffer.keys[i] : 0;
}

// ---- The scan -----------------------------------------------------------------------------------
template <bool HALF, bool L2, bool MANY>
struct recall {
  using type = row_type<HALF>;
  static constexpr uint32_t KEYS = MANY ? KALOS_MANY_KEYS : 0;

  struct memory {
    key_buffer<KEYS> buffer;
    kalos_recall_scope scope;
  };

  // Sums of the two rows of this lane's group.
  __device__ static __forceinline__ void score_rows(
      const kalos_recall_args& args, const char* const* rows, const float* query,
      float sums[KALOS_ROWS_TOGETHER][1][type::SUMS]) {
    const uint32_t steps = args.dim / KALOS_SCORE_LANES;
    constexpr uint32_t STEP_NBYTES = HALF ? 64 : 128;
    uint32_t step = 0;
    for (; step + KALOS_STEPS_TOGETHER <= steps; step += KALOS_STEPS_TOGETHER) {
      uint4 loads[KALOS_STEPS_TOGETHER][KALOS_ROWS_TOGETHER];
#pragma unroll
      for (uint32_t s = 0; s < KALOS_STEPS_TOGETHER; ++s)
#pragma unroll
        for (uint32_t u = 0; u < KALOS_ROWS_TOGETHER; ++u)
          loads[s][u] = kalos_load_once((const uint4*)(rows[u] + (step + s) * STEP_NBYTES));
#pragma unroll
      for (uint32_t s = 0; s < KALOS_STEPS_TOGETHER; ++s)
        add_step<HALF, L2, 1>(loads[s], query + (step + s) * KALOS_SCORE_LANES, args.dim, sums);
    }
    for (; step < steps; ++step) {
      uint4 loads[KALOS_ROWS_TOGETHER];
#pragma unroll
      for (uint32_t u = 0; u < KALOS_ROWS_TOGETHER; ++u)
        loads[u] = kalos_load_once((const uint4*)(rows[u] + step * STEP_NBYTES));
      add_step<HALF, L2, 1>(loads, query + step * KALOS_SCORE_LANES, args.dim, sums);
    }
  }

  __device__ static void run(const kalos_recall_args& args) {
    __shared__ memory shared;
    float* query = kalos_dynamic_shared<float>();
    const uint32_t lane = threadIdx.x % KALOS_WARP, warp = threadIdx.x / KALOS_WARP;
    const float* given =
        args.queries ? (const float*)args.queries + blockIdx.y * args.dim : args.query;
    for (uint32_t i = threadIdx.x; i < args.dim; i += KALOS_RECALL_BLOCK) query[i] = given[i];
    constexpr uint32_t SCOPE_WORDS = sizeof(kalos_recall_scope) / 4;
    const uint32_t* scope_words = args.scopes
                                      ? (const uint32_t*)args.scopes + blockIdx.y * SCOPE_WORDS
                                      : (const uint32_t*)&args.scope;
    if (threadIdx.x < SCOPE_WORDS)
      ((uint32_t*)&shared.scope)[threadIdx.x] = scope_words[threadIdx.x];
    __syncthreads();
    const kalos_recall_scope& scope = shared.scope;
    // Keys are above it where the score is at least min_score.
    uint64_t best = 0, bound = key_floor(scope.min_score) - 1;
    if constexpr (MANY) {
      if (threadIdx.x == 0) {
        shared.buffer.count = 0;
        shared.buffer.bound = bound;
      }
      __syncthreads();
    }

    // A lane's own row of its warp's tile once the tree has run, and whether it speaks for it.
    constexpr uint32_t HALF_GROUP = type::LANES / 2;
    const uint32_t own = (lane / HALF_GROUP % 2) * type::GROUPS + lane / type::LANES;
    const bool speaks = lane % HALF_GROUP == 0;
    const char* base = (const char*)args.rows + (lane % type::LANES) * sizeof(uint4);
    const float* slice = query + (lane % type::LANES) * type::SUMS;
    constexpr uint32_t BLOCK_ROWS = type::TILE * KALOS_BLOCK_WARPS;
    const uint32_t stride = gridDim.x * BLOCK_ROWS;
    constexpr uint32_t TURNS = 256 / BLOCK_ROWS;  // after which a buffer is looked at
    const uint32_t room = args.k <= KEYS / 4 ? KEYS / 2 : KEYS;  // a smaller one is sorted sooner
    uint32_t turn = 0;
    for (uint64_t at = args.begin + (uint64_t)blockIdx.x * BLOCK_ROWS; at < args.end;
         at += stride) {
      const uint32_t tile = (uint32_t)at + warp * type::TILE;
      if constexpr (MANY)
        if (turn++ % TURNS == 0) {
          __syncthreads();
          const bool full = shared.buffer.count + TURNS * BLOCK_ROWS > room;
          __syncthreads();
          if (full) settle(shared.buffer, args.k);
        }
      if (tile >= args.end) continue;
      const uint32_t row = tile + own;
      bool alive = row < args.end && !bit_of(args.dead, row);
      if (scope.num_extents > 1) alive = alive && in_extents(scope, row);
      if (scope.allowed) alive = alive && bit_of(scope.allowed, row);
      if (!__any_sync(KALOS_ALL_LANES, alive)) continue;
      const char* rows[KALOS_ROWS_TOGETHER];
#pragma unroll
      for (uint32_t u = 0; u < KALOS_ROWS_TOGETHER; ++u) {
        uint32_t mine = tile + u * type::GROUPS + lane / type::LANES;
        if (mine >= args.end) mine = args.end - 1;
        rows[u] = base + (uint64_t)mine * args.stride_nbytes;
      }
      float factor = 0.0f;
      if (args.metric == KALOS_METRIC_COSINE && alive) factor = ((const float*)args.factors)[row];
      float sums[KALOS_ROWS_TOGETHER][1][type::SUMS];
#pragma unroll
      for (uint32_t i = 0; i < KALOS_ROWS_TOGETHER * type::SUMS; ++i) (&sums[0][0][0])[i] = 0.0f;
      score_rows(args, rows, slice, sums);
      const float score = finish(tree<HALF>(sums[0][0], sums[1][0]), args.metric, factor);
      const uint64_t key = alive && speaks ? key_of(score, row) : 0;
      if constexpr (MANY)
        offer(shared.buffer, key);
      else
        bound = enter(best, key, bound, args.k);
    }
    uint64_t* list =
        (uint64_t*)args.lists + ((uint64_t)blockIdx.y * gridDim.x + blockIdx.x) * args.k;
    if constexpr (MANY) {
      settle(shared.buffer, args.k);
      for (uint32_t i = threadIdx.x; i < args.k; i += KALOS_RECALL_BLOCK)
        list[i] = i < shared.buffer.count ? shared.buffer.keys[i] : 0;
    } else {
      best = join_warps(best);
      if (threadIdx.x < args.k) list[threadIdx.x] = best;
    }
    uint32_t* counters = (uint32_t*)args.counters;
    if (!kalos_last_block(counters + 1 + blockIdx.y, gridDim.x)) return;
    if constexpr (MANY)
      merge_many(args, shared.buffer, blockIdx.y);
    else
      merge_few(args, blockIdx.y);
    // The last of the queries tells the host.
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (gridDim.y > 1) {
      if (kalos_count_up(counters) + 1 != gridDim.y) return;
      *counters = 0;
    }
    kalos_publish(&((kalos_done*)args.done)->ticket, args.ticket);
  }
};

#define KALOS_RECALL_KERNEL(name, half, l2, many, blocks)                   \
  extern "C" __global__ void __launch_bounds__(KALOS_RECALL_BLOCK, blocks)  \
      kalos_recall_##name(const __grid_constant__ kalos_recall_args args) { \
    recall<half, l2, many>::run(args);                                      \
  }

#endif  // KALOS_SCAN_CUH
