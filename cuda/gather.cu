// kalos_gather: copy the runs of tokens that a window is made of, and check each against its
// checksum in the form in which it was copied.
//   args.pieces  kalos_piece [num_pieces]       host or device
//   args.out     int32 [tokens]                 device; each token written once
//   args.host_out the same                      pinned host memory, or 0
//   args.done    kalos_done                     host, written last
// Grid: num_pieces blocks (at least 1). Block: KALOS_GATHER_BLOCK, four tokens a thread. Shared
// memory: 2 KiB. Reference: WindowParts.gather on the CPU. Bound: two dependent reads of host
// memory, then the tokens at the bus's bandwidth.
//
// The checksum. A register that begins as zero and takes in words w[0..n) ends as the sum over t of
// w[t] * x^(32 (n - t)) modulo P: each thread adds its words' terms, and sums of threads, warps and
// pieces are exclusive-ors. CRC-32C begins with all ones, which is the same as inverting the first
// word, and ends inverted.
#include "kalos_device.cuh"

#define KALOS_CRC_POLYNOMIAL 0x82f63b78u

// a * b modulo P, both reflected: bit 31 is x^0.
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    product ^= b & (uint32_t)((int32_t)(a << i) >> 31);
    b = (b >> 1) ^ (KALOS_CRC_POLYNOMIAL & (0u - (b & 1u)));
  }
  return product;
}

// The exclusive-or of the block's values; every thread takes part, thread 0 has the result.
__device__ __forceinline__ uint32_t block_xor(uint32_t value) {
  __shared__ uint32_t warps[KALOS_GATHER_BLOCK / KALOS_WARP];
  for (unsigned step = KALOS_WARP / 2; step; step /= 2)
    value ^= __shfl_xor_sync(KALOS_ALL_LANES, value, step);
  if (threadIdx.x % KALOS_WARP == 0) warps[threadIdx.x / KALOS_WARP] = value;
  __syncthreads();
  value = 0;
  for (unsigned i = 0; i < KALOS_GATHER_BLOCK / KALOS_WARP; ++i) value ^= warps[i];
  return value;
}

// Whether a run holds its checksum as far as this piece can tell: the last of a run's pieces that
// comes in tells.
__device__ __forceinline__ bool holds(const kalos_gather_args& args, const kalos_piece& piece,
                                      uint32_t crc) {
  if (piece.length == piece.total) return ~crc == piece.crc;
  const kalos_crc_powers* powers = (const kalos_crc_powers*)args.powers;
  const uint32_t pieces = piece.behind / KALOS_PIECE_TOKENS;
  if (pieces % KALOS_CRC_FAR) crc = multiply(crc, powers->far[pieces % KALOS_CRC_FAR]);
  if (pieces / KALOS_CRC_FAR) crc = multiply(crc, powers->farther[pieces / KALOS_CRC_FAR]);
  kalos_run_sum* sum = (kalos_run_sum*)args.sums + piece.run;
  atomicXor(&sum->crc, crc);
  __threadfence();
  if (atomicAdd(&sum->done, (uint32_t)piece.length) + piece.length != piece.total) return true;
  __threadfence();
  crc = atomicExch(&sum->crc, 0u);
  sum->done = 0;
  return ~crc == piece.crc;
}

extern "C" __global__ void __launch_bounds__(KALOS_GATHER_BLOCK)
    kalos_gather(const __grid_constant__ kalos_gather_args args) {
  alignas(16) __shared__ uint32_t tokens[KALOS_PIECE_TOKENS];
  alignas(16) __shared__ kalos_piece shared_piece;
  kalos_counters* counters = (kalos_counters*)args.counters;
  if (blockIdx.x < args.num_pieces) {
    if (blockIdx.x >= KALOS_GATHER_INLINE) {
      if (threadIdx.x < sizeof(kalos_piece) / sizeof(uint4))
        ((uint4*)&shared_piece)[threadIdx.x] = kalos_load_shared_memory(
            (const uint4*)((const kalos_piece*)args.pieces + blockIdx.x - KALOS_GATHER_INLINE) +
            threadIdx.x);
      __syncthreads();
    }
    const kalos_piece& piece =
        blockIdx.x < KALOS_GATHER_INLINE ? args.first[blockIdx.x] : shared_piece;
    const uint32_t at = threadIdx.x * 4;
    uint4 four = {0, 0, 0, 0};
    if (at < piece.length)
      four = kalos_load_shared_memory((const uint4*)piece.source + threadIdx.x);
    uint32_t words[4] = {four.x, four.y, four.z, four.w};
    uint32_t crc = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (at + i >= piece.length) break;
      tokens[at + i] = words[i];
    }
    if (piece.total && at < piece.length) {
      const uint32_t* near = ((const kalos_crc_powers*)args.powers)->near;
      const uint32_t end = piece.length + piece.behind % KALOS_PIECE_TOKENS;
      if (at == 0 && piece.length + piece.behind == piece.total) words[0] = ~words[0];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        if (at + i < piece.length) crc ^= multiply(words[i], near[end - at - i]);
    }
    crc = block_xor(crc);  // a barrier: `tokens` is whole
    if (threadIdx.x == 0 && piece.total && !holds(args, piece, crc))
      atomicMax(&counters->bad, blockIdx.x + 1);
    // In whole vectors of the destination, whose alignment is the window's.
    const uint32_t count = piece.copied;
    const uint32_t* from = tokens + piece.skip;
    uint32_t* out = (uint32_t*)args.out + piece.start;
    uint32_t* host_out = args.host_out ? (uint32_t*)args.host_out + piece.start : nullptr;
    uint32_t lead = (4 - piece.start % 4) % 4;
    if (lead > count) lead = count;
    const uint32_t vectors = (count - lead) / 4;
    if (threadIdx.x < vectors) {
      const uint32_t* p = from + lead + threadIdx.x * 4;
      const uint4 v = {p[0], p[1], p[2], p[3]};
      ((uint4*)(out + lead))[threadIdx.x] = v;
      if (host_out) ((uint4*)(host_out + lead))[threadIdx.x] = v;
    }
    const uint32_t rest = lead + vectors * 4;
    const uint32_t single = threadIdx.x < lead ? threadIdx.x : rest + threadIdx.x - lead;
    if (single < count) {
      out[single] = from[single];
      if (host_out) host_out[single] = from[single];
    }
  }
  if (kalos_last_block(&counters->blocks, gridDim.x) && threadIdx.x == 0) {
    kalos_done* done = (kalos_done*)args.done;
    done->bad = atomicExch(&counters->bad, 0u);
    kalos_publish(&done->ticket, args.ticket);
  }
}
