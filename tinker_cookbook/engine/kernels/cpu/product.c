/* Products with a matrix that never changes.

   The matrix W [out, in] is stored in panels of PANEL outputs, each [in, PANEL], so that a product
   of few rows reads it once and in order. Every output is one sum over the inputs from the first to
   the last, so a row's result is the same to the bit with any other rows in the batch, and for any
   number of threads. All sums are fp32, also of a matrix in bfloat16. */

#include "vectors.h"

/* A block of ROWS x PANEL sums stays in registers, with the weights of one input and one number of
   x: of 16 registers 6 x 2 take 15; 4 x 3 take all and run at 0.7 of the speed. A panel is WIDE
   vectors; DEEP inputs of it, and of CHUNK rows (whole blocks), stay in the second cache; a panel
   is prefetched AHEAD inputs before its use. */
enum { FEW = REGISTERS == 16, WIDE = FEW ? 2 : 3, ROWS = FEW ? 6 : 8, PANEL = WIDE * LANES };
enum { DEEP = 1024, CHUNK = 144, AHEAD = 24 };

int64_t tinker_panel(void) { return PANEL; }

INLINE void block_as(const float *x, int64_t x_stride, const void *panel, int64_t depth, float *out,
                     int64_t out_stride, int accumulate, int rows, int half) {
    const int64_t size = half ? 2 : 4;
    Floats sums[ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < WIDE; v++)
            sums[r][v] = accumulate ? load(out, r * out_stride + v * LANES, 0) : (Floats){0};
    for (int64_t k = 0; k < depth; k++) {
        /* Past the last input this is outside of the panel: a prefetch of any address is
           harmless. */
        prefetch((const char *)panel + (k + AHEAD) * PANEL * size, PANEL * size);
        Floats weights[WIDE];
        for (int v = 0; v < WIDE; v++) weights[v] = load(panel, k * PANEL + v * LANES, half);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < WIDE; v++) sums[r][v] += x[r * x_stride + k] * weights[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < WIDE; v++)
            memcpy(out + r * out_stride + v * LANES, &sums[r][v], sizeof(Floats));
}

/* With a constant number of rows the compiler keeps all sums in registers. */
static void block(const float *x, int64_t x_stride, const void *panel, int64_t depth, float *out,
                  int64_t out_stride, int accumulate, int rows, int half) {
#define CASE(R) \
    case R: \
        BY_DTYPE(half, block_as, x, x_stride, panel, depth, out, out_stride, accumulate, R); \
        break
    switch (rows) {
        CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6);
#if defined __AVX512F__ || defined __aarch64__
        CASE(7); CASE(8);
#endif
    }
#undef CASE
}

/* Weights in 4 bits. A byte has the codes of an output for two inputs, the first in its low half:
   [panels, inputs / 2, PANEL]. A weight is values[code] times the scale of its output and SCALED
   inputs: [panels, inputs / SCALED, PANEL]. */
typedef struct {
    const float *values, *scales;
} Codes;

/* Inputs of a part of a panel in 4 bits: the numbers that are made of it stay in the first cache. */
enum { SCALED = 64, DECODED = 128 };

/* Writes `depth` inputs of a panel, from `k` on (multiples of SCALED), to `wide` in float32. */
static void decode(const Codes *codes, const uint8_t *part, int64_t panel, int64_t inputs, int64_t k,
                   int64_t depth, float *wide) {
    const float *scales = codes->scales + (panel * (inputs / SCALED) + k / SCALED) * PANEL;
    for (int64_t i = 0; i < depth; i += SCALED, scales += PANEL)
        for (int v = 0; v < WIDE; v++) {
            const Floats scale = load(scales, v * LANES, 0);
            for (int64_t at = i; at < i + SCALED; at += 2) {
                Bytes raw;
                memcpy(&raw, part + at / 2 * PANEL + v * LANES, sizeof raw);
                const Words both = __builtin_convertvector(raw, Words);
                const Floats first = lookup(codes->values, both & 15) * scale;
                const Floats second = lookup(codes->values, both >> 4) * scale;
                memcpy(wide + at * PANEL + v * LANES, &first, sizeof first);
                memcpy(wide + (at + 1) * PANEL + v * LANES, &second, sizeof second);
            }
        }
}

