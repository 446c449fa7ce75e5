/* Element-wise operations of a decoder layer: RMS norms, gates and rotary embeddings, each with its
   gradient, in one pass over memory. All is computed in fp32.

   A result does not depend on the rest of the call: the end of a row is padded to a vector. */

#include <math.h>

#include "vectors.h"

/* In double: its rounding would be in every number of the row. */
INLINE double sum_of(Floats x) {
    double out = 0;
    for (int i = 0; i < LANES; i++) out += x[i];
    return out;
}

/* y = x * r * w, r = 1 / sqrt(mean(x^2) + eps), of rows of `width` numbers. */
typedef struct {
    int64_t rows, width;
    void *x;                  /* [rows, width] */
    const void *added;        /* is added to x first; may be NULL */
    const void *upstream;     /* of y; NULL: not the gradient */
    const float *weight;      /* [width] */
    void *out;                /* y or the gradient of x */
    float *inverse;           /* [rows], r; may be NULL */
    float eps;
    int32_t half, rounds; /* rounds: x * r is rounded to the dtype before the product with w */
} Norm;

INLINE void norm_row(const Norm *n, int64_t row, int half) {
    const int64_t at = row * n->width;
    /* The sum is that of one row alone, so a row's result does not depend on the batch. */
    Floats squares = {0};
    for (int64_t i = 0; i < n->width; i += LANES) {
        const int64_t count = n->width - i;
        Floats x = load_part(n->x, at + i, count, half);
        if (n->added != NULL) {
            x = rounded(x + load_part(n->added, at + i, count, half), half);
            store_part(n->x, at + i, x, count, half);
        }
        squares += x * x;
    }
    const float r = (float)(1.0 / sqrt(sum_of(squares) / (double)n->width + n->eps));
    if (n->inverse != NULL) n->inverse[row] = r;
    for (int64_t i = 0; i < n->width; i += LANES) {
        const int64_t count = n->width - i;
        const Floats x = load_part(n->x, at + i, count, half) * r;
        const Floats w = load_part(n->weight, i, count, 0);
        /* As the model does it, so that both agree in bfloat16 (Llama rounds, Gemma does not). */
        store_part(n->out, at + i, rounded(x, half && n->rounds) * w, count, half);
    }
}

/* dx = r * (g - x * r^2 * mean(g * x)) for g = upstream * w. */
INLINE void norm_back_row(const Norm *n, int64_t row, int half) {
    const int64_t at = row * n->width;
    Floats products = {0};
    for (int64_t i = 0; i < n->width; i += LANES) {
        const int64_t count = n->width - i;
        const Floats g =
            load_part(n->upstream, at + i, count, half) * load_part(n->weight, i, count, 0);
        products += g * load_part(n->x, at + i, count, half);
    }
    const float r = n->inverse[row];
    const float share = (float)(sum_of(products) * r * r / (double)n->width);
    for (int64_t i = 0; i < n->width; i += LANES) {
        const int64_t count = n->width - i;
        const Floats g =
            load_part(n->upstream, at + i, count, half) * load_part(n->weight, i, count, 0);
        const Floats x = load_part(n->x, at + i, count, half);
        store_part(n->out, at + i, (g - x * share) * r, count, half);
    }
}

static void norm(const Norm *n) {
#pragma omp for nowait
    for (int64_t row = 0; row < n->rows; row++)
        if (n->upstream) BY_DTYPE(n->half, norm_back_row, n, row);
        else BY_DTYPE(n->half, norm_row, n, row);
}

/* y = activation(gate) * up, number by number: silu(x) = x sigmoid(x), or gelu by tanh, which is
   x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3). */
typedef struct {
    int64_t count;
    const void *gate, *up, *upstream; /* upstream: of y; NULL: not the gradient */
    void *out, *d_gate, *d_up;
    int32_t half, gelu;
} Gate;

/* y * sigmoid(x), with one rounding less than a product of the two. */
INLINE Floats gated(Floats y, Floats x) {
    /* e^-|x| never overflows. */
    const Floats e = exp_negative(blend(x > 0.0f, -x, x));
    return blend(x > 0.0f, y, y * e) / (1.0f + e);
}

/* The argument of the sigmoid. */
INLINE Floats inner(const Gate *c, Floats x) {
    return c->gelu ? x * (1.59576912f + 0.0713548163f * x * x) : x;
}

INLINE void gate_part(const Gate *c, int64_t at, int64_t count, int half) {
    const Floats g = load_part(c->gate, at, count, half), u = load_part(c->up, at, count, half);
    /* Rounded between the two operations, as torch does in bfloat16. */
    store_part(c->out, at, rounded(gated(g, inner(c, g)), half) * u, count, half);
}

INLINE void gate_back_part(const Gate *c, int64_t at, int64_t count, int half) {
    const Floats g = load_part(c->gate, at, count, half), u = load_part(c->up, at, count, half);
    const Floats d = load_part(c->upstream, at, count, half);
    const Floats z = inner(c, g), s = gated(broadcast(1.0f), z);
    /* The slope of gelu's z is large where 1 - s has few digits. */
    const Floats slope = c->gelu ? 1.59576912f + 0.214064449f * g * g : broadcast(1.0f);
    const Floats rest = c->gelu ? gated(broadcast(1.0f), -z) : 1.0f - s;
    store_part(c->d_up, at, d * g * s, count, half);
    /* (x s)' = s (1 + x (1 - s) z') with s = sigmoid(z). */
    store_part(c->d_gate, at, d * u * s * (1.0f + g * rest * slope), count, half);
}

