/* Products of rows of bfloat16 with weights of bfloat16 by VDPBF16PS, which multiplies and adds 32 columns at once; included
   after few_rows.h.

   An element of out is 16 partial sums in float32, each over two columns of every 32 in ascending order. It depends on its
   row of x and its row of w alone, as with the other kernels; few rows and many are computed in the same way. */

/* `finish` for row r of x and the sums of 16 rows of a chunk from row m on. */
INLINE void finish_sums(const rows *x, const chunk *c, int64_t r, int64_t m, const float *sums) {
  const __mmask16 there = (__mmask16)((1u << min64(16, c->rows - m)) - 1);
  float *const to = out_at(x, c->out, r * x->out_step + m);
  __m512 v = _mm512_loadu_ps(sums);
  if (c->bias) v = _mm512_maskz_loadu_ps(there, c->bias + m) + v;
  v = avx512_round(v, x->type);
  if (x->is_added) v = avx512_round(_mm512_maskz_loadu_ps(there, to) + v, x->type);
  if (x->is_narrow)
    _mm512_mask_cvtepi32_storeu_epi16(to, there, _mm512_srli_epi32(_mm512_castps_si512(v), 16));
  else
    _mm512_mask_storeu_ps(to, there, v);
}

#ifdef TILES
#include "tiles.h"
#else
#define PAIR_TILE 6 /* rows of x: 24 sums, 4 rows of w and one of x in 32 registers */

/* WEIGHT_ROWS rows of w. */
typedef struct {
  const char *w[WEIGHT_ROWS];
  const char *ahead, *end; /* what is prefetched meanwhile, in the order of addresses; equal for nothing */
  int64_t K, pause; /* bits of the columns at which nothing is prefetched, so that it is spread over all tiles */
} pair_block;

/* Fetch a line. More than two rows take so long that the few lines that the first-level cache can wait for at once are
   too few for the speed of the memory; the second level waits for more. */
INLINE void fetch_line(const char *at, const int X) {
  if (X <= 2)
    _mm_prefetch(at, _MM_HINT_T0);
  else
    _mm_prefetch(at, _MM_HINT_T1);
}

/* The 16 pairs of 32 columns, of which `count` are there, zeros behind the last. */
INLINE __m512i load_pairs(const char *from, const int64_t count) {
  char part[2 * PAIR_COLUMNS] = {0};
  if (count < PAIR_COLUMNS) from = memcpy(part, from, (size_t)(2 * count));
  return _mm512_loadu_si512(from);
}

/* The products of X rows of x with `count` columns of a block from column k on, at most 32, added to `sum`. */
INLINE void add_pairs(const pair_block *b, int64_t k, const int64_t count, const float *x,
                      __m512 sum[PAIR_TILE][WEIGHT_ROWS], const int X) {
  __m512i v[WEIGHT_ROWS];
#pragma GCC unroll 4
  for (int i = 0; i < WEIGHT_ROWS; i++) v[i] = load_pairs(b->w[i] + 2 * k, count);
#pragma GCC unroll 8
  for (int r = 0; r < X; r++) {
    const __m512i y = _mm512_loadu_si512(x + r * 16);
#pragma GCC unroll 4
    for (int i = 0; i < WEIGHT_ROWS; i++) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], (__m512bh)v[i], (__m512bh)y);
  }
}

/* The products of X rows of x with a block: four numbers of each row of `out`. */
INLINE void pair_tile(const pair_block *from, const float *x, float (*out)[CHUNK_ROWS], const int X) {
  const pair_block b = *from;
  const char *ahead = b.ahead;
  __m512 sum[PAIR_TILE][WEIGHT_ROWS];
  int64_t k = 0;
#pragma GCC unroll 8
  for (int r = 0; r < X; r++)
#pragma GCC unroll 4
    for (int i = 0; i < WEIGHT_ROWS; i++) sum[r][i] = _mm512_setzero_ps();
#pragma GCC unroll 1
  for (; k + PAIR_COLUMNS <= b.K; k += PAIR_COLUMNS, x += X * 16) {
    add_pairs(&b, k, PAIR_COLUMNS, x, sum, X);
    if (ahead < b.end && (X <= 2 || !(k & b.pause))) {
#pragma GCC unroll 4
      for (int i = 0; i < WEIGHT_ROWS; i++, ahead += LINE) fetch_line(ahead, X);
    }
  }
  if (k < b.K) add_pairs(&b, k, b.K - k, x, sum, X);
#pragma GCC unroll 8
  for (int r = 0; r < X; r++) _mm_storeu_ps(out[r], avx512_sum4(sum[r]));
}

/* The product of at most MAX_ROWS rows with one chunk. */
__attribute__((target(ISA))) static void multiply_pairs(const product *p, const chunk *c) {
  const int64_t K = p->K, R = p->R, tiles = ceil_div(R, PAIR_TILE), row_bytes = 2 * K, bytes = c->rows * row_bytes;
  const int64_t distance = tiles == 1 ? WEIGHT_ROWS * row_bytes * (1 + AHEAD_BYTES / (WEIGHT_ROWS * row_bytes)) : bytes;
  const int64_t pause = tiles == 1 ? 0 : tiles < 4 ? PAIR_COLUMNS : 3 * PAIR_COLUMNS;
  float sums[PAIR_TILE][CHUNK_ROWS] __attribute__((aligned(64)));
  for (int64_t t = 0; t < tiles; t++) { /* each reads the whole chunk, of which the second level has the next by then */
    const int64_t row = R * t / tiles, X = R * (t + 1) / tiles - row;
    const float *const x = p->packed + row * pair_floats(K);
    for (int64_t m = 0; m < c->rows; m += WEIGHT_ROWS) {
      const int64_t count = min64(WEIGHT_ROWS, c->rows - m), at = (t * bytes + m * row_bytes) / tiles + distance;
      pair_block b = {.K = K, .pause = pause, .ahead = at < bytes ? c->w + at : c->next ? c->next + at - bytes : NULL};
      b.end = b.ahead ? b.ahead + count * row_bytes / tiles : NULL;
      for (int i = 0; i < WEIGHT_ROWS; i++) b.w[i] = c->w + (m + min64(i, count - 1)) * row_bytes;
      float(*const out)[CHUNK_ROWS] = (void *)(sums[0] + m);
      switch (X) {
        case 1: pair_tile(&b, x, out, 1); break;
        case 2: pair_tile(&b, x, out, 2); break;
        case 3: pair_tile(&b, x, out, 3); break;
        case 4: pair_tile(&b, x, out, 4); break;
        case 5: pair_tile(&b, x, out, 5); break;
        case 6: pair_tile(&b, x, out, 6); break;
      }
    }
    for (int64_t r = 0; r < X; r++) finish_sums(p->x, c, row + r, 0, sums[r]);
  }
}

/* Rows [R, K] as tiles read them: [tile][column / 32][row of the tile][32] numbers of bfloat16, the last columns zero. They
   have that type, or are float32 numbers that it holds. */
__attribute__((target(ISA))) static void interleave_pairs(const void *from, int type, int64_t R, int64_t K, float *to) {
  const int64_t tiles = ceil_div(R, PAIR_TILE), bytes = float_bytes(type);
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
