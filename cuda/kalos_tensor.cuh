// kalos_tensor.cuh: kalos_recall_batch_*, the best rows for each of many queries, exactly, in one
// launch and, for a group of queries, one pass over the rows. The score and the order of hits are
// DESIGN.md's.
//   args.rows   rows of dim elements (float32 or float16), stride_nbytes apart    device
//   args.hits   uint64 keys [num_queries][k], best first, zeros behind the last   host
//   args.lost   uint32 [num_queries]: 1 where a row may be missing from the hits  host
//   args.done   kalos_done                                                        host, last
// Grid: x blocks that share the rows, y groups of KALOS_BATCH_FEW or KALOS_BATCH_MANY queries.
// Block: whole warps, at most KALOS_BATCH_FEW_WARPS or KALOS_BATCH_MANY_WARPS. Shared memory:
// KALOS_BATCH_SHARED_NBYTES, dynamic. Reference: _cpu_ops on the CPU, equal to the bit, but for
// queries of which args.lost says that another kernel must be asked. Bound: the rows at the
// device's bandwidth.
//
// The tensor cores look at every row first, in float16. How far their score may be from the score
// as defined is proved in kalos_bounds.cuh: each row gets a lower and an upper bound. A row whose
// upper bound is below the k-th best lower bound is no hit. The few others are kept, and scored as
// DESIGN.md says at the end. A block has room for KALOS_BATCH_KEPT rows of a query at a time: where
// more are nearly equal, the best bound of those without room is kept, and the query counts as lost
// unless all its hits are better than that.
//
// Rows travel from memory to a ring in shared memory, and each lane reads what it asked for itself:
// no lane waits for another warp, and the ring stays full from tile to tile. In flight on a
// multiprocessor with 16 warps: 16 * 3 stages * 2 KB = 96 KB, all the time.
#ifndef KALOS_TENSOR_CUH
#define KALOS_TENSOR_CUH

#include "kalos_batch.cuh"

// ---- The kernel ---------------------------------------------------------------------------------
// PAIRS * 16 queries at most: a pair of tiles of 8 queries is one 16-byte load of their fragments.
template <bool HALF, uint32_t PAIRS>
struct recall_batch {
  using type = row_type<HALF>;
  using stream = tile_stream<HALF>;
  static constexpr uint32_t QUERIES = 16 * PAIRS;
  static constexpr uint32_t MULTIPLIES = HALF ? 2 : 1;  // of a stage, 16 columns each

  const kalos_recall_batch_args& args;
  uint32_t first;  // query of the group, of
  uint32_t count;
  uint32_t pairs;  // that are not empty
  query_state* states;
  uint4* fragments;  // [dim / 16][pairs][lane]

  __device__ __forceinline__ recall_batch(const kalos_recall_batch_args& args_, void* shared)
      : args(args_), first(blockIdx.y * QUERIES) {
    count = args.num_queries - first < QUERIES ? args.num_queries - first : QUERIES;
    pairs = (count + 15) / 16;
    states = (query_state*)shared;
    fragments = (uint4*)(states + pairs * 16);
  }

  __device__ __forceinline__ const float* query_at(uint32_t query) const {
    return (const float*)args.queries + (uint64_t)(first + query) * args.dim;
  }
  // The bound of all blocks and what they lost, by query of the group.
  __device__ __forceinline__ uint32_t* bounds_of_all() const {
    return (uint32_t*)args.counters + KALOS_BATCH_COUNTERS + first;
  }
  __device__ __forceinline__ uint32_t* lost_of_all() const {
    return bounds_of_all() + args.num_queries;
  }

  __device__ __forceinline__ const kalos_recall_scope& scope_of(uint32_t query) const {
    return ((const kalos_recall_scope*)args.scopes)[args.num_scopes == 1 ? 0 : first + query];
  }

  // States of all queries, by warps.
  __device__ __forceinline__ void begin_states(uint32_t warp, uint32_t warps) const {
    const uint32_t lane = threadIdx.x % KALOS_WARP;
    for (uint32_t q = warp; q < pairs * 16; q += warps) {
      query_state& state = states[q];
      const float norm = q < count ? query_norm(query_at(q), args.dim) : 0.0f;
      state.lower[lane] = 0;
      if (lane != 0) continue;
      state.terms = query_terms(args.metric, norm_within(norm));
      state.bound = q < count ? ordered(scope_of(q).min_score) : KALOS_ORDERED_INFINITY;
      state.count = state.lost = state.lock = 0;
    }
  }