/* A matrix in 4 bits, to `out` [outputs, inputs] in float32. */
void tinker_decode(const Codes *codes, const uint8_t *bytes, int64_t outputs, int64_t inputs,
                   float *out, int64_t threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *part = bytes + p * inputs * PANEL / 2;
        const int64_t width = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
        float tile[SCALED * PANEL]; /* transposed where it is in the first cache */
        for (int64_t k = 0; k < inputs; k += SCALED) {
            decode(codes, part + k * PANEL / 2, p, inputs, k, SCALED, tile);
            for (int64_t o = 0; o < width; o++)
                for (int64_t i = 0; i < SCALED; i++)
                    out[(p * PANEL + o) * inputs + k + i] = tile[i * PANEL + o];
        }
    }
}

/* x W^T for W [outputs, inputs] in panels. */
typedef struct {
    int64_t inputs, x_stride, half; /* half: W is bfloat16, else float32 */
    const float *x;                 /* [rows, inputs] */
    const void *panels;
    const Codes *codes; /* NULL, or of panels in 4 bits */
} Term;

/* The sum of `terms` terms, added to the present result if `accumulate`. */
typedef struct {
    int64_t rows, terms, outputs, accumulate;
    float *result; /* [rows, outputs] */
    Term term[2];
} Sum;

/* (x A^T) B^T for `rows` rows from `first` on; A [rank, inputs], B [outputs, rank] in float32. */
typedef struct {
    int64_t first, rows, rank;
    const void *a, *b;
} Adapter;

/* The product of x [rows, inputs] with a matrix, or else the content of `out`, plus adapter terms.
   `low` receives x A^T: a row of whole panels for each row of an adapter. */
typedef struct {
    int64_t rows, inputs, x_stride, half, outputs, adapters, threads;
    const float *x;
    const void *panels; /* may be NULL */
    const Codes *codes; /* may be NULL */
    float *out, *low;
    Adapter adapter[];
} Call;

/* A part of a panel, `depth` inputs from `k` on, for up to ROWS rows and `width` outputs from `begin`
   on. The last panel may be wider than the matrix: it is computed in a copy. */
static void add_part(const Sum *s, const Term *t, const void *part, int64_t k, int64_t depth,
                     int64_t row, int rows, int64_t begin, int64_t width, int accumulate,
                     int half) {
    const float *x = t->x + row * t->x_stride + k;
    float *result = s->result + row * s->outputs + begin, cut[ROWS * PANEL];
    if (width == PANEL) {
        block(x, t->x_stride, part, depth, result, s->outputs, accumulate, rows, half);
        return;
    }
    for (int i = 0; accumulate && i < rows; i++)
        memcpy(cut + i * PANEL, result + i * s->outputs, (size_t)width * 4);
    block(x, t->x_stride, part, depth, cut, PANEL, accumulate, rows, half);
    for (int i = 0; i < rows; i++)
        memcpy(result + i * s->outputs, cut + i * PANEL, (size_t)width * 4);
}

