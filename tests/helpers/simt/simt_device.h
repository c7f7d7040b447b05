// simt_device.h: the helpers that kalos_device.cuh writes in PTX, for the CPU.
#ifndef KALOS_SIMT_DEVICE_H
#define KALOS_SIMT_DEVICE_H

KALOS_SIMT_INLINE uint4 kalos_load_once(const uint4* p) { return *p; }

// Another process may write the words meanwhile, so they are read once each.
KALOS_SIMT_INLINE uint4 kalos_load_shared_memory(const uint4* p) {
  const volatile unsigned* words = (const volatile unsigned*)p;
  return {words[0], words[1], words[2], words[3]};
}

KALOS_SIMT_INLINE void kalos_publish(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

KALOS_SIMT_INLINE uint32_t kalos_count_up(uint32_t* counter) {
  kalos_simt::maybe_pause();
  return __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL);
}

template <class T>
KALOS_SIMT_INLINE T* kalos_dynamic_shared() {
  return (T*)kalos_simt::dynamic_shared();
}

KALOS_SIMT_INLINE float kalos_simt_half(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = half >> 10 & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;
  if (exponent == 0) {
    const float small = (float)fraction * 0x1p-24f;
    return sign ? -small : small;
  }
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}
KALOS_SIMT_INLINE float kalos_half_low(uint32_t pair) { return kalos_simt_half(pair & 0xffffu); }
KALOS_SIMT_INLINE float kalos_half_high(uint32_t pair) { return kalos_simt_half(pair >> 16); }

// Rounds to nearest, ties to even, subnormals kept.
KALOS_SIMT_INLINE uint32_t kalos_simt_to_half(float value) {
  const uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u;
  const float size = __uint_as_float(bits & 0x7fffffffu);
  if (size != size) return sign | 0x7e00u;
  if (size >= 65520.0f) return sign | 0x7c00u;
  if (size < 0x1p-14f) return sign | (uint32_t)nearbyintf(size * 0x1p24f);
  const uint32_t whole = bits & 0x7fffffffu, odd = whole >> 13 & 1u;
  return sign | ((whole + 0xfffu + odd - (112u << 23)) >> 13);
}
KALOS_SIMT_INLINE uint32_t kalos_pack_halves(float low, float high) {
  return kalos_simt_to_half(low) | kalos_simt_to_half(high) << 16;
}
KALOS_SIMT_INLINE uint32_t kalos_multiply_halves(uint32_t a, uint32_t b) {
  // A product of two float16 is exact in float32, so it is rounded once.
  return kalos_pack_halves(kalos_half_low(a) * kalos_half_low(b),
                           kalos_half_high(a) * kalos_half_high(b));
}

// What the coarsest of the tensor cores does with four products and a sum: all are cut to the last
// place that float32 gives the largest, added, and the total is cut to float32. Subnormal float16
// count as zero, which a device need not do but may.
KALOS_SIMT_INLINE double kalos_simt_cut(double value, int place) {
  return ldexp(trunc(ldexp(value, -place)), place);
}
KALOS_SIMT_INLINE float kalos_simt_add_products(float sum, const float* a, const float* b) {
  double terms[5] = {sum}, total = 0;
  double largest = fabs(sum);
  for (int i = 0; i < 4; ++i) {
    const bool none = fabsf(a[i]) < 0x1p-14f || fabsf(b[i]) < 0x1p-14f;
    terms[i + 1] = none ? 0.0 : (double)a[i] * b[i];
    largest = fmax(largest, fabs(terms[i + 1]));
  }
  for (double term : terms)
    if (!(fabs(term) <= 0x1p127))
      return sum + a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
  if (largest == 0) return 0.0f;
  for (double term : terms) total += kalos_simt_cut(term, ilogb(largest) - 23);
  return total == 0 ? 0.0f : (float)kalos_simt_cut(total, ilogb(total) - 23);
}
KALOS_SIMT_INLINE void kalos_multiply_tiles(float* sums, uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1) {
  struct fragment {
    uint32_t a[4], b[2];
  } all[KALOS_SIMT_WARP];
  const fragment mine = {{a0, a1, a2, a3}, {b0, b1}};
  kalos_simt::exchange(mine, all);
  const unsigned lane = kalos_simt::lane(), g = lane / 4, t = lane % 4;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned query = 2 * t + i % 2;
    float a[16], b[16];
    for (unsigned word = 0; word < 8; ++word) {  // columns 2 * word and 2 * word + 1
      const uint32_t pair_a = all[4 * g + word % 4].a[i / 2 + word / 4 * 2];
      const uint32_t pair_b = all[4 * query + word % 4].b[word / 4];
      a[2 * word] = kalos_half_low(pair_a), a[2 * word + 1] = kalos_half_high(pair_a);
      b[2 * word] = kalos_half_low(pair_b), b[2 * word + 1] = kalos_half_high(pair_b);
    }
    for (unsigned from = 0; from < 16; from += 4)
      sums[i] = kalos_simt_add_products(sums[i], a + from, b + from);
  }
}

// Copies come in as late as a thread allows: who reads before it waited reads what was there.
struct kalos_simt_copies {
  static constexpr unsigned kMost = 128;
  struct {
    void* to;
    const void* from;
    unsigned nbytes, group;
  } all[kMost];
  unsigned done, asked, group;

  static kalos_simt_copies& own() {
    static kalos_simt_copies of_threads[1024];
    return of_threads[threadIdx.x];
  }
  void ask(void* to, const void* from, unsigned nbytes) {
    if (asked - done == kMost) kalos_simt::trap("too many copies in flight");
    if ((size_t)to % nbytes || (size_t)from % nbytes) kalos_simt::trap("a copy is not aligned");
    all[asked++ % kMost] = {to, from, nbytes, group};
  }
  void wait(unsigned left) {
    for (; done != asked && all[done % kMost].group + left < group; ++done) {
      const auto& one = all[done % kMost];
      for (unsigned i = 0; i < one.nbytes / 4; ++i)
        ((uint32_t*)one.to)[i] = ((const uint32_t*)one.from)[i];
    }
  }
};
KALOS_SIMT_INLINE void kalos_copy_16(void* shared, const void* global) {
  kalos_simt_copies::own().ask(shared, global, 16);
}
KALOS_SIMT_INLINE void kalos_copy_4(void* shared, const void* global) {
  kalos_simt_copies::own().ask(shared, global, 4);
}
KALOS_SIMT_INLINE void kalos_copies_end() { ++kalos_simt_copies::own().group; }
template <uint32_t left>
static inline void kalos_copies_wait() {
  kalos_simt_copies::own().wait(left);
}

KALOS_SIMT_INLINE uint32_t kalos_peek(const uint32_t* word) {
  kalos_simt::maybe_pause();
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

#endif  // KALOS_SIMT_DEVICE_H
