// simt_types.h: CUDA's vector types, with their alignment.
#ifndef KALOS_SIMT_TYPES_H
#define KALOS_SIMT_TYPES_H

#define KALOS_SIMT_VECTOR2(name, element, nbytes) \
  struct alignas(nbytes) name {                   \
    element x, y;                                 \
  };                                              \
  static inline name make_##name(element x, element y) { return {x, y}; }

#define KALOS_SIMT_VECTOR3(name, element) \
  struct name {                           \
    element x, y, z;                      \
  };                                      \
  static inline name make_##name(element x, element y, element z) { return {x, y, z}; }

#define KALOS_SIMT_VECTOR4(name, element, nbytes)                              \
  struct alignas(nbytes) name {                                                \
    element x, y, z, w;                                                        \
  };                                                                           \
  static inline name make_##name(element x, element y, element z, element w) { \
    return {x, y, z, w};                                                       \
  }

KALOS_SIMT_VECTOR2(char2, signed char, 2)
KALOS_SIMT_VECTOR2(uchar2, unsigned char, 2)
KALOS_SIMT_VECTOR2(short2, short, 4)
KALOS_SIMT_VECTOR2(ushort2, unsigned short, 4)
KALOS_SIMT_VECTOR2(int2, int, 8)
KALOS_SIMT_VECTOR2(uint2, unsigned, 8)
KALOS_SIMT_VECTOR2(float2, float, 8)
KALOS_SIMT_VECTOR2(double2, double, 16)
KALOS_SIMT_VECTOR2(longlong2, long long, 16)
KALOS_SIMT_VECTOR2(ulonglong2, unsigned long long, 16)
KALOS_SIMT_VECTOR3(int3, int)
KALOS_SIMT_VECTOR3(uint3, unsigned)
KALOS_SIMT_VECTOR3(float3, float)
KALOS_SIMT_VECTOR4(char4, signed char, 4)
KALOS_SIMT_VECTOR4(uchar4, unsigned char, 4)
KALOS_SIMT_VECTOR4(short4, short, 8)
KALOS_SIMT_VECTOR4(ushort4, unsigned short, 8)
KALOS_SIMT_VECTOR4(int4, int, 16)
KALOS_SIMT_VECTOR4(uint4, unsigned, 16)
KALOS_SIMT_VECTOR4(float4, float, 16)

#undef KALOS_SIMT_VECTOR2
#undef KALOS_SIMT_VECTOR3
#undef KALOS_SIMT_VECTOR4

struct dim3 {
  unsigned x, y, z;
};

#endif  // KALOS_SIMT_TYPES_H
