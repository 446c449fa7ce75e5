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
int tinker_pairs(void) { return HAS_PAIRS; }

/* Panels are FLOATS, HALVES or PAIRS; inputs, ranks and strides count the 32-bit elements of
   pairs. */
INLINE void block_as(const float *x, int64_t x_stride, const void *panel, int64_t depth, float *out,
                     int accumulate, int rows, int kind) {
    const int64_t size = kind == HALVES ? 2 : 4;
    Floats sums[ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < WIDE; v++)
            sums[r][v] = accumulate ? load(out, r * PANEL + v * LANES, 0) : (Floats){0};
    for (int64_t k = 0; k < depth; k++) {
        /* Past the last input this is outside of the panel: a prefetch of any address is
           harmless. */
        if (kind != PAIRS) /* one row of pairs took a tenth longer */
            prefetch((const char *)panel + (k + AHEAD) * PANEL * size, PANEL * size);
        Floats weights[WIDE];
        for (int v = 0; v < WIDE; v++)
            weights[v] = load(panel, k * PANEL + v * LANES, kind == HALVES);
        for (int r = 0; r < rows; r++) {
            const Floats one = broadcast(x[r * x_stride + k]);
            for (int v = 0; v < WIDE; v++)
                sums[r][v] = multiply_add(sums[r][v], one, weights[v], kind);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < WIDE; v++)
            memcpy(out + r * PANEL + v * LANES, &sums[r][v], sizeof(Floats));
}

/* With a constant kind and number of rows the compiler keeps all sums in registers. */
static void block(const float *x, int64_t x_stride, const void *panel, int64_t depth, float *out,
                  int accumulate, int rows, int kind) {
#define CASE(R)                                                                             \
    case R:                                                                                 \
        if (kind == PAIRS) block_as(x, x_stride, panel, depth, out, accumulate, R, PAIRS);  \
        else BY_DTYPE(kind == HALVES, block_as, x, x_stride, panel, depth, out, accumulate, R); \
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
   inputs: [panels, inputs / SCALED, PANEL].

   Without values: weights in 8 bits, signed, [panels, inputs, PANEL]. One scale for each output,
   [panels, PANEL], multiplies its sum. */
typedef struct {
    const float *values, *scales;
} Codes;

/* Elements of a part of a panel of codes: the numbers that are made of it stay in the first
   cache. */
enum { SCALED = 64, DECODED = 128 };

/* LANES numbers in 8 bits. */
INLINE Floats load_bytes(const int8_t *from) {
#if defined __AVX512F__ /* gcc 12 converts to four times the width number by number */
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
#else
    SignedBytes raw;
    memcpy(&raw, from, sizeof raw);
    const Shorts shorts = __builtin_convertvector(raw, Shorts);
    return __builtin_convertvector(__builtin_convertvector(shorts, Ints), Floats);
#endif
}

#if defined __AVX512VBMI__ && defined __AVX512BF16__
enum { LOOKS_UP = 1 };
/* Bfloat16 numbers of the integers 0 to 127, their lower and their upper bytes; and which bytes of
   two elements belong to each two vectors of pairs. */
static uint8_t integers[2][128], places[WIDE][64];

__attribute__((constructor)) static void fill_tables(void) {
    for (int i = 0; i < 256; i++)
        integers[i / 128][i % 128] = (uint8_t)(narrow((float)(i % 128)) >> i / 128 * 8);
    for (int i = 0; i < WIDE * 64; i++) { /* of 16 bytes, 8 belong to the first vector */
        const int v = i / 64 * 2 + i % 16 / 8;
        const int output = v % WIDE * LANES + i % 64 / 16 * 4 + i % 8 / 2;
        places[i / 64][i % 64] = (uint8_t)((v / WIDE * 2 + i % 2) * PANEL + output - i / 64 * 32);
    }
}

/* Two elements as PAIRS. A lookup makes half of 64 numbers, where a conversion makes 16. */
INLINE void look_up_bytes(const int8_t *part, Floats *wide) {
    for (int v = 0; v < WIDE; v++, part += 32) {
#define TABLE(t, at) \
    _mm512_permutex2var_epi8(_mm512_loadu_si512(t), at, _mm512_loadu_si512((const char *)(t) + 64))
        const __m512i raw = TABLE(part, _mm512_loadu_si512(places[v])), size = _mm512_abs_epi8(raw);
        const __m512i low = TABLE(integers[0], size), sign = _mm512_set1_epi8(-128);
        const __m512i high = TABLE(integers[1], size) | (raw & sign);
#undef TABLE
        wide[2 * v] = (Floats)_mm512_unpacklo_epi8(low, high);
        wide[2 * v + 1] = (Floats)_mm512_unpackhi_epi8(low, high);
    }
}
#else
enum { LOOKS_UP = 0 };
INLINE void look_up_bytes(const int8_t *part, Floats *wide) {}
#endif

/* As `block_as` for one row of PAIRS and a panel in 8 bits, whose numbers are used only once. */
static void one_row_of_bytes(const float *x, const int8_t *panel, int64_t depth, float *out) {
    Floats sums[WIDE] = {{0}}, weights[2 * WIDE];
    for (int64_t k = 0; k < depth; k += 2, panel += 4 * PANEL) {
        look_up_bytes(panel, weights);
        for (int i = 0; i < 2 * WIDE; i++)
            sums[i % WIDE] =
                multiply_add(sums[i % WIDE], broadcast(x[k + i / WIDE]), weights[i], PAIRS);
    }
    memcpy(out, sums, sizeof sums);
}

/* Writes `depth` elements of a panel in 8 bits to `wide`, as FLOATS or PAIRS, both exact. */
static void decode_bytes(const int8_t *part, int64_t depth, float *wide, int pairs) {
    int64_t i = 0;
    for (; LOOKS_UP && pairs && i + 1 < depth; i += 2, part += 4 * PANEL)
        look_up_bytes(part, (Floats *)(wide + i * PANEL));
    for (; i < depth; i++, part += PANEL << pairs)
        for (int v = 0; v < WIDE; v++) {
            Floats x = load_bytes(part + v * LANES);
            if (pairs) { /* the first number is the lower half */
                const Floats y = load_bytes(part + PANEL + v * LANES);
                x = (Floats)((Words)x >> 16 | (Words)y);
            }
            memcpy(wide + i * PANEL + v * LANES, &x, sizeof x);
        }
}

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
    int64_t inputs, x_stride, kind;
    const float *x; /* [rows, inputs] */
    const void *panels;
    const Codes *codes; /* NULL, or of panels in 4 bits */
} Term;

/* An adapter's (x A^T) B^T; A [rank, inputs] and B [outputs, rank] in panels of FLOATS or PAIRS. */
typedef struct {
    const void *a, *b; /* NULL: none */
    int64_t rank;
} LowRank;

/* Rows [first, end). */
typedef struct {
    int64_t first, end;
} Part;

/* The product of x [rows, inputs] with a matrix, or else the content of `out`, plus the bias, plus
   the adapter terms of parts of the rows. `low` receives x A^T, in rows of `low_width` numbers: whole
   panels of the largest rank. For PAIRS it is bfloat16, as everywhere in training. */
typedef struct {
    int64_t rows, inputs, x_stride, kind, outputs, parts, threads, low_width;
    int64_t half; /* 1: `out` is bfloat16 */
    const float *x;
    const void *panels; /* may be NULL */
    const Codes *codes; /* may be NULL */
    const float *bias;  /* may be NULL */
    void *out;          /* [rows, outputs] */
    void *low;
    const Part *part;
    const LowRank *term; /* of each part */
} Product;

/* Outputs of one panel of a term, to a tile [rows][PANEL]. For many rows bfloat16 is widened once,
   before the products. */
static void add_term(const Term *t, int64_t panel, int64_t first, int64_t rows, float *tile,
                     int accumulate) {
    /* Bytes of two elements. */
    const int bytes = t->codes && t->codes->values == NULL, pairs = t->kind == PAIRS;
    const int64_t size = bytes ? 2 << pairs : t->codes ? 1 : t->kind == HALVES ? 4 : 8;
    /* Few rows are limited by memory, and bfloat16 is half of it; many rows would widen it
       again for each block of rows. */
    const int widens = t->codes || (t->kind == HALVES && rows > 2 * ROWS);
    const int64_t most = t->codes ? DECODED : DEEP;
    float wide[DEEP * PANEL] __attribute__((aligned(64)));
    if (LOOKS_UP && bytes && pairs && rows == 1 && t->inputs % 2 == 0) {
        const int8_t *part = (const int8_t *)t->panels + panel * t->inputs * 2 * PANEL;
        one_row_of_bytes(t->x + first * t->x_stride, part, t->inputs, tile);
        return;
    }
    for (int64_t k = 0; k < t->inputs; k += most) {
        const void *part = (const char *)t->panels + (panel * t->inputs + k) * PANEL / 2 * size;
        const int64_t depth = t->inputs - k < most ? t->inputs - k : most;
        if (bytes) BY_DTYPE(pairs, decode_bytes, part, depth, wide);
        else if (t->codes) decode(t->codes, part, panel, t->inputs, k, depth, wide);
        for (int64_t i = 0; widens && !t->codes && i < depth * PANEL; i += LANES) {
            const Floats x = load(part, i, 1);
            memcpy(wide + i, &x, sizeof x);
        }
        for (int64_t r = 0; r < rows; r += ROWS)
            block(t->x + (first + r) * t->x_stride + k, t->x_stride, widens ? wide : part, depth,
                  tile + r * PANEL, accumulate || k > 0, (int)(rows - r < ROWS ? rows - r : ROWS),
                  widens && !pairs ? FLOATS : (int)t->kind);
    }
}

/* Rows of an item: CHUNK, or so few that every thread has two items or more, so that a slow one does
   not delay the others. */
static int64_t chunk_of(int64_t rows, int64_t panels, int64_t threads) {
    int64_t chunk = CHUNK;
    while (chunk > 2 * ROWS && panels * ((rows + chunk - 1) / chunk) < 2 * threads) chunk /= 2;
    return chunk;
}

static int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* x A^T of all parts. The surplus columns of whole panels are zeros, because A is padded. Threads
   that are done do not wait for the others, here and below. */
static void low_products(const Product *c) {
    const int64_t kind = c->kind == PAIRS ? PAIRS : FLOATS;
    for (int64_t p = 0; p < c->parts; p++) {
        const LowRank *l = &c->term[p];
        if (l->a == NULL) continue;
        const Term term = {c->inputs, c->x_stride, kind, c->x, l->a, NULL};
        const int64_t rank = kind == PAIRS ? 2 * l->rank : l->rank, end = c->part[p].end;
        const int64_t panels = panels_of(rank), all = end - c->part[p].first;
        const int64_t chunk = chunk_of(all, panels, c->threads);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t item = 0; item < panels * ((all + chunk - 1) / chunk); item++) {
            const int64_t first = c->part[p].first + item / panels * chunk;
            const int64_t rows = end - first < chunk ? end - first : chunk;
            float tile[CHUNK * PANEL];
            add_term(&term, item % panels, first, rows, tile, 0);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < PANEL; i += LANES)
                    store_vector(c->low, (first + r) * c->low_width + item % panels * PANEL + i,
                                 load(tile, r * PANEL + i, 0), kind == PAIRS);
        }
    }
}

