// Keys of hits as kernels write them (kalos_launch.h, "A hit as a key").
#ifndef KALOS_KEYS_H
#define KALOS_KEYS_H

#include <string.h>

#include "_recall.h"

static inline void kalos_hit_of_key(uint64_t key, kalos_hit* hit) {
  const uint32_t ordered = (uint32_t)(key >> 32);
  const uint32_t bits = ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered;
  memcpy(&hit->score, &bits, 4);
  hit->row = ~(uint32_t)key;
  hit->id = hit->row;
}

#endif  // KALOS_KEYS_H
