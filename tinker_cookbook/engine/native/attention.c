/* Attention of tokens whose keys and values lie in slots of their own, for processors.

   Every token attends to the first `position + 1` tokens of its slot, or the last `window` of
   them. They come in chunks that begin at multiples of CHUNK in the sequence, under a running
   maximum and sum, so a token's result is the same to the bit whatever else is in the call, and
   whether the token was read with a prompt or drawn. All sums are fp32.

   A slot holds keys as [kv_heads, width, capacity], so that one vector is LANES tokens, and values
   as [kv_heads, capacity, value_width]. The capacity is a multiple of 16, and so of LANES. */

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

/* TOGETHER heads share what is read, AT_ONCE vectors of it; keys are fetched AHEAD rows before
   their turn. */
enum { CHUNK = 128, TOGETHER = 4, AT_ONCE = REGISTERS / 8, AHEAD = 12 };

typedef struct {
    int64_t runs, heads, kv_heads, width, value_width, window, threads;
    int64_t query_stride[2], key_stride[2], value_stride[2]; /* a token, a head; in elements */
    const void *query, *key, *value;                         /* of this step */
    void *out;                                               /* [tokens, heads, value_width] */
    const int64_t *run_first, *run_count;                    /* tokens in order, of one slot */
    const int64_t *keys_at, *values_at;                      /* addresses of the slots */
    const int64_t *capacity, *position;                      /* position: of a run's first token */
    float scale;
    int32_t half; /* 1: bfloat16, 0: float32 */
} Call;

INLINE Floats choose(Ints where, Floats yes, Floats no) {
    Ints a, b;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    a = (a & where) | (b & ~where);
    memcpy(&yes, &a, sizeof a);
    return yes;
}

/* e^x for x <= 0 to 2 ulp; what is below -87 counts as -87. */
INLINE Floats exp_negative(Floats x) {
    x = choose(x < -87.0f, all(-87.0f), x);
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds */
    const Floats k = (x * 1.44269504f + to_integer) - to_integer;
    const Floats r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    Floats p = r * 1.3981999507e-3f + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Ints exponent = (__builtin_convertvector(k, Ints) + 127) << 23;
    Floats power;
    memcpy(&power, &exponent, sizeof power);
    return p * power;
}

/* Scores [group][CHUNK] of `group` queries [group][width] for the tokens at `from` and after it. */
INLINE void score_vectors(float *scores, const float *q, const void *keys, int64_t from,
                          int64_t capacity, int64_t width, int group, int vectors, int half) {
    Floats sums[TOGETHER][AT_ONCE];
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++) sums[g][v] = (Floats){0};
    for (int64_t d = 0; d < width; d++) {
        const int64_t size = half ? 2 : 4;
        fetch((const char *)keys + ((d + AHEAD) * capacity + from) * size, vectors * LANES * size);
        for (int v = 0; v < vectors; v++) {
            const Floats k = many(keys, d * capacity + from + v * LANES, half);
            for (int g = 0; g < group; g++) sums[g][v] += q[g * width + d] * k;
        }
    }
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++)
            memcpy(scores + g * CHUNK + v * LANES, &sums[g][v], sizeof(Floats));
}

INLINE void score(float *scores, const float *q, const void *keys, int64_t from, int64_t count,
                  int64_t capacity, int64_t width, int group, int half) {
    int64_t j = 0;
    for (; j + (AT_ONCE - 1) * LANES < count; j += AT_ONCE * LANES)
        score_vectors(scores + j, q, keys, from + j, capacity, width, group, AT_ONCE, half);
    for (; j < count; j += LANES)
        score_vectors(scores + j, q, keys, from + j, capacity, width, group, 1, half);
}

/* Adds the values of `count` tokens, weighted, to `sums` [group][value_width]. */
INLINE void add_vectors(float *sums, const float *weights, const void *values, int64_t from,
                        int64_t count, int64_t width, int group, int vectors, int half) {
    Floats part[TOGETHER][AT_ONCE];
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++)
            memcpy(&part[g][v], sums + g * width + v * LANES, sizeof(Floats));
    for (int64_t j = 0; j < count; j++) {
        for (int v = 0; v < vectors; v++) {
            const Floats value = many(values, (from + j) * width + v * LANES, half);
            for (int g = 0; g < group; g++) part[g][v] += weights[g * CHUNK + j] * value;
        }
    }
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++)
            memcpy(sums + g * width + v * LANES, &part[g][v], sizeof(Floats));
}

