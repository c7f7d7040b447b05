// simt_warp.h: CUDA's functions by which threads meet or share: barriers, shuffles, votes, atomics.
#ifndef KALOS_SIMT_WARP_H
#define KALOS_SIMT_WARP_H

// ---- Barriers and fences ------------------------------------------------------------------------
KALOS_SIMT_INLINE void __syncthreads() { kalos_simt::meet_block(kalos_simt::barrier::plain, 0); }
KALOS_SIMT_INLINE int __syncthreads_or(int predicate) {
  return kalos_simt::meet_block(kalos_simt::barrier::any, predicate);
}
KALOS_SIMT_INLINE int __syncthreads_and(int predicate) {
  return kalos_simt::meet_block(kalos_simt::barrier::all, predicate);
}
KALOS_SIMT_INLINE int __syncthreads_count(int predicate) {
  return kalos_simt::meet_block(kalos_simt::barrier::count, predicate);
}
KALOS_SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffffu) {
  kalos_simt::meet_warp(kalos_simt::meeting::sync, mask, 0, 0);
}
KALOS_SIMT_INLINE void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
KALOS_SIMT_INLINE void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
KALOS_SIMT_INLINE void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
KALOS_SIMT_INLINE void __nanosleep(unsigned) { kalos_simt::pause(); }
KALOS_SIMT_INLINE void __trap() { kalos_simt::trap("__trap()"); }
namespace kalos_simt {
long long clock_ns();
}
KALOS_SIMT_INLINE long long clock64() {
  kalos_simt::pause();
  return kalos_simt::clock_ns();
}

// ---- Votes --------------------------------------------------------------------------------------
KALOS_SIMT_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
  return (unsigned)kalos_simt::meet_warp(kalos_simt::meeting::ballot, mask, predicate != 0, 0);
}
KALOS_SIMT_INLINE int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
KALOS_SIMT_INLINE int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, !predicate) == 0;
}
// Threads of a warp may run one by one on the device, too: no lane is promised beside the caller.
KALOS_SIMT_INLINE unsigned __activemask() { return 1u << kalos_simt::lane(); }

// ---- Shuffles -----------------------------------------------------------------------------------
namespace kalos_simt {

template <class T>
static inline T shuffle(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  static_assert(std::is_trivially_copyable_v<T>, "shuffles move plain data");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = meet_warp(meeting::shuffle, mask, bits, from);
  memcpy((void*)&value, &bits, sizeof(T));
  return value;
}

// The first and the last lane of the caller's part of the warp.
static inline unsigned part_begin(int width) { return lane() & ~(unsigned)(width - 1); }
static inline unsigned part_last(int width) { return part_begin(width) + (unsigned)width - 1; }

}  // namespace kalos_simt

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return kalos_simt::shuffle(
      mask, value, kalos_simt::part_begin(width) + ((unsigned)from & (unsigned)(width - 1)));
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = kalos_simt::lane();
  const bool inside = lane >= kalos_simt::part_begin(width) + delta;
  return kalos_simt::shuffle(mask, value, inside ? lane - delta : lane);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = kalos_simt::lane();
  const bool inside = lane + delta <= kalos_simt::part_last(width);
  return kalos_simt::shuffle(mask, value, inside ? lane + delta : lane);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const unsigned lane = kalos_simt::lane();
  const unsigned from = lane ^ (unsigned)bits;
  return kalos_simt::shuffle(mask, value, from <= kalos_simt::part_last(width) ? from : lane);
}
template <class T>
static inline unsigned __match_any_sync(unsigned mask, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "matches compare 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return (unsigned)kalos_simt::meet_warp(kalos_simt::meeting::match, mask, bits, 0);
}

// ---- Reductions ---------------------------------------------------------------------------------
#define KALOS_SIMT_REDUCE(name, type, kind)                                                  \
  KALOS_SIMT_INLINE type name(unsigned mask, type value) {                                   \
    return (type)kalos_simt::meet_warp(kalos_simt::meeting::kind, mask, (unsigned)value, 0); \
  }