/* Outputs of one panel of a term. For many rows bfloat16 is widened once, before the products. */
static void add_term(const Sum *s, const Term *t, int64_t panel, int64_t first, int64_t rows,
                     int accumulate) {
    /* Bytes of two weights. */
    const int64_t size = t->codes ? 1 : t->half ? 4 : 8, begin = panel * PANEL;
    const int64_t width = s->outputs - begin < PANEL ? s->outputs - begin : PANEL;
    /* Few rows are limited by memory, and bfloat16 is half of it; many rows would widen it
       again for each block of rows. */
    const int widens = t->codes || (t->half && rows > 2 * ROWS);
    const int64_t most = t->codes ? DECODED : DEEP;
    float wide[DEEP * PANEL];
    for (int64_t k = 0; k < t->inputs; k += most) {
        const void *part = (const char *)t->panels + (panel * t->inputs + k) * PANEL / 2 * size;
        const int64_t depth = t->inputs - k < most ? t->inputs - k : most;
        if (t->codes) decode(t->codes, part, panel, t->inputs, k, depth, wide);
        for (int64_t i = 0; widens && !t->codes && i < depth * PANEL; i += LANES) {
            const Floats x = load(part, i, 1);
            memcpy(wide + i, &x, sizeof x);
        }
        for (int64_t r = first; r < first + rows; r += ROWS) {
            const int count = (int)(first + rows - r < ROWS ? first + rows - r : ROWS);
            add_part(s, t, widens ? wide : part, k, depth, r, count, begin, width,
                     accumulate || k > 0, t->half && !widens);
        }
    }
}

/* Threads share the panels, with CHUNK rows or so few that every thread has work; a thread that is
   done does not wait for the others. */
static void add_terms(const Sum *s, int64_t threads) {
    const int64_t panels = (s->outputs + PANEL - 1) / PANEL;
    /* Two items or more for each thread, so that a slow one does not delay the others. */
    int64_t chunk = CHUNK;
    while (chunk > 2 * ROWS && panels * ((s->rows + chunk - 1) / chunk) < 2 * threads) chunk /= 2;
    const int64_t chunks = (s->rows + chunk - 1) / chunk;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < panels * chunks; item++) {
        const int64_t first = item / panels * chunk;
        const int64_t some = s->rows - first < chunk ? s->rows - first : chunk;
        for (int64_t i = 0; i < s->terms; i++)
            add_term(s, &s->term[i], item % panels, first, some, s->accumulate || i > 0);
    }
}

static int64_t width_of(const Adapter *a) { return (a->rank + PANEL - 1) / PANEL * PANEL; }

static void add_a(const Call *c, const Adapter *a, float *low) {
    const Term term = {c->inputs, c->x_stride, 0, c->x + a->first * c->x_stride, a->a};
    /* Whole panels of x A^T: the surplus columns are zeros, because A is padded with zeros. */
    const Sum sum = {a->rows, 1, width_of(a), 0, low, {term}};
    add_terms(&sum, c->threads);
}

/* `matrix` is its term, if it is not in the result yet. */
static void add_b(const Call *c, const Adapter *a, const float *low, const Term *matrix) {
    /* Rows of x A^T have the width of whole panels; only the first `rank` numbers are read. */
    const Term term = {a->rank, width_of(a), 0, low, a->b};
    Sum sum = {a->rows, 1, c->outputs, 1, c->out + a->first * c->outputs, {term}};
    if (matrix) sum = (Sum){a->rows, 2, c->outputs, 0, c->out, {*matrix, term}};
    add_terms(&sum, c->threads);
}

/* One adapter for all rows shares a sum with the matrix, which saves a pass over the result; for
   several the matrix is read once, before. The order of all additions is the same. */
void tinker_add(const Call *c) {
    const Term matrix = {c->inputs, c->x_stride, c->half, c->x, c->panels, c->codes};
    const int shared = c->panels && c->adapters == 1 && c->adapter[0].rows == c->rows;
#pragma omp parallel num_threads(c->threads) if (c->threads > 1)
    {
        if (c->panels && !shared) {
            const Sum sum = {c->rows, 1, c->outputs, 0, c->out, {matrix}};
            add_terms(&sum, c->threads);
        }
        float *low = c->low;
        for (int64_t i = 0; i < c->adapters; low += c->adapter[i].rows * width_of(&c->adapter[i]), i++)
            add_a(c, &c->adapter[i], low);
        /* The loops above do not wait, but B needs all of x A^T, and `out` the matrix's part. */
#pragma omp barrier
        low = c->low;
        for (int64_t i = 0; i < c->adapters; low += c->adapter[i].rows * width_of(&c->adapter[i]), i++)
            add_b(c, &c->adapter[i], low, shared ? &matrix : NULL);
    }
}
