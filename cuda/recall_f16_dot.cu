// kalos_recall_f16_dot_few, _many: recall over float16 rows, dot product and cosine.
// kalos_scan.cuh says all about them. A file of its own, so that each is compiled beside the
// others.
#include "kalos_scan.cuh"

KALOS_RECALL_KERNEL(f16_dot_few, true, false, false, 4)
KALOS_RECALL_KERNEL(f16_dot_many, true, false, true, 3)
