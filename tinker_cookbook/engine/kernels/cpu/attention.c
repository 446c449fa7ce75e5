/* Attention over keys and values in pages.

   Every token attends to the first `position + 1` tokens of its sequence, or the last `window` of
   them; a token of an image also to the rest of the image. Pages are read one by one, under a
   running maximum and sum (online softmax), so a token's result is the same to the bit in any
   batch, in prefill as in decoding. All sums are fp32.

   A page holds PAGE tokens. The pool of a layer's keys is [pages, kv_heads, PAGE / LANES, width,
   LANES], so that one vector is a number of LANES tokens, or a pair of numbers; the pool of its
   values is [pages, kv_heads, PAGE, value_width].
   Sequences with a common prefix share its full pages, which are only read. */

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

/* TOGETHER query heads use each vector that is loaded, AT_ONCE vectors at a time. */
enum { PAGE = 64, TOGETHER = 4, AT_ONCE = REGISTERS / 8 };

typedef struct {
    int64_t runs, heads, kv_heads, width, value_width, window;
    int64_t query_stride[2], key_stride[2], value_stride[2]; /* a token, a head; in elements */
    const void *query, *key, *value;                         /* of this step */
    void *out;                                               /* [tokens, heads, value_width] */
    const int64_t *run_first, *run_count;                    /* tokens in order, of a sequence */
    const int64_t *position;                                 /* of a run's first token */
    const int64_t *seen;                                     /* tokens that each one sees; or NULL */
    const int64_t *first_page, *pages; /* numbers of a run's pages begin at first_page */
    void *keys, *values;               /* pools of the layer */
    const float *sinks;                /* additional logit of each head; or NULL */
    float scale, cap; /* cap: scores become cap * tanh(score / cap); 0: none */
    int32_t half;                      /* 1: bfloat16, 0: float32 */
} Attention;

int64_t tinker_page(void) { return PAGE; }

/* The form of the keys, and the elements of one. */
static int kind_of(const Attention *c) {
    return !c->half ? FLOATS : HAS_PAIRS && c->width % 2 == 0 ? PAIRS : HALVES;
}

static int64_t depth_of(const Attention *c) {
    return kind_of(c) == PAIRS ? c->width / 2 : c->width;
}

/* Scores [group][PAGE] of `group` queries [group][depth] for `vectors` times LANES tokens. On the way
   it prefetches `next`, which is read afterwards: `step` bytes for each element. */
INLINE void score_vectors(float *scores, const float *q, const void *keys, int64_t depth, int group,
                          int vectors, int kind, const char *next, int64_t step) {
    Floats sums[TOGETHER][AT_ONCE];
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++) sums[g][v] = (Floats){0};
    for (int64_t d = 0; d < depth; d++) {
        prefetch(next + d * step, step);
        for (int v = 0; v < vectors; v++) {
            const Floats k = load(keys, (v * depth + d) * LANES, kind == HALVES);
            for (int g = 0; g < group; g++)
                sums[g][v] = multiply_add(sums[g][v], broadcast(q[g * depth + d]), k, kind);
        }
    }
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++)
            memcpy(scores + g * PAGE + v * LANES, &sums[g][v], sizeof(Floats));
}

/* Counts are rounded up to whole vectors, which stay inside the page; `weigh` masks the rest. */
INLINE void score(float *scores, const float *q, const char *keys, int64_t count, int64_t depth,
                  int group, int kind, const char *next, int64_t step) {
    const int64_t size = kind == HALVES ? 2 : 4;
    for (int64_t j = 0, vectors; j < count; j += vectors * LANES) {
        const char *k = keys + j * depth * size;
        vectors = count - j > (AT_ONCE - 1) * LANES ? AT_ONCE : count - j > LANES ? 2 : 1;
        if (vectors == AT_ONCE) score_vectors(scores + j, q, k, depth, group, AT_ONCE, kind, next, step);
        else if (vectors == 2) score_vectors(scores + j, q, k, depth, group, 2, kind, next, step);
        else score_vectors(scores + j, q, k, depth, group, 1, kind, next, step);
    }
}

