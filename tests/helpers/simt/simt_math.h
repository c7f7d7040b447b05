// simt_math.h: CUDA's functions on one thread's own values: bits, conversions, arithmetic, loads.
#ifndef KALOS_SIMT_MATH_H
#define KALOS_SIMT_MATH_H

#define KALOS_SIMT_INLINE static inline __attribute__((unused))

// ---- Bits ---------------------------------------------------------------------------------------
KALOS_SIMT_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
KALOS_SIMT_INLINE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
KALOS_SIMT_INLINE int __ffs(int v) { return __builtin_ffs(v); }
KALOS_SIMT_INLINE int __ffsll(long long v) { return __builtin_ffsll(v); }
KALOS_SIMT_INLINE int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
KALOS_SIMT_INLINE int __clzll(long long v) {
  return v ? __builtin_clzll((unsigned long long)v) : 64;
}
KALOS_SIMT_INLINE unsigned __brev(unsigned v) {
  unsigned turned = 0;
  for (int i = 0; i < 32; ++i) turned |= (v >> i & 1u) << (31 - i);
  return turned;
}
KALOS_SIMT_INLINE unsigned long long __brevll(unsigned long long v) {
  return (unsigned long long)__brev((unsigned)v) << 32 | __brev((unsigned)(v >> 32));
}
KALOS_SIMT_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = (uint64_t)high << 32 | low;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> (4 * i);
    picked |= (unsigned)(both >> (8 * (nibble & 7u)) & 0xffu) << (8 * i);
  }
  return picked;
}
KALOS_SIMT_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((((uint64_t)high << 32 | low) << (shift & 31u)) >> 32);
}
KALOS_SIMT_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31u));
}
KALOS_SIMT_INLINE unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
KALOS_SIMT_INLINE unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}
KALOS_SIMT_INLINE unsigned __umulhi(unsigned a, unsigned b) {
  return (unsigned)((uint64_t)a * b >> 32);
}
KALOS_SIMT_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
KALOS_SIMT_INLINE int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
KALOS_SIMT_INLINE int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += (int8_t)(a >> (8 * i)) * (int8_t)(b >> (8 * i));
  return sum;
}
KALOS_SIMT_INLINE unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 4; ++i) sum += (a >> (8 * i) & 0xffu) * (b >> (8 * i) & 0xffu);
  return sum;
}

// ---- The same bits as another type --------------------------------------------------------------
namespace kalos_simt {
template <class To, class From>
static inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same_bits");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
}  // namespace kalos_simt

KALOS_SIMT_INLINE unsigned __float_as_uint(float v) { return kalos_simt::same_bits<unsigned>(v); }
KALOS_SIMT_INLINE int __float_as_int(float v) { return kalos_simt::same_bits<int>(v); }
KALOS_SIMT_INLINE float __uint_as_float(unsigned v) { return kalos_simt::same_bits<float>(v); }
KALOS_SIMT_INLINE float __int_as_float(int v) { return kalos_simt::same_bits<float>(v); }
KALOS_SIMT_INLINE long long __double_as_longlong(double v) {
  return kalos_simt::same_bits<long long>(v);
}
KALOS_SIMT_INLINE double __longlong_as_double(long long v) {
  return kalos_simt::same_bits<double>(v);
}

// ---- Arithmetic: round to nearest, never contracted ---------------------------------------------
KALOS_SIMT_INLINE float __fadd_rn(float a, float b) { return a + b; }
KALOS_SIMT_INLINE float __fsub_rn(float a, float b) { return a - b; }
KALOS_SIMT_INLINE float __fmul_rn(float a, float b) { return a * b; }
KALOS_SIMT_INLINE float __fdiv_rn(float a, float b) { return a / b; }
KALOS_SIMT_INLINE float __fsqrt_rn(float a) { return sqrtf(a); }
KALOS_SIMT_INLINE float __frcp_rn(float a) { return 1.0f / a; }
KALOS_SIMT_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
KALOS_SIMT_INLINE double __dadd_rn(double a, double b) { return a + b; }
KALOS_SIMT_INLINE double __dmul_rn(double a, double b) { return a * b; }
KALOS_SIMT_INLINE double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
KALOS_SIMT_INLINE float __int2float_rn(int v) { return (float)v; }
KALOS_SIMT_INLINE float __uint2float_rn(unsigned v) { return (float)v; }

#define KALOS_SIMT_MINMAX(result, a_type, b_type)         \
  KALOS_SIMT_INLINE result min(a_type a, b_type b) {      \
    return (result)b < (result)a ? (result)b : (result)a; \
  }                                                       \
  KALOS_SIMT_INLINE result max(a_type a, b_type b) {      \
    return (result)a < (result)b ? (result)b : (result)a; \
  }
KALOS_SIMT_MINMAX(int, int, int)
KALOS_SIMT_MINMAX(unsigned, unsigned, unsigned)
KALOS_SIMT_MINMAX(unsigned, int, unsigned)
KALOS_SIMT_MINMAX(unsigned, unsigned, int)
KALOS_SIMT_MINMAX(long, long, long)
KALOS_SIMT_MINMAX(unsigned long, unsigned long, unsigned long)
KALOS_SIMT_MINMAX(unsigned long, long, unsigned long)
KALOS_SIMT_MINMAX(unsigned long, unsigned long, long)
KALOS_SIMT_MINMAX(long long, long long, long long)
KALOS_SIMT_MINMAX(unsigned long long, unsigned long long, unsigned long long)
KALOS_SIMT_MINMAX(unsigned long long, unsigned long, unsigned long long)
KALOS_SIMT_MINMAX(unsigned long long, unsigned long long, unsigned long)
#undef KALOS_SIMT_MINMAX
KALOS_SIMT_INLINE float min(float a, float b) { return fminf(a, b); }
KALOS_SIMT_INLINE float max(float a, float b) { return fmaxf(a, b); }
KALOS_SIMT_INLINE double min(double a, double b) { return fmin(a, b); }
KALOS_SIMT_INLINE double max(double a, double b) { return fmax(a, b); }

// ---- Loads and stores with a cache hint ---------------------------------------------------------
#define KALOS_SIMT_LOAD(name)              \
  template <class T>                       \
  static inline T name(const T* address) { \
    return *address;                       \
  }
KALOS_SIMT_LOAD(__ldg)
KALOS_SIMT_LOAD(__ldcg)
KALOS_SIMT_LOAD(__ldca)
KALOS_SIMT_LOAD(__ldcs)
KALOS_SIMT_LOAD(__ldlu)
KALOS_SIMT_LOAD(__ldcv)
#undef KALOS_SIMT_LOAD

#define KALOS_SIMT_STORE(name)                                     \
  template <class T>                                               \
  static inline void name(T* address, std::remove_cv_t<T> value) { \
    *address = value;                                              \
  }
KALOS_SIMT_STORE(__stcg)
KALOS_SIMT_STORE(__stcs)
KALOS_SIMT_STORE(__stwb)
KALOS_SIMT_STORE(__stwt)
#undef KALOS_SIMT_STORE

// Whether an address is of global memory: here, not of the block's shared memory.
template <class T>
static inline size_t __cvta_generic_to_shared(const T* address) {
  return (size_t)address;
}

#endif  // KALOS_SIMT_MATH_H
