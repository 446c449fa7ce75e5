/* The best rates of this processor, without any library: bytes/s read from memory that no cache
   holds, and FLOP/s of multiply-adds in registers.

   probe THREADS SECONDS prints: bytes/s, float32 FLOP/s, bfloat16 FLOP/s (0: no instruction). */

#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { VECTOR = 64 };
#else
enum { VECTOR = 32 };
#endif
/* Sums in flight: enough to hide the latency of an addition, few enough for 16 registers. */
enum { SUMS = 10, LANES = VECTOR / 4, ROUNDS = 1 << 17 };

typedef float floats __attribute__((vector_size(VECTOR)));
typedef uint64_t words __attribute__((vector_size(VECTOR)));

/* A run reads a part, the next run the part after it, so that a part is in no cache. Threads read
   chunks in turn: halves far apart fall into the same banks of the memory (34 instead of 52 GB/s). */
static const size_t BYTES = (size_t)384 << 20, PART = (size_t)128 << 20, CHUNK = 1 << 20;
static volatile uint64_t sink; /* results end here, so that no work is left out */

static double read_memory(const char *data) {
    static size_t start = 0;
    uint64_t total = 0;
#pragma omp parallel for schedule(static, 1) reduction(+ : total)
    for (size_t chunk = 0; chunk < PART / CHUNK; chunk++) {
        const words *from = (const words *)(data + start + chunk * CHUNK);
        words sums[8] = {0};
        for (size_t i = 0; i < CHUNK / VECTOR; i += 8)
            for (int j = 0; j < 8; j++) sums[j] += from[i + j];
        for (int j = 0; j < 8; j++) total += sums[j][0];
    }
    sink = total;
    start = (start + PART) % BYTES;
    return (double)PART;
}

/* Sums start from different numbers: the compiler would merge equal ones. */
#define MULTIPLY(name, type, operand, number, step, per_lane)                                  \
    static double name(const char *data) {                                                     \
        double total = 0;                                                                      \
        _Pragma("omp parallel reduction(+ : total)") {                                         \
            operand x = number(data[0]), y = number(data[1]);                                  \
            type sums[SUMS];                                                                   \
            for (int j = 0; j < SUMS; j++) sums[j] = (type){data[j]};                          \
            for (int i = 0; i < ROUNDS; i++)                                                   \
                _Pragma("GCC unroll 16") for (int j = 0; j < SUMS; j++) sums[j] = step;        \
            for (int j = 0; j < SUMS; j++) total += sums[j][0];                                \
        }                                                                                      \
        sink = (uint64_t)total;                                                                \
        return per_lane * LANES * SUMS * ROUNDS * omp_get_max_threads();                       \
    }

#define FLOATS(value) ((floats){0} + (float)(value))
MULTIPLY(multiply_float32, floats, floats, FLOATS, sums[j] * x + y, 2.0)

#ifdef __AVX512BF16__
#define PAIRS(value) ((__m512bh)_mm512_set1_epi32(value))
MULTIPLY(multiply_bfloat16, __m512, __m512bh, PAIRS, _mm512_dpbf16_ps(sums[j], x, y), 4.0)
#else
static double multiply_bfloat16(const char *data) { return 0 * data[0]; }
#endif

/* The best of many runs counts: other work on the machine only slows a run down. */
static double best(double (*work)(const char *), const char *data, double seconds) {
    double rate = 0, end = omp_get_wtime() + seconds;
    do {
        double start = omp_get_wtime(), done = work(data), found = done / (omp_get_wtime() - start);
        if (found > rate) rate = found;
    } while (omp_get_wtime() < end);
    return rate;
}

int main(int count, char **given) {
    if (count != 3) return 2;
    omp_set_num_threads(atoi(given[1]));
    double seconds = atof(given[2]);
    char *data = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return 1;
#ifdef MADV_HUGEPAGE
    madvise(data, BYTES, MADV_HUGEPAGE);
#endif
#pragma omp parallel for
    for (size_t i = 0; i < BYTES; i++) data[i] = (char)i;
    double (*works[])(const char *) = {read_memory, multiply_float32, multiply_bfloat16};
    for (int i = 0; i < 3; i++) printf("%.6g ", best(works[i], data, seconds));
    return 0;
}
