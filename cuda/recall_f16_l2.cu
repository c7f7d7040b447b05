// kalos_recall_f16_l2_few, _many: recall over float16 rows, squared distance.
// kalos_scan.cuh says all about them. A file of its own, so that each is compiled beside the
// others.
#include "kalos_scan.cuh"

KALOS_RECALL_KERNEL(f16_l2_few, true, true, false, 4)
KALOS_RECALL_KERNEL(f16_l2_many, true, true, true, 3)