static void gate(const Gate *c) {
#pragma omp for nowait
    for (int64_t i = 0; i < c->count; i += LANES)
        if (c->upstream) BY_DTYPE(c->half, gate_back_part, c, i, c->count - i);
        else BY_DTYPE(c->half, gate_part, c, i, c->count - i);
}

/* Pairs (a, b) of a head, half its width apart, to (a cos - b sin, b cos + a sin); backward, their
   gradients from those of the result. */
typedef struct {
    int64_t tokens, heads, width;
    int64_t stride[2]; /* of x: a token, a head; in numbers */
    int64_t angles;    /* tokens that cosine and sine are for: further ones begin again */
    const void *x;
    const void *cosine, *sine; /* [angles, width] */
    void *out;                 /* [tokens, heads, width] */
    int32_t half, backward;
} Rotation;

INLINE void rotate(const Rotation *c, int64_t token, int64_t head, int half) {
    const int64_t middle = c->width / 2, to = (token * c->heads + head) * c->width;
    const int64_t from = token * c->stride[0] + head * c->stride[1];
    for (int64_t i = 0; i < middle; i += LANES) {
        const int64_t count = middle - i, at = token % c->angles * c->width + i;
        const Floats a = load_part(c->x, from + i, count, half);
        const Floats b = load_part(c->x, from + middle + i, count, half);
        const Floats cos1 = load_part(c->cosine, at, count, half);
        const Floats cos2 = load_part(c->cosine, at + middle, count, half);
        const Floats sin1 = load_part(c->sine, at, count, half);
        const Floats sin2 = load_part(c->sine, at + middle, count, half);
        /* Each product is rounded, as in the model's own sequence of operations. */
        const Floats x = rounded(a * cos1, half), y = rounded(b * cos2, half);
        /* Transposed rotation: the sines change sides and sign. */
        const Floats p = rounded(b * (c->backward ? sin2 : sin1), half);
        const Floats q = rounded(a * (c->backward ? sin1 : sin2), half);
        store_part(c->out, to + i, c->backward ? x + p : x - p, count, half);
        store_part(c->out, to + middle + i, c->backward ? y - q : y + q, count, half);
    }
}

static void rotation(const Rotation *c) {
#pragma omp for nowait
    for (int64_t token = 0; token < c->tokens; token++)
        for (int64_t head = 0; head < c->heads; head++) BY_DTYPE(c->half, rotate, c, token, head);
}

/* e^(x - top) of rows of logits, in blocks that are padded by zeros, and the sums of the blocks;
   for the entropy of a row also the sum of its products with x - top. */
typedef struct {
    int64_t rows, width, block; /* a block: a multiple of LANES */
    const float *logits;        /* [rows, width] */
    float *top;                 /* [rows] */
    float *weights;             /* [rows, blocks, block] */
    double *sums;               /* [rows, blocks] */
    double *moments;            /* [rows], sums of e^(x - top) * (x - top); may be NULL */
} Exponentials;

INLINE Floats logits_at(const Exponentials *c, int64_t row, int64_t i) {
    Floats x = load_part(c->logits, row * c->width + i, c->width - i, 0);
    for (int64_t l = 0; c->width - i < LANES && l < LANES; l++)
        if (i + l >= c->width) x[l] = -__builtin_inff();
    return x;
}

INLINE void exponentials_of_row(const Exponentials *c, int64_t row, int with_moments) {
    const int64_t blocks = (c->width + c->block - 1) / c->block;
    Floats top = broadcast(-__builtin_inff());
    for (int64_t i = 0; i < c->width; i += LANES) {
        const Floats x = logits_at(c, row, i);
        top = blend(x > top, x, top);
    }
    float most = top[0];
    for (int64_t l = 1; l < LANES; l++) most = top[l] > most ? top[l] : most;
    c->top[row] = most;
    double moment = 0;
    for (int64_t b = row * blocks; b < (row + 1) * blocks; b++) {
        Floats sum = {0}, products = {0};
        for (int64_t i = 0; i < c->block; i += LANES) {
            const Floats x = logits_at(c, row, b % blocks * c->block + i) - most;
            const Floats e = blend(x <= -87.0f, broadcast(0.0f), exp_negative(x));
            memcpy(c->weights + b * c->block + i, &e, sizeof e);
            sum += e;
            /* A masked logit is -inf, whose product with 0 would be NaN. */
            if (with_moments) products += e * blend(x <= -87.0f, broadcast(0.0f), x);
        }
        c->sums[b] = sum_of(sum);
        if (with_moments) moment += sum_of(products);
    }
    if (with_moments) c->moments[row] = moment;
}

static void exponentials(const Exponentials *c) {
#pragma omp for nowait
    for (int64_t row = 0; row < c->rows; row++)
        BY_DTYPE(c->moments != NULL, exponentials_of_row, c, row);
}
