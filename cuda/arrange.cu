// kalos_arrange: lay windows into one batch, with places and masks.
//   rows       kalos_arrange_row [num_rows]   device; packed: starts ascending from 0, no gaps
//   token_ids  int32 or int64 [num_cells]     device, every cell written once
//   positions  the same type, or 0            device
//   mask       the same type, or 0            device
// A packed batch has one row after the other; a padded one has num_rows * width cells, with the
// tokens at the row's right end (KALOS_ARRANGE_LEFT: the padding is on the left) or left end.
// Grid: any. Block: KALOS_ARRANGE_BLOCK. Shared memory: none.
// Launcher: _device_array.arrange. Reference: ContextBatch in batches.py. Bound: the cells written,
// 4 or 8 bytes for each array that is asked for.
#include "kalos_device.cuh"

// Which row a packed cell stands in: the last that begins at the cell or before it. Rows without
// tokens begin where the next one does, so they are never the last.
__device__ __forceinline__ uint32_t kalos_packed_row(const kalos_arrange_row* __restrict__ rows,
                                                     uint32_t num_rows, uint64_t cell) {
  uint32_t low = 0,
           high = num_rows;  // rows[low] begins at the cell or before, rows[high] behind it
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (rows[middle].start <= cell) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <typename Cell>
__device__ __forceinline__ void kalos_arrange_cells(const kalos_arrange_args& args) {
  const auto* __restrict__ rows = reinterpret_cast<const kalos_arrange_row*>(args.rows);
  auto* __restrict__ token_ids = reinterpret_cast<Cell*>(args.token_ids);
  auto* __restrict__ positions = reinterpret_cast<Cell*>(args.positions);
  auto* __restrict__ mask = reinterpret_cast<Cell*>(args.mask);
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  uint64_t cell = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; cell < args.num_cells; cell += step) {
    uint32_t number;
    uint64_t place;  // in the row's tokens; beyond their length: padding
    if (args.layout == KALOS_ARRANGE_PACKED) {
      number = kalos_packed_row(rows, args.num_rows, cell);
      place = cell - rows[number].start;
    } else {
      number = static_cast<uint32_t>(cell / args.width);
      place = cell - static_cast<uint64_t>(number) * args.width;
      // Left of the tokens the difference wraps around, far beyond any length.
      if (args.layout == KALOS_ARRANGE_LEFT) place -= args.width - rows[number].length;
    }
    const kalos_arrange_row row = rows[number];
    const bool holds = place < row.length;
    token_ids[cell] = holds ? reinterpret_cast<const int32_t*>(row.tokens)[place] : args.pad_id;
    if (positions) positions[cell] = holds ? static_cast<Cell>(place) : 0;
    if (mask) mask[cell] = holds ? 1 : 0;
  }
}

extern "C" __global__ void __launch_bounds__(KALOS_ARRANGE_BLOCK)
    kalos_arrange(const __grid_constant__ kalos_arrange_args args) {
  static_assert(sizeof(kalos_arrange_row) == 16, "one load");
  if (args.wide) {
    kalos_arrange_cells<long long>(args);
  } else {
    kalos_arrange_cells<int32_t>(args);
  }
  if (args.done == 0) return;
  const bool last = kalos_last_block(reinterpret_cast<uint32_t*>(args.counter), gridDim.x);
  if (!last || threadIdx.x != 0) return;
  auto* done = reinterpret_cast<kalos_done*>(args.done);
  done->bad = 0;
  kalos_publish(&done->ticket, args.ticket);
}
