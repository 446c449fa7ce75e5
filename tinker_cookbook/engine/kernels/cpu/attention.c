/* Attention over keys and values in pages.

   Every token attends to the first `position + 1` tokens of its sequence, or the last `window` of
   them. Pages are read one by one, under a running maximum and sum (online softmax), so a token's
   result is the same to the bit in any batch, in prefill as in decoding. All sums are fp32.

   A page holds PAGE tokens. The pool of a layer's keys is [pages, kv_heads, width, PAGE], so that
   one vector is LANES tokens; the pool of its values is [pages, kv_heads, PAGE, value_width].
   Sequences with a common prefix share its full pages, which are only read. */

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

/* TOGETHER query heads use each vector that is loaded, AT_ONCE vectors at a time; keys are
   prefetched KEYS_AHEAD rows before their use. */
enum { PAGE = 64, TOGETHER = 4, AT_ONCE = REGISTERS / 8, KEYS_AHEAD = 12 };

typedef struct {
    int64_t runs, heads, kv_heads, width, value_width, window;
    int64_t query_stride[2], key_stride[2], value_stride[2]; /* a token, a head; in elements */
    const void *query, *key, *value;                         /* of this step */
    void *out;                                               /* [tokens, heads, value_width] */
    const int64_t *run_first, *run_count;                    /* tokens in order, of a sequence */
    const int64_t *position;                                 /* of a run's first token */
    const int64_t *first_page, *pages; /* numbers of a run's pages begin at first_page */
    void *keys, *values;               /* pools of the layer */
    float scale;
    int32_t half; /* 1: bfloat16, 0: float32 */
} Attention;

int64_t tinker_page(void) { return PAGE; }

/* Scores [group][PAGE] of `group` queries [group][width] for the tokens at `from` and after it. */
INLINE void score_vectors(float *scores, const float *q, const void *keys, int64_t from,
                          int64_t width, int group, int vectors, int half) {
    Floats sums[TOGETHER][AT_ONCE];
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++) sums[g][v] = (Floats){0};
    for (int64_t d = 0; d < width; d++) {
        const int64_t size = half ? 2 : 4;
        /* Past the last row this is outside of the page: a prefetch of any address is harmless. */
        prefetch((const char *)keys + ((d + KEYS_AHEAD) * PAGE + from) * size, vectors * LANES * size);
        for (int v = 0; v < vectors; v++) {
            const Floats k = load(keys, d * PAGE + from + v * LANES, half);
            for (int g = 0; g < group; g++) sums[g][v] += q[g * width + d] * k;
        }
    }
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++)
            memcpy(scores + g * PAGE + v * LANES, &sums[g][v], sizeof(Floats));
}

INLINE void score(float *scores, const float *q, const void *keys, int64_t from, int64_t count,
                  int64_t width, int group, int half) {
    int64_t j = 0;
    /* Counts are rounded up to whole vectors, which stay inside the page; `weigh` masks the
       rest. */
    for (; j + (AT_ONCE - 1) * LANES < count; j += AT_ONCE * LANES)
        score_vectors(scores + j, q, keys, from + j, width, group, AT_ONCE, half);
    for (; j < count; j += LANES)
        score_vectors(scores + j, q, keys, from + j, width, group, 1, half);
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
            const Floats value = load(values, (from + j) * width + v * LANES, half);
            for (int g = 0; g < group; g++) part[g][v] += weights[g * PAGE + j] * value;
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
    /* Widths that are no multiple of a vector, number by number. */
    for (; d < width; d++)
        for (int g = 0; g < group; g++)
            for (int64_t j = 0; j < count; j++)
                sums[g * width + d] +=
                    weights[g * PAGE + j] * load_one(values, (from + j) * width + d, half);
}

/* Turns scores [PAGE] into weights relative to e^top, with `top` the highest so far; those before
   `skip` and from `count` on become 0. Returns the factor for older sums. */