INLINE void add(float *sums, const float *weights, const char *values, int64_t from, int64_t count,
                int64_t width, int group, int half) {
    const int64_t size = half ? 2 : 4;
    int64_t d = 0;
    for (; d + AT_ONCE * LANES <= width; d += AT_ONCE * LANES)
        add_vectors(sums + d, weights, values + d * size, from, count, width, group, AT_ONCE, half);
    for (; d + LANES <= width; d += LANES)
        add_vectors(sums + d, weights, values + d * size, from, count, width, group, 1, half);
    for (; d < width; d++)
        for (int g = 0; g < group; g++)
            for (int64_t j = 0; j < count; j++)
                sums[g * width + d] +=
                    weights[g * CHUNK + j] * one(values, (from + j) * width + d, half);
}

/* From scores [CHUNK] to weights relative to e^top, where `top` is the highest so far; those before
   `skip` and from `count` on weigh nothing. Returns what older sums are to be multiplied with. */
static float weigh(float *scores, int64_t skip, int64_t count, float *top, float *total) {
    Ints order;
    for (int i = 0; i < LANES; i++) order[i] = i;
    Floats x, highest = all(*top), sum = {0};
    for (int64_t j = 0; j < count; j += LANES) {
        const Ints place = order + (int32_t)j;
        memcpy(&x, scores + j, sizeof x);
        x = choose((place < (int32_t)skip) | (place >= (int32_t)count), all(-INFINITY), x);
        highest = choose(x > highest, x, highest);
        memcpy(scores + j, &x, sizeof x);
    }
    float most = highest[0];
    for (int i = 1; i < LANES; i++) most = highest[i] > most ? highest[i] : most;
    for (int64_t j = 0; j < count; j += LANES) {
        memcpy(&x, scores + j, sizeof x);
        x = choose(x == -INFINITY, (Floats){0}, exp_negative(x - most));
        sum += x;
        memcpy(scores + j, &x, sizeof x);
    }
    const float shrink = *top == -INFINITY ? 0.0f : exp_negative(all(*top - most))[0];
    *total *= shrink;
    for (int i = 0; i < LANES; i++) *total += sum[i];
    *top = most;
    return shrink;
}

/* What a group of queries holds: q [group][width], sums [group][value_width], top, total. */
typedef struct {
    float *q, *sums, *top, *total;
} Heads;

INLINE void see_as(const Call *c, Heads of, const void *keys, const char *values, int64_t from,
                   int64_t skip, int64_t count, int64_t capacity, int group, int half) {
    float scores[TOGETHER * CHUNK];
    score(scores, of.q, keys, from, count, capacity, c->width, group, half);
    for (int g = 0; g < group; g++) {
        const float shrink = weigh(scores + g * CHUNK, skip, count, of.top + g, of.total + g);
        float *sums = of.sums + g * c->value_width;
        for (int64_t d = 0; d < c->value_width; d++) sums[d] *= shrink;
    }
    add(of.sums, scores, values, from, count, c->value_width, group, half);
}

/* With the group's size and the type known, the compiler keeps all sums in registers. */
static void see(const Call *c, Heads of, const void *keys, const char *values, int64_t from,
                int64_t skip, int64_t count, int64_t capacity, int group) {
#define CASE(G)                                                                      \
    case G:                                                                          \
        if (c->half) see_as(c, of, keys, values, from, skip, count, capacity, G, 1); \
        else see_as(c, of, keys, values, from, skip, count, capacity, G, 0);         \
        break
    switch (group) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
    }
#undef CASE
}