/* Some rows of the outputs of one panel. */
static void product_tile(const Product *c, int64_t panel, int64_t first, int64_t rows) {
    const int64_t begin = panel * PANEL, kind = c->kind == PAIRS ? PAIRS : FLOATS;
    const int64_t width = c->outputs - begin < PANEL ? c->outputs - begin : PANEL;
    float tile[CHUNK * PANEL];
    const Term matrix = {c->inputs, c->x_stride, c->kind, c->x, c->panels, c->codes};
    if (c->panels) add_term(&matrix, panel, first, rows, tile, 0);
    const float *scales = c->codes && !c->codes->values ? c->codes->scales + begin : NULL;
    for (int64_t r = 0; r < rows && (scales || c->bias || !c->panels); r++)
        for (int64_t i = 0; i < width; i += LANES) {
            Floats y = load(tile, r * PANEL + i, 0);
            if (scales) y *= load(scales, i, 0);
            if (!c->panels)
                y = load_part(c->out, (first + r) * c->outputs + begin + i, width - i, c->half);
            if (c->bias) y += load_part(c->bias, begin + i, width - i, 0);
            memcpy(tile + r * PANEL + i, &y, sizeof y);
        }
    for (int64_t p = 0; p < c->parts; p++) {
        const LowRank *l = &c->term[p];
        const int64_t from = c->part[p].first > first ? c->part[p].first : first;
        const int64_t end = c->part[p].end < first + rows ? c->part[p].end : first + rows;
        if (l->a == NULL || from >= end) continue;
        const int64_t stride = kind == PAIRS ? c->low_width / 2 : c->low_width;
        const Term term = {l->rank, stride, kind, c->low, l->b, NULL};
        add_term(&term, panel, from, end - from, tile + (from - first) * PANEL, 1);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i += LANES)
            store_part(c->out, (first + r) * c->outputs + begin + i, load(tile, r * PANEL + i, 0),
                       width - i, (int)c->half);
}

/* Products of the same input. */
static void products(const Product *call, int64_t count) {
    int64_t parts = 0;
    for (const Product *c = call; c < call + count; c++) {
        low_products(c);
        parts += c->parts;
    }
    /* B needs all of x A^T. */
    if (parts) {
#pragma omp barrier
    }
    for (const Product *c = call; c < call + count; c++) {
        const int64_t panels = panels_of(c->outputs), chunk = chunk_of(c->rows, panels, c->threads);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t item = 0; item < panels * ((c->rows + chunk - 1) / chunk); item++) {
            const int64_t first = item / panels * chunk, left = c->rows - first;
            product_tile(c, item % panels, first, left < chunk ? left : chunk);
        }
    }
}
