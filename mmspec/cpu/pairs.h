/* Products of rows of bfloat16 with weights of bfloat16 by VDPBF16PS, which multiplies and adds 32 columns at once; included
   after few_rows.h.

   An element of out is 16 partial sums in float32, each over two columns of every 32 in ascending order. It depends on its
   row of x and its row of w alone, as with the other kernels; few rows and many are computed in the same way. */

#ifdef TILES
#include "tiles.h"
#else
#define IN_ORDER 10 /* rows of x up to which memory is the limit: lines are prefetched in the order of their addresses then,
                       which the processor's own prefetching follows; four rows side by side it does not */
#define PAIR_TILE 6 /* rows of x: 24 sums, 6 rows and a weight in 32 registers */

typedef struct {
  const char *w[WEIGHT_ROWS];
  const char *ahead;              /* rows to prefetch; NULL for none */
  int64_t line_step, column_step; /* in bytes */
  int64_t K;
} pair_block;

/* The 16 pairs of 32 columns from k on; zeros behind the last. */
INLINE __m512i load_pairs(const char *row, int64_t k, int64_t K) {
  if (K - k >= PAIR_COLUMNS) return _mm512_loadu_si512(row + 2 * k);
  char part[2 * PAIR_COLUMNS] = {0};
  memcpy(part, row + 2 * k, (size_t)(2 * (K - k)));
  return _mm512_loadu_si512(part);
}

/* The products of X rows of x with a block, and their sums to `out` [X]. */
INLINE void pair_tile(const pair_block *b, const float *x, __m128 *out,
                                                                          const int X) {
  const char *const w[WEIGHT_ROWS] = {b->w[0], b->w[1], b->w[2], b->w[3]};
  __m512 sum[PAIR_TILE][WEIGHT_ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < X; r++)
#pragma GCC unroll 4
    for (int i = 0; i < WEIGHT_ROWS; i++) sum[r][i] = _mm512_setzero_ps();
#pragma GCC unroll 1
  for (int64_t k = 0; k < b->K; k += PAIR_COLUMNS, x += X * 16) {
    if (b->ahead)
#pragma GCC unroll 4
      for (int i = 0; i < WEIGHT_ROWS; i++) _mm_prefetch(b->ahead + i * b->line_step + k * b->column_step, _MM_HINT_T0);
    __m512i y[PAIR_TILE];
#pragma GCC unroll 8
    for (int r = 0; r < X; r++) y[r] = _mm512_loadu_si512(x + r * 16);
#pragma GCC unroll 4
    for (int i = 0; i < WEIGHT_ROWS; i++) {
      const __m512i v = load_pairs(w[i], k, b->K);
#pragma GCC unroll 8
      for (int r = 0; r < X; r++) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], (__m512bh)v, (__m512bh)y[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < X; r++) out[r] = avx512_sum4(sum[r]);
}

/* The product of at most MAX_ROWS rows with one chunk. */
__attribute__((target(ISA))) static void multiply_pairs(const product *p, const chunk *c) {
  const int64_t K = p->K, R = p->R, tiles = (R + PAIR_TILE - 1) / PAIR_TILE, row_bytes = 2 * K;
  const int64_t distance = WEIGHT_ROWS * (1 + AHEAD_BYTES / (WEIGHT_ROWS * row_bytes));
  for (int64_t m = 0; m < c->rows; m += WEIGHT_ROWS) {
    const int64_t count = min64(WEIGHT_ROWS, c->rows - m), then = m + distance, later = then - c->rows;
    pair_block b = {.K = K, .line_step = row_bytes, .column_step = 2};
    if (R <= IN_ORDER) b.line_step = LINE, b.column_step = 2 * WEIGHT_ROWS;
    for (int i = 0; i < WEIGHT_ROWS; i++) b.w[i] = c->w + (m + min64(i, count - 1)) * row_bytes;
    if (then + WEIGHT_ROWS <= c->rows)
      b.ahead = c->w + then * row_bytes;
    else if (c->next && later >= 0 && later + WEIGHT_ROWS <= c->next_rows)
      b.ahead = c->next + later * row_bytes;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = R * t / tiles, X = R * (t + 1) / tiles - row;
      const float *const x = p->packed + row * pair_floats(K);
      __m128 out[PAIR_TILE];
      switch (X) {
        case 1: pair_tile(&b, x, out, 1); break;
        case 2: pair_tile(&b, x, out, 2); break;
        case 3: pair_tile(&b, x, out, 3); break;
        case 4: pair_tile(&b, x, out, 4); break;
        case 5: pair_tile(&b, x, out, 5); break;
        case 6: pair_tile(&b, x, out, 6); break;
      }
      for (int64_t r = 0; r < X; r++) finish(p, c, row + r, m, count, out[r]);
      b.ahead = NULL;
    }
  }
}

/* Rows [R, K] as tiles read them: [tile][column / 32][row of the tile][32] numbers of bfloat16, the last columns zero. They
   have that type, or are float32 numbers that it holds. */
__attribute__((target(ISA))) static void interleave_pairs(const void *from, int type, int64_t R, int64_t K, float *to) {
  const int64_t tiles = (R + PAIR_TILE - 1) / PAIR_TILE, bytes = float_bytes(type);
  for (int64_t t = 0, row = 0, X; t < tiles; t++, row += X) {
    X = R * (t + 1) / tiles - row;
    for (int64_t k = 0; k < K; k += PAIR_COLUMNS)
      for (int64_t r = 0; r < X; r++, to += 16) {
        const char *const at = (const char *)from + ((row + r) * K + k) * bytes;
        const int64_t count = min64(PAIR_COLUMNS, K - k);
        if (count < PAIR_COLUMNS) memset(to, 0, 16 * sizeof(float));
        if (type == BFLOAT16)
          memcpy(to, at, (size_t)(2 * count));
        else
          narrow((const float *)at, BFLOAT16, count, to);
      }
  }
}
#endif

/* `pack_groups` for pairs. */
static void pack_pairs(const float *x, int64_t R, int64_t K, float *to) {
  for (int64_t row = 0; row < R; row += MAX_ROWS)
    interleave_pairs(x + row * K, FLOAT32, min64(MAX_ROWS, R - row), K, to + row * pair_floats(K));
}

/* Interleaves MAX_ROWS rows of x at a time until all are. */
static void pair_pack_worker(void *data) {
  linear *const l = data;
  const int64_t K = l->x.K;
  for (int64_t row; (row = take(&l->next) * MAX_ROWS) < l->x.R;)
    interleave_pairs(l->from + row * K, BFLOAT16, min64(MAX_ROWS, l->x.R - row), K, (float *)l->x.packed + row * pair_floats(K));
}
