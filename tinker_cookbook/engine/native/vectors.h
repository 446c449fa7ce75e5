/* Vectors of fp32 numbers as wide as the processor's registers, filled from fp32 or bfloat16. */

#ifndef TINKER_VECTORS_H
#define TINKER_VECTORS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Wider vectors than the processor's are split by way of memory, which is ten times as slow. */
#if defined __AVX512F__
enum { LANES = 16, REGISTERS = 32 };
#elif defined __AVX__
enum { LANES = 8, REGISTERS = 16 };
#elif defined __aarch64__
enum { LANES = 4, REGISTERS = 32 };
#else
enum { LANES = 4, REGISTERS = 16 };
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

INLINE float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

INLINE uint16_t narrow(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float one(const void *from, int64_t at, int half) {
    return half ? widen(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

INLINE Floats many(const void *from, int64_t at, int half) {
    Floats out;
    if (half) {
        Halves raw;
        memcpy(&raw, (const uint16_t *)from + at, sizeof raw);
        Words bits = __builtin_convertvector(raw, Words) << 16;
        memcpy(&out, &bits, sizeof out);
    } else {
        memcpy(&out, (const float *)from + at, sizeof out);
    }
    return out;
}

INLINE Floats all(float x) {
    return x - (Floats){0}; /* a vector minus zeros keeps every bit of x */
}

/* Fetches the lines of `bytes` bytes. */
INLINE void fetch(const void *from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b);
}

#endif