  // Queries in float16 as the tensor cores take them: of columns as the rows' loads lie.
  __device__ __forceinline__ void begin_fragments() const {
    const uint32_t all = args.dim / 16 * pairs * KALOS_WARP;
    for (uint32_t i = threadIdx.x; i < all; i += blockDim.x) {
      const uint32_t pair = i / KALOS_WARP % pairs, multiply = i / KALOS_WARP / pairs;
      uint32_t words[4];
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t q = pair * 16 + half * 8 + i % KALOS_WARP / 4;
        query_words<HALF>(q < count ? query_at(q) : nullptr, multiply, i % 4, states[q].terms.error,
                          words + 2 * half);
      }
      fragments[i] = {words[0], words[1], words[2], words[3]};
    }
  }

  // One stage: 32 rows, in four loads of this lane, times all queries.
  __device__ __forceinline__ void multiply(const uint4* stage, uint32_t step,
                                           const uint32_t* scales,
                                           float (&sums)[2][2 * PAIRS][4]) const {
    const uint32_t lane = threadIdx.x % KALOS_WARP;
#pragma unroll
    for (uint32_t m = 0; m < MULTIPLIES; ++m) {
      uint32_t words[4][2];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        row_words<HALF>(stage + i * KALOS_WARP + lane, m, scales[i], words[i]);
#pragma unroll
      for (uint32_t pair = 0; pair < PAIRS; ++pair) {
        if (PAIRS > 1 && pair >= pairs) break;
        const uint4 two = fragments[((step * MULTIPLIES + m) * pairs + pair) * KALOS_WARP + lane];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          kalos_multiply_tiles(sums[i][2 * pair], words[2 * i][0], words[2 * i + 1][0],
                               words[2 * i][1], words[2 * i + 1][1], two.x, two.y);
          kalos_multiply_tiles(sums[i][2 * pair + 1], words[2 * i][0], words[2 * i + 1][0],
                               words[2 * i][1], words[2 * i + 1][1], two.z, two.w);
        }
      }
    }
  }

  // Queries of which a row of the tile may be a hit, as bits. `own` are the terms of row `lane`.
  __device__ __forceinline__ uint64_t look(const float (&sums)[2][2 * PAIRS][4],
                                           const score_terms& own, bool alive) const {
    const uint32_t lane = threadIdx.x % KALOS_WARP;
    uint32_t passed = 0;  // bit 2 * n + p: of query 8 * n + 2 * (lane % 4) + p
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      score_terms rows[2];  // rows g and g + 8 of 16
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t from = i * 16 + j * 8 + lane / 4;
        rows[j].scale = __shfl_sync(KALOS_ALL_LANES, own.scale, from);
        rows[j].error = __shfl_sync(KALOS_ALL_LANES, own.error, from);
        rows[j].upper = __shfl_sync(KALOS_ALL_LANES, alive ? own.upper : -KALOS_INFINITY, from);
      }
#pragma unroll
      for (uint32_t n = 0; n < 2 * PAIRS; ++n) {
        if (PAIRS > 1 && n >= 2 * pairs) break;
#pragma unroll
        for (uint32_t p = 0; p < 2; ++p) {
          const query_state& state = states[n * 8 + lane % 4 * 2 + p];
          const score_terms query = state.terms;
          const float bound = score_of(*(const volatile uint32_t*)&state.bound);
          const bool any = !(upper_bound(sums[i][n][p], rows[0], query) < bound) ||
                           !(upper_bound(sums[i][n][2 + p], rows[1], query) < bound);
          passed |= (uint32_t)any << (2 * n + p);
        }
      }
    }
    if (!__any_sync(KALOS_ALL_LANES, passed)) return 0;
    uint64_t mine = 0;
#pragma unroll
    for (uint32_t n = 0; n < 2 * PAIRS; ++n)
      mine |= (uint64_t)(passed >> (2 * n) & 3u) << (n * 8 + lane % 4 * 2);