/* Adds the values of `count` tokens, weighted, to `sums` [group][width], and prefetches `next`. */
INLINE void add_vectors(float *sums, const float *weights, const void *values, int64_t count,
                        int64_t width, int group, int vectors, int half, const char *next) {
    const int64_t step = vectors * LANES * (half ? 2 : 4);
    Floats part[TOGETHER][AT_ONCE];
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++)
            memcpy(&part[g][v], sums + g * width + v * LANES, sizeof(Floats));
    for (int64_t j = 0; j < count; j++) {
        prefetch(next + j * step, step);
        for (int v = 0; v < vectors; v++) {
            const Floats value = load(values, j * width + v * LANES, half);
            for (int g = 0; g < group; g++) part[g][v] += weights[g * PAGE + j] * value;
        }
    }
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++)
            memcpy(sums + g * width + v * LANES, &part[g][v], sizeof(Floats));
}

INLINE void add(float *sums, const float *weights, const char *values, int64_t count, int64_t width,
                int group, int half, const char *next) {
    const int64_t size = half ? 2 : 4;
    int64_t d = 0;
    for (; d + AT_ONCE * LANES <= width; d += AT_ONCE * LANES)
        add_vectors(sums + d, weights, values + d * size, count, width, group, AT_ONCE, half,
                    next + d * PAGE * size);
    for (; d + LANES <= width; d += LANES)
        add_vectors(sums + d, weights, values + d * size, count, width, group, 1, half,
                    next + d * PAGE * size);
    /* Widths that are no multiple of a vector, number by number. */
    for (; d < width; d++)
        for (int g = 0; g < group; g++)
            for (int64_t j = 0; j < count; j++)
                sums[g * width + d] +=
                    weights[g * PAGE + j] * load_one(values, j * width + d, half);
}

/* cap * tanh(x / cap) */
INLINE Floats capped(Floats x, float cap) {
    const Floats e = exp_negative(blend(x > 0.0f, -x, x) * (2.0f / cap));
    const Floats y = cap * (1.0f - e) / (1.0f + e);
    return blend(x > 0.0f, y, -y);
}

/* Turns scores [PAGE] into weights relative to e^top, with `top` the highest so far; those before
   `skip` and from `count` on become 0. Returns the factor for older sums. */