static float weigh(float *scores, int64_t skip, int64_t count, float *top, float *total) {
    Ints order;
    for (int i = 0; i < LANES; i++) order[i] = i;
    Floats x, highest = broadcast(*top), sum = {0};
    for (int64_t j = 0; j < count; j += LANES) {
        const Ints index = order + (int32_t)j;
        memcpy(&x, scores + j, sizeof x);
        x = blend((index < (int32_t)skip) | (index >= (int32_t)count), broadcast(-INFINITY), x);
        highest = blend(x > highest, x, highest);
        memcpy(scores + j, &x, sizeof x);
    }
    /* Subtracting the maximum keeps every exponential at 1 or below. */
    float most = highest[0];
    for (int i = 1; i < LANES; i++) most = highest[i] > most ? highest[i] : most;
    for (int64_t j = 0; j < count; j += LANES) {
        memcpy(&x, scores + j, sizeof x);
        /* `exp_negative` returns e^-87 for masked scores, so they are set to 0 here. */
        x = blend(x == -INFINITY, (Floats){0}, exp_negative(x - most));
        sum += x;
        memcpy(scores + j, &x, sizeof x);
    }
    /* No older sums on the first page: -inf minus -inf would be NaN. */
    const float shrink = *top == -INFINITY ? 0.0f : exp_negative(broadcast(*top - most))[0];
    *total *= shrink;
    for (int i = 0; i < LANES; i++) *total += sum[i];
    *top = most;
    return shrink;
}

/* State of a group of queries: q [group][width], sums [group][value_width], top, total. */
typedef struct {
    float *q, *sums, *top, *total;
} Heads;

INLINE void attend_page_as(const Attention *c, Heads of, const void *keys, const char *values,
                           int64_t from, int64_t skip, int64_t count, int group, int half) {
    float scores[TOGETHER * PAGE];
    score(scores, of.q, keys, from, count, c->width, group, half);
    for (int g = 0; g < group; g++) {
        /* Online softmax: sums so far are relative to the old maximum. */
        const float shrink = weigh(scores + g * PAGE, skip, count, of.top + g, of.total + g);
        float *sums = of.sums + g * c->value_width;
        for (int64_t d = 0; d < c->value_width; d++) sums[d] *= shrink;
    }
    add(of.sums, scores, values, from, count, c->value_width, group, half);
}

/* With a constant group size and dtype the compiler keeps all sums in registers. */
static void attend_page(const Attention *c, Heads of, const void *keys, const char *values, int64_t from,
                        int64_t skip, int64_t count, int group) {
#define CASE(G) \
    case G: BY_DTYPE(c->half, attend_page_as, c, of, keys, values, from, skip, count, G); break
    switch (group) { CASE(1); CASE(2); CASE(3); CASE(4); }
#undef CASE
}

/* Address in `pool` of the keys or values of head `h` in a run's page; `width` numbers a token. */
static char *page_address(const Attention *c, int64_t run, int64_t page, void *pool, int64_t h,
                          int64_t width) {
    const int64_t number = c->pages[c->first_page[run] + page];
    return (char *)pool + (number * c->kv_heads + h) * width * PAGE * (c->half ? 2 : 4);
}

/* Writes this step's keys and values of a run to its pages. */
static void store_run(const Attention *c, int64_t run, int64_t h) {
    const int64_t size = c->half ? 2 : 4, first = c->run_first[run], count = c->run_count[run];
    for (int64_t i = 0; i < count; i++) {
        const int64_t page = (c->position[run] + i) / PAGE, at = (c->position[run] + i) % PAGE;
        const int64_t k = (first + i) * c->key_stride[0] + h * c->key_stride[1];
        const int64_t v = (first + i) * c->value_stride[0] + h * c->value_stride[1];
        char *keys = page_address(c, run, page, c->keys, h, c->width);
        char *values = page_address(c, run, page, c->values, h, c->value_width);
        if (c->half) {
            for (int64_t d = 0; d < c->width; d++)
                ((uint16_t *)keys)[d * PAGE + at] = ((const uint16_t *)c->key)[k + d];
        } else {
            for (int64_t d = 0; d < c->width; d++)
                ((float *)keys)[d * PAGE + at] = ((const float *)c->key)[k + d];
        }
        memcpy(values + at * c->value_width * size, (const char *)c->value + v * size,
               (size_t)(c->value_width * size));
    }
}

