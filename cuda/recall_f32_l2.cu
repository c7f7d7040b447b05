// kalos_recall_f32_l2_few, _many: recall over float32 rows, squared distance.
// kalos_scan.cuh says all about them. A file of its own, so that each is compiled beside the
// others.
#include "kalos_scan.cuh"

KALOS_RECALL_KERNEL(f32_l2_few, false, true, false, 4)
KALOS_RECALL_KERNEL(f32_l2_many, false, true, true, 3)
