/* Vectors of fp32 numbers as wide as the processor's registers; in memory fp32 or bfloat16. */

#ifndef TINKER_VECTORS_H
#define TINKER_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined __AVX512F__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* The compiler splits wider vectors through memory, which is ten times as slow. */
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
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

/* Calls a function with the dtype as a constant last argument: the compiler makes one version of it
   for each, without branches in its loops. */
#define BY_DTYPE(half, function, ...)             \
    do {                                          \
        if (half) function(__VA_ARGS__, 1);       \
        else function(__VA_ARGS__, 0);            \
    } while (0)

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

INLINE float load_one(const void *from, int64_t at, int half) {
    return half ? widen(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

INLINE void store_one(void *to, int64_t at, float x, int half) {
    if (half) ((uint16_t *)to)[at] = narrow(x);
    else ((float *)to)[at] = x;
}

INLINE Floats load(const void *from, int64_t at, int half) {
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

INLINE void store_vector(void *to, int64_t at, Floats x, int half) {
    if (half) {
        Words bits;
        memcpy(&bits, &x, sizeof bits);
        bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* as `narrow` */
        const Words nan = (Words)(x != x);
        const Halves raw = __builtin_convertvector((bits & ~nan) | (nan & 0x7fc0), Halves);
        memcpy((uint16_t *)to + at, &raw, sizeof raw);
    } else {
        memcpy((float *)to + at, &x, sizeof x);
    }
}

/* `count` numbers, LANES or fewer. */
INLINE Floats load_part(const void *from, int64_t at, int64_t count, int half) {
    Floats out = {0};
    if (count >= LANES) return load(from, at, half);
    for (int64_t i = 0; i < count; i++) out[i] = load_one(from, at + i, half);
    return out;
}

INLINE void store_part(void *to, int64_t at, Floats x, int64_t count, int half) {
    if (count >= LANES) store_vector(to, at, x, half);
    else
        for (int64_t i = 0; i < count; i++) store_one(to, at + i, x[i], half);
}

/* Rounded to bfloat16 where the model computes in it. */
INLINE Floats rounded(Floats x, int half) {
    uint16_t raw[LANES];
    if (!half) return x;
    store_vector(raw, 0, x, 1);
    return load(raw, 0, 1);
}

INLINE Floats broadcast(float x) {
    int32_t bits; /* x may be two numbers of 16 bits, of which arithmetic would change some */
    memcpy(&bits, &x, 4);
    const Ints all = bits - (Ints){0};
    Floats out;
    memcpy(&out, &all, sizeof out);
    return out;
}

INLINE Floats blend(Ints where, Floats yes, Floats no) {
    Ints a, b;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    a = (a & where) | (b & ~where);
    memcpy(&yes, &a, sizeof a);
    return yes;
}

/* e^x for x <= 0 to 1 ulp; values below -87 count as -87. */
INLINE Floats exp_negative(Floats x) {
    x = blend(x < -87.0f, broadcast(-87.0f), x);
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds */
    const Floats k = (x * 1.44269504f + to_integer) - to_integer;
    /* x = k ln 2 + r; ln 2 in two parts, so that k times the first is exact. */
    const Floats r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    /* A polynomial for e^r (coefficients of the Cephes library), times 2^k. */
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    /* 2^k from its exponent bits; k is at least -126, so it is a normal number. */
    const Ints exponent = (__builtin_convertvector(k, Ints) + 127) << 23;
    Floats power;
    memcpy(&power, &exponent, sizeof power);
    return p * power;
}

/* values[at] of 16 values, for each of `at` (0 to 15). */
INLINE Floats lookup(const float *values, Words at) {
    Floats out;
#if defined __AVX512F__
    memcpy(&out, values, sizeof out);
    return __builtin_shuffle(out, at);
#elif defined __AVX__
    Floats low, high;
    memcpy(&low, values, sizeof low);
    memcpy(&high, values + LANES, sizeof high);
    return __builtin_shuffle(low, high, at);
#else
    for (int i = 0; i < LANES; i++) out[i] = values[at[i]];
    return out;
#endif
}

/* Numbers that are multiplied with others: float32; bfloat16, with float32; or pairs of bfloat16
   numbers, with pairs. A pair is one element of 32 bits. */
enum { FLOATS, HALVES, PAIRS };

#if defined __AVX512BF16__
enum { HAS_PAIRS = 1 };
INLINE Floats multiply_add(Floats sum, Floats x, Floats y, int kind) {
    if (kind != PAIRS) return sum + x * y;
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
#else
enum { HAS_PAIRS = 0 };
INLINE Floats multiply_add(Floats sum, Floats x, Floats y, int kind) { return sum + x * y; }
#endif

/* Prefetches `bytes` bytes. */
INLINE void prefetch(const void *from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b);
}

#endif