/* Puts this step's keys and values of a run into its slot. */
static void store(const Call *c, int64_t run, int64_t h) {
    const int64_t size = c->half ? 2 : 4, capacity = c->capacity[run], at = c->position[run];
    const int64_t first = c->run_first[run], count = c->run_count[run];
    char *keys = (char *)c->keys_at[run] + h * c->width * capacity * size;
    char *values = (char *)c->values_at[run] + h * capacity * c->value_width * size;
    for (int64_t i = 0; i < count; i++) {
        const int64_t k = (first + i) * c->key_stride[0] + h * c->key_stride[1];
        const int64_t v = (first + i) * c->value_stride[0] + h * c->value_stride[1];
        if (c->half) {
            for (int64_t d = 0; d < c->width; d++)
                ((uint16_t *)keys)[d * capacity + at + i] = ((const uint16_t *)c->key)[k + d];
        } else {
            for (int64_t d = 0; d < c->width; d++)
                ((float *)keys)[d * capacity + at + i] = ((const float *)c->key)[k + d];
        }
        memcpy(values + (at + i) * c->value_width * size, (const char *)c->value + v * size,
               (size_t)(c->value_width * size));
    }
}

static int64_t scratch_floats(const Call *c) {
    return c->heads / c->kv_heads * (c->width + c->value_width + 2);
}

/* The queries of one token that share key head `h`. */
static void attend(const Call *c, int64_t run, int64_t i, int64_t h, float *scratch) {
    const int64_t group = c->heads / c->kv_heads, capacity = c->capacity[run];
    const int64_t width = c->width, value_width = c->value_width, size = c->half ? 2 : 4;
    const int64_t t = c->run_first[run] + i, end = c->position[run] + i + 1;
    const int64_t begin = c->window && end > c->window ? end - c->window : 0;
    const char *keys = (const char *)c->keys_at[run] + h * width * capacity * size;
    const char *values = (const char *)c->values_at[run] + h * capacity * value_width * size;
    Heads mine = {scratch, scratch + group * width, NULL, NULL};
    mine.top = mine.sums + group * value_width;
    mine.total = mine.top + group;

    for (int64_t g = 0; g < group; g++) {
        const int64_t at = t * c->query_stride[0] + (h * group + g) * c->query_stride[1];
        for (int64_t d = 0; d < width; d++)
            mine.q[g * width + d] = one(c->query, at + d, c->half) * c->scale;
        mine.top[g] = -INFINITY;
        mine.total[g] = 0;
    }
    memset(mine.sums, 0, (size_t)(group * value_width) * 4);

    for (int64_t chunk = begin / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
        /* A vector must not cross the end of the slot, so a window begins with a whole one. */
        const int64_t from = chunk > begin ? chunk : begin / LANES * LANES;
        const int64_t skip = begin > from ? begin - from : 0;
        const int64_t until = chunk + CHUNK < end ? chunk + CHUNK : end;
        for (int64_t g = 0; g < group; g += TOGETHER) {
            const Heads some = {mine.q + g * width, mine.sums + g * value_width, mine.top + g,
                                mine.total + g};
            const int64_t count = group - g < TOGETHER ? group - g : TOGETHER;
            see(c, some, keys, values, from, skip, until - from, capacity, (int)count);
        }
    }

    for (int64_t g = 0; g < group; g++) {
        const int64_t at = (t * c->heads + h * group + g) * value_width;
        for (int64_t d = 0; d < value_width; d++) {
            const float value = mine.sums[g * value_width + d] / mine.total[g];
            if (c->half) ((uint16_t *)c->out)[at + d] = narrow(value);
            else ((float *)c->out)[at + d] = value;
        }
    }
}

/* Stores the keys and values of this step, then lets every token attend. Returns 0, or 1 where
   there is no memory. */
int tinker_attend(const Call *c) {
    int failed = 0;
#pragma omp parallel num_threads(c->threads)
    {
        float *scratch = malloc((size_t)scratch_floats(c) * 4);
        if (scratch == NULL) {
#pragma omp atomic write
            failed = 1;
        }
        const int64_t items = c->runs * c->kv_heads;
#pragma omp for
        for (int64_t item = 0; item < items; item++)
            store(c, item / c->kv_heads, item % c->kv_heads);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; item++)
            for (int64_t i = 0; scratch != NULL && i < c->run_count[item / c->kv_heads]; i++)
                attend(c, item / c->kv_heads, i, item % c->kv_heads, scratch);
        free(scratch);
    }
    return failed;
}