/* Attention of the queries of one token that share key head `h`. */
static void attend(const Attention *c, int64_t run, int64_t i, int64_t h, float *scratch) {
    const int64_t group = c->heads / c->kv_heads;
    const int64_t width = c->width, value_width = c->value_width;
    const int64_t t = c->run_first[run] + i, end = c->position[run] + i + 1;
    const int64_t begin = c->window && end > c->window ? end - c->window : 0;
    Heads mine = {scratch, scratch + group * width, NULL, NULL};
    mine.top = mine.sums + group * value_width;
    mine.total = mine.top + group;

    for (int64_t g = 0; g < group; g++) {
        const int64_t at = t * c->query_stride[0] + (h * group + g) * c->query_stride[1];
        for (int64_t d = 0; d < width; d++)
            /* Widened and scaled once here, not for every key. */
            mine.q[g * width + d] = load_one(c->query, at + d, c->half) * c->scale;
        mine.top[g] = -INFINITY;
        mine.total[g] = 0;
    }
    memset(mine.sums, 0, (size_t)(group * value_width) * 4);

    /* Page by page at fixed positions of the sequence, so the order of the additions never
       depends on the batch or on how much is prefilled at once. */
    for (int64_t page = begin / PAGE; page * PAGE < end; page++) {
        const char *keys = page_address(c, run, page, c->keys, h, width);
        const char *values = page_address(c, run, page, c->values, h, value_width);
        const int64_t seen = begin > page * PAGE ? begin - page * PAGE : 0;
        const int64_t from = seen / LANES * LANES; /* rounded down to a whole vector */
        const int64_t until = end - page * PAGE < PAGE ? end - page * PAGE : PAGE;
        for (int64_t g = 0; g < group; g += TOGETHER) {
            const Heads some = {mine.q + g * width, mine.sums + g * value_width, mine.top + g,
                                mine.total + g};
            const int64_t count = group - g < TOGETHER ? group - g : TOGETHER;
            attend_page(c, some, keys, values, from, seen - from, until - from, (int)count);
        }
    }

    for (int64_t g = 0; g < group; g++) {
        const int64_t at = (t * c->heads + h * group + g) * value_width;
        for (int64_t d = 0; d < value_width; d++)
            store_one(c->out, at + d, mine.sums[g * value_width + d] / mine.total[g], c->half);
    }
}

/* Stores the keys and values of this step, then computes the attention of every token. Sets `failed`
   if memory runs out. */
static void attention(const Attention *c, int *failed) {
    const int64_t floats = c->heads / c->kv_heads * (c->width + c->value_width + 2);
    /* For each thread, since the threads write at the same time. */
    float *scratch = malloc((size_t)floats * 4);
    if (scratch == NULL) {
#pragma omp atomic write
        *failed = 1; /* the thread goes on: all must reach the loops below */
    }
    const int64_t items = c->runs * c->kv_heads;
    /* The barrier at the end of this loop: every key is stored before one is read. */
#pragma omp for
    for (int64_t item = 0; item < items; item++)
        store_run(c, item / c->kv_heads, item % c->kv_heads);
    /* Dynamic, because sequences differ in length. */
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < items; item++)
        for (int64_t i = 0; scratch != NULL && i < c->run_count[item / c->kv_heads]; i++)
            attend(c, item / c->kv_heads, i, item % c->kv_heads, scratch);
    free(scratch);
}
