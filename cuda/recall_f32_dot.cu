// kalos_recall_f32_dot_few, _many: recall over float32 rows, dot product and cosine.
// kalos_scan.cuh says all about them. A file of its own, so that each is compiled beside the
// others.
#include "kalos_scan.cuh"

KALOS_RECALL_KERNEL(f32_dot_few, false, false, false, 4)
KALOS_RECALL_KERNEL(f32_dot_many, false, false, true, 3)