#pragma unroll
    for (uint32_t step = KALOS_WARP / 2; step; step /= 2)
      mine |= __shfl_xor_sync(KALOS_ALL_LANES, mine, step);
    return mine & (~(uint64_t)0 >> (64 - count));
  }

  // The sum of row `lane` with a query.
  __device__ __forceinline__ static float own_sum(const float (&sums)[2][2 * PAIRS][4],
                                                  uint32_t query) {
    const uint32_t lane = threadIdx.x % KALOS_WARP;
    uint32_t given[4] = {0, 0, 0, 0};  // by masks, so that the sums stay in registers
#pragma unroll
    for (uint32_t n = 0; n < 2 * PAIRS; ++n) {
#pragma unroll
      for (uint32_t p = 0; p < 2; ++p) {
        const uint32_t here = query / 8 == n && query % 2 == p ? ~0u : 0u;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
          given[i] |= here & __float_as_uint(sums[i / 2][n][i % 2 * 2 + p]);
      }
    }
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t one = __shfl_sync(KALOS_ALL_LANES, given[i], lane % 8 * 4 + query % 8 / 2);
      if (lane / 8 == i) sum = one;
    }
    return __uint_as_float(sum);
  }

  __device__ __forceinline__ void keep_rows(const float (&sums)[2][2 * PAIRS][4], uint64_t passed,
                                            const score_terms& own, bool alive,
                                            uint32_t row) const {
    const uint32_t start = threadIdx.x / KALOS_WARP * PAIRS;  // so that warps want other locks
    while (passed) {
      const uint64_t ahead = passed >> start << start;
      const uint32_t q = __ffsll((long long)(ahead ? ahead : passed)) - 1;
      passed &= ~((uint64_t)1 << q);
      const float sum = own_sum(sums, q);
      query_state& state = states[q];
      const score_terms query = state.terms;
      const float high = upper_bound(sum, own, query), low = lower_bound(sum, own, query);
      uint32_t upper = high == high ? ordered(high) : KALOS_ORDERED_INFINITY;
      if (!alive || upper < *(volatile uint32_t*)&state.bound) upper = 0;
      if (upper && args.num_scopes > 1) {
        const kalos_recall_scope& scope = scope_of(q);
        if (!in_extents(scope, row) || (scope.allowed && !bit_of(scope.allowed, row))) upper = 0;
      }
      if (!__any_sync(KALOS_ALL_LANES, upper)) continue;
      const uint32_t lower = upper && low == low ? ordered(low) : 0;
      keep(state, bounds_of_all() + q, args.k, row, upper, lower);
    }
  }

  // The rows of one warp, tile by tile.
  __device__ __forceinline__ void scan(warp_ring& ring, stream& tiles, uint32_t warp) const {
    const uint32_t lane = threadIdx.x % KALOS_WARP;
    const uint32_t steps = args.dim / stream::STEP;
    // The query whose bound of all blocks this lane follows.
    const uint32_t followed = threadIdx.x % (QUERIES < KALOS_WARP ? KALOS_WARP : QUERIES);
    uint32_t seen = 0;
    uint32_t stage = 0;
    for (uint32_t tile = 0; tile < tiles.asked; ++tile) {
      float sums[2][2 * PAIRS][4];
#pragma unroll
      for (uint32_t i = 0; i < 16 * PAIRS; ++i) (&sums[0][0][0])[i] = 0.0f;
      kalos_copies_wait<KALOS_BATCH_STAGES - 2>();
      __syncwarp();
      const tile_slot& slot = ring.slots[tile % (KALOS_BATCH_STAGES + 1)];
      const uint32_t scale = scale_word<HALF>(args.metric, slot.lengths[lane]);
      uint32_t scales[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        scales[i] = __shfl_sync(KALOS_ALL_LANES, scale, i * 8 + lane / 4);
      for (uint32_t step = 0; step < steps; ++step) {
        kalos_copies_wait<KALOS_BATCH_STAGES - 2>();
        tiles.ask(ring, (stage + KALOS_BATCH_STAGES - 1) % KALOS_BATCH_STAGES);
        multiply(ring.stages[stage], step, scales, sums);
        stage = (stage + 1) % KALOS_BATCH_STAGES;
      }
      // Looked up again: registers are dear above.
      const score_terms own = row_terms<HALF>(args.metric, args.dim, slot.lengths[lane]);
      const bool alive = slot.alive >> lane & 1u;
      const uint64_t passed = look(sums, own, alive);
      if (passed) keep_rows(sums, passed, own, alive, slot.row + lane);
      if ((tile + warp) % 4 == 0 && followed < count) {
        if (seen > states[followed].bound) atomicMax(&states[followed].bound, seen);
        seen = kalos_peek(bounds_of_all() + followed);  // looked at four tiles later
      }
    }
    kalos_copies_wait<0>();
  }

  // The score as defined of the rows of this lane's group: of one of them, as `tree` says.
  template <bool L2>
  __device__ __forceinline__ float score_rows(const char* const* rows, const float* query) const {
    float sums[KALOS_ROWS_TOGETHER][1][type::SUMS];
#pragma unroll
    for (uint32_t i = 0; i < KALOS_ROWS_TOGETHER * type::SUMS; ++i) (&sums[0][0][0])[i] = 0.0f;
#pragma unroll 4
    for (uint32_t d = 0; d < args.dim; d += KALOS_SCORE_LANES) {
      uint4 loads[KALOS_ROWS_TOGETHER];
#pragma unroll
      for (uint32_t u = 0; u < KALOS_ROWS_TOGETHER; ++u)
        loads[u] = kalos_load_once((const uint4*)(rows[u] + d * (HALF ? 2 : 4)));
      add_step<HALF, L2, 1>(loads, query + d, args.dim, sums);
    }
    return tree<HALF>(sums[0][0], sums[1][0]);
  }

  // The exact keys of what is kept for a query: the best 32, sorted, one a lane.
  __device__ __forceinline__ uint64_t exact(uint32_t q) const {
    constexpr uint32_t HALF_GROUP = type::LANES / 2;
    const uint32_t lane = threadIdx.x % KALOS_WARP;
    query_state& state = states[q];
    uint32_t bound = max(state.bound, kalos_peek(bounds_of_all() + q));
    bound = __shfl_sync(KALOS_ALL_LANES, bound, 0);
    const uint32_t kept = drop_useless(state, state.count, bound);
    if (lane == 0 && state.lost && state.lost >= bound) atomicMax(lost_of_all() + q, state.lost);
    const uint32_t own = lane / HALF_GROUP % 2 * type::GROUPS + lane / type::LANES;
    const float* query = query_at(q) + lane % type::LANES * type::SUMS;
    uint64_t best = 0, worst = key_floor(scope_of(q).min_score) - 1;
    for (uint32_t at = 0; at < kept; at += type::TILE) {
      const char* rows[KALOS_ROWS_TOGETHER];
#pragma unroll
      for (uint32_t u = 0; u < KALOS_ROWS_TOGETHER; ++u) {
        const uint32_t mine = at + u * type::GROUPS + lane / type::LANES;
        const uint32_t row = ~(uint32_t)state.kept[mine < kept ? mine : kept - 1];
        rows[u] = (const char*)args.rows + (uint64_t)row * args.stride_nbytes +
                  lane % type::LANES * sizeof(uint4);
      }
      const float sum = args.metric == KALOS_METRIC_L2 ? score_rows<true>(rows, query)
                                                       : score_rows<false>(rows, query);
      uint64_t key = 0;
      if (at + own < kept && lane % HALF_GROUP == 0) {
        const uint32_t row = ~(uint32_t)state.kept[at + own];
        const float factor =
            args.metric == KALOS_METRIC_COSINE ? ((const float*)args.lengths)[row] : 0.0f;
        key = key_of(finish(sum, args.metric, factor), row);
      }
      worst = enter(best, key, worst, args.k);
    }
    return best;
  }

  // The best of all blocks' lists, which are sorted; by one warp. A bound comes first: the k-th of
  // the lanes' best scores.
  __device__ __forceinline__ void merge(uint32_t q) const {
    constexpr uint32_t TOGETHER = 4;
    const uint32_t lane = threadIdx.x % KALOS_WARP, blocks = gridDim.x;
    const unsigned long long* lists =
        (const unsigned long long*)args.lists + (uint64_t)(first + q) * args.k * blocks;
    uint32_t head = 0;
#pragma unroll 4
    for (uint32_t list = lane; list < blocks; list += KALOS_WARP)
      head = max(head, (uint32_t)(__ldcg(lists + list) >> 32));
    const uint32_t kth = __shfl_sync(KALOS_ALL_LANES, sort_words(head), args.k - 1);
    uint64_t bound = kth ? ((uint64_t)kth << 32) - 1 : 0;
    uint64_t best = 0;
    for (uint32_t rank = 0; rank < args.k; ++rank, lists += blocks) {
      bool any = false;
      for (uint32_t at = 0; at < blocks; at += TOGETHER * KALOS_WARP) {
        uint64_t keys[TOGETHER];
#pragma unroll
        for (uint32_t i = 0; i < TOGETHER; ++i) {
          const uint32_t list = at + i * KALOS_WARP + lane;
          keys[i] = list < blocks ? __ldcg(lists + list) : 0;
        }
#pragma unroll
        for (uint32_t i = 0; i < TOGETHER; ++i) {
          any |= keys[i] > bound;
          bound = enter(best, keys[i], bound, args.k);
        }
      }
      if (!__any_sync(KALOS_ALL_LANES, any)) break;
    }
    if (lane < args.k) ((uint64_t*)args.hits)[(uint64_t)(first + q) * args.k + lane] = best;
    const uint32_t worst = (uint32_t)(__shfl_sync(KALOS_ALL_LANES, best, args.k - 1) >> 32);
    if (lane != 0) return;
    const uint32_t lost = kalos_peek(lost_of_all() + q);
    ((uint32_t*)args.lost)[first + q] = lost && lost >= worst;
    lost_of_all()[q] = 0;
    bounds_of_all()[q] = 0;
  }

  __device__ __forceinline__ void run() const {
    const uint32_t lane = threadIdx.x % KALOS_WARP, warp = threadIdx.x / KALOS_WARP;
    const uint32_t warps = blockDim.x / KALOS_WARP;
    warp_ring& ring = ((warp_ring*)(fragments + args.dim / 16 * pairs * KALOS_WARP))[warp];
    stream tiles(args, warp);
    for (uint32_t stage = 0; stage + 1 < KALOS_BATCH_STAGES; ++stage) tiles.ask(ring, stage);
    begin_states(warp, warps);
    __syncthreads();
    begin_fragments();
    __syncthreads();
    scan(ring, tiles, warp);
    __syncthreads();
    for (uint32_t q = warp; q < count; q += warps) {
      const uint64_t best = exact(q);
      uint64_t* list = (uint64_t*)args.lists + (uint64_t)(first + q) * args.k * gridDim.x;
      if (lane < args.k) list[(uint64_t)lane * gridDim.x + blockIdx.x] = best;
    }
    uint32_t* counters = (uint32_t*)args.counters;
    if (!kalos_last_block(counters + 1 + blockIdx.y, gridDim.x)) return;
    for (uint32_t q = warp; q < count; q += warps) merge(q);
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (gridDim.y > 1) {
      if (kalos_count_up(counters) + 1 != gridDim.y) return;
      *counters = 0;
    }
    kalos_publish(&((kalos_done*)args.done)->ticket, args.ticket);
  }
};
static_assert(KALOS_RECALL_MAX_QUERIES / KALOS_BATCH_FEW < KALOS_BATCH_COUNTERS,
              "groups' counters");
static_assert(KALOS_BATCH_MAX_K <= KALOS_WARP, "lists are one key a lane");

#define KALOS_BATCH_KERNEL(name, half, pairs, warps)                                    \
  extern "C" __global__ void __launch_bounds__((warps) * KALOS_WARP, 1)                 \
      kalos_recall_batch_##name(const __grid_constant__ kalos_recall_batch_args args) { \
    recall_batch<half, pairs>(args, kalos_dynamic_shared<uint4>()).run();               \
  }

#endif  // KALOS_TENSOR_CUH