KALOS_SIMT_REDUCE(__reduce_add_sync, unsigned, add)
KALOS_SIMT_REDUCE(__reduce_add_sync, int, add)
KALOS_SIMT_REDUCE(__reduce_min_sync, unsigned, smallest)
KALOS_SIMT_REDUCE(__reduce_min_sync, int, smallest_signed)
KALOS_SIMT_REDUCE(__reduce_max_sync, unsigned, largest)
KALOS_SIMT_REDUCE(__reduce_max_sync, int, largest_signed)
KALOS_SIMT_REDUCE(__reduce_and_sync, unsigned, bits_and)
KALOS_SIMT_REDUCE(__reduce_or_sync, unsigned, bits_or)
KALOS_SIMT_REDUCE(__reduce_xor_sync, unsigned, bits_xor)
#undef KALOS_SIMT_REDUCE

// ---- Atomics: of the types that CUDA has; unsigned long is uint64_t here ------------------------
namespace kalos_simt {

template <class T>
inline constexpr bool is_whole =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long> ||
    std::is_same_v<T, unsigned long long>;
template <class T>
inline constexpr bool is_signed_long = std::is_same_v<T, long> || std::is_same_v<T, long long>;
template <class T>
struct plain {
  using type = T;
};

// Replaces the value by change(value). Host threads may work on the same word, so it is a real one.
template <class T, class Change>
static inline T atomic_change(T* address, Change change) {
  using bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  maybe_pause();
  bits before = __atomic_load_n((bits*)(void*)address, __ATOMIC_RELAXED);
  for (;;) {
    const bits after = same_bits<bits>(change(same_bits<T>(before)));
    if (__atomic_compare_exchange_n((bits*)(void*)address, &before, after, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
      return same_bits<T>(before);
    }
  }
}

}  // namespace kalos_simt

#define KALOS_SIMT_ATOMIC(name, allowed, expression)                                           \
  template <class T>                                                                           \
  static inline T name(T* address, typename kalos_simt::plain<T>::type value) {                \
    static_assert(allowed, #name ": no such type");                                            \
    return kalos_simt::atomic_change(address,                                                  \
                                     [=]([[maybe_unused]] T old) -> T { return expression; }); \
  }                                                                                            \
  template <class T>                                                                           \
  static inline T name##_block(T* address, typename kalos_simt::plain<T>::type value) {        \
    return name(address, value);                                                               \
  }                                                                                            \
  template <class T>                                                                           \
  static inline T name##_system(T* address, typename kalos_simt::plain<T>::type value) {       \
    return name(address, value);                                                               \
  }
KALOS_SIMT_ATOMIC(atomicAdd, kalos_simt::is_whole<T> || std::is_floating_point_v<T>, old + value)
KALOS_SIMT_ATOMIC(atomicSub, sizeof(T) == 4 && kalos_simt::is_whole<T>, old - value)
KALOS_SIMT_ATOMIC(atomicExch, kalos_simt::is_whole<T> || (std::is_same_v<T, float>), value)
KALOS_SIMT_ATOMIC(atomicMin, kalos_simt::is_whole<T> || kalos_simt::is_signed_long<T>,
                  value < old ? value : old)
KALOS_SIMT_ATOMIC(atomicMax, kalos_simt::is_whole<T> || kalos_simt::is_signed_long<T>,
                  old < value ? value : old)
KALOS_SIMT_ATOMIC(atomicAnd, kalos_simt::is_whole<T>, old& value)
KALOS_SIMT_ATOMIC(atomicOr, kalos_simt::is_whole<T>, old | value)
KALOS_SIMT_ATOMIC(atomicXor, kalos_simt::is_whole<T>, old ^ value)
KALOS_SIMT_ATOMIC(atomicInc, (std::is_same_v<T, unsigned>), old >= value ? 0 : old + 1)
KALOS_SIMT_ATOMIC(atomicDec, (std::is_same_v<T, unsigned>),
                  old == 0 || old > value ? value : old - 1)
#undef KALOS_SIMT_ATOMIC

template <class T>
static inline T atomicCAS(T* address, typename kalos_simt::plain<T>::type compare,
                          typename kalos_simt::plain<T>::type value) {
  static_assert(kalos_simt::is_whole<T>, "atomicCAS: no such type");
  return kalos_simt::atomic_change(address,
                                   [=](T old) -> T { return old == compare ? value : old; });
}

#endif  // KALOS_SIMT_WARP_H