static float weigh(const Attention *c, float *scores, int64_t skip, int64_t count, float *top,
                   float *total) {
    Ints order;
    for (int i = 0; i < LANES; i++) order[i] = i;
    Floats x, highest = broadcast(*top), sum = {0};
    for (int64_t j = 0; j < count; j += LANES) {
        const Ints index = order + (int32_t)j;
        memcpy(&x, scores + j, sizeof x);
        x *= c->scale;
        if (c->cap != 0) x = capped(x, c->cap);
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

/* State of a group of queries: q [group][depth], sums [group][value_width], top, total. */
typedef struct {
    float *q, *sums, *top, *total;
} Heads;

/* Part of a page: `keys` and `values` of `count` tokens, of which the first `skip` are not seen. */
typedef struct {
    const char *keys, *values, *next; /* next: keys that are read afterwards */
    int64_t skip, count;
} Tokens;

INLINE void attend_page_as(const Attention *c, Heads of, Tokens t, int group, int kind) {
    float scores[TOGETHER * PAGE];
    const int64_t width = c->value_width, depth = depth_of(c);
    const int64_t bytes = t.count * width * (c->half ? 2 : 4);
    score(scores, of.q, t.keys, t.count, depth, group, kind, t.values, (bytes + depth - 1) / depth);
    for (int g = 0; g < group; g++) {
        /* Online softmax: sums so far are relative to the old maximum. */
        const float shrink = weigh(c, scores + g * PAGE, t.skip, t.count, of.top + g, of.total + g);
        float *sums = of.sums + g * width;
        for (int64_t d = 0; d < width; d++) sums[d] *= shrink;
    }
    add(of.sums, scores, t.values, t.count, width, group, kind != FLOATS, t.next);
}

/* With a constant group size and kind the compiler keeps all sums in registers. */
static void attend_page(const Attention *c, Heads of, Tokens t, int group) {
#define CASE(G)                                                         \
    case G:                                                             \
        if (kind_of(c) == PAIRS) attend_page_as(c, of, t, G, PAIRS);    \
        else BY_DTYPE(c->half, attend_page_as, c, of, t, G);            \
        break
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
    const int64_t depth = depth_of(c);
    for (int64_t i = 0; i < count; i++) {
        const int64_t page = (c->position[run] + i) / PAGE, at = (c->position[run] + i) % PAGE;
        const int64_t k = (first + i) * c->key_stride[0] + h * c->key_stride[1];
        const int64_t v = (first + i) * c->value_stride[0] + h * c->value_stride[1];
        char *keys = page_address(c, run, page, c->keys, h, c->width);
        char *values = page_address(c, run, page, c->values, h, c->value_width);
        const int64_t to = at / LANES * LANES * depth + at % LANES;
        if (kind_of(c) == HALVES)
            for (int64_t d = 0; d < depth; d++)
                ((uint16_t *)keys)[to + d * LANES] = ((const uint16_t *)c->key)[k + d];
        else
            for (int64_t d = 0; d < depth; d++)
                memcpy(keys + (to + d * LANES) * 4, (const char *)c->key + k * size + d * 4, 4);
        memcpy(values + at * c->value_width * size, (const char *)c->value + v * size,
               (size_t)(c->value_width * size));
    }
}

/* Attention of the queries of one token that share key head `h`. */
static void attend(const Attention *c, int64_t run, int64_t i, int64_t h, float *scratch) {
    const int64_t group = c->heads / c->kv_heads;
    const int64_t depth = depth_of(c), value_width = c->value_width;
    const int64_t t = c->run_first[run] + i, own = c->position[run] + i + 1;
    const int64_t begin = c->window && own > c->window ? own - c->window : 0;
    const int64_t end = c->seen ? c->seen[t] : own;
    Heads mine = {scratch, scratch + group * depth, NULL, NULL};
    mine.top = mine.sums + group * value_width;
    mine.total = mine.top + group;

    for (int64_t g = 0; g < group; g++) {
        const int64_t at = t * c->query_stride[0] + (h * group + g) * c->query_stride[1];
        /* Widened once here, not for every key. */
        for (int64_t d = 0; d < depth && kind_of(c) != PAIRS; d++)
            mine.q[g * depth + d] = load_one(c->query, at + d, c->half);
        if (kind_of(c) == PAIRS)
            memcpy(mine.q + g * depth, (const uint16_t *)c->query + at, (size_t)depth * 4);
        /* A sink is a token without a value. */
        mine.top[g] = c->sinks ? c->sinks[h * group + g] : -INFINITY;
        mine.total[g] = c->sinks != NULL;
    }
    memset(mine.sums, 0, (size_t)(group * value_width) * 4);

    /* Page by page at fixed positions of the sequence, so the order of the additions never
       depends on the batch or on how much is prefilled at once. */
    for (int64_t page = begin / PAGE; page * PAGE < end; page++) {
        const int64_t seen = begin > page * PAGE ? begin - page * PAGE : 0;
        const int64_t from = seen / LANES * LANES; /* rounded down to a whole vector */
        const int64_t until = end - page * PAGE < PAGE ? end - page * PAGE : PAGE;
        const int64_t size = c->half ? 2 : 4, last = (end - 1) / PAGE;
        const Tokens some = {
            page_address(c, run, page, c->keys, h, c->width) + from * c->width * size,
            page_address(c, run, page, c->values, h, value_width) + from * value_width * size,
            page_address(c, run, page < last ? page + 1 : page, c->keys, h, c->width),
            seen - from, until - from};
        for (int64_t g = 0; g < group; g += TOGETHER) {
            const Heads part = {mine.q + g * depth, mine.sums + g * value_width, mine.top + g,
                                mine.total + g};
            attend_page(c, part, some, (int)(group - g < TOGETHER ? group - g : TOGETHER));
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
