// kalos_recall_batch_f32_few: recall of up to KALOS_BATCH_FEW queries a group over float32 rows.
// kalos_tensor.cuh says all about it. A file of its own, so that it is compiled beside the others.
#include "kalos_tensor.cuh"

KALOS_BATCH_KERNEL(f32_few, false, KALOS_BATCH_FEW / 16, KALOS_BATCH_FEW_WARPS)
