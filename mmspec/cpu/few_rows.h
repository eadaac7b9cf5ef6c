/* The kernel of few_rows.c, in the instruction set of the library. */

#define INLINE __attribute__((always_inline, target(ISA))) static inline

/* The first n < LANES numbers, then zeros. */
INLINE VEC NAME(load_part)(const float *p, int64_t n) {
  float part[LANES] = {0};
  memcpy(part, p, (size_t)n * sizeof(float));
  return LOAD(part);
}

INLINE VEC NAME(load_some)(const float *p, int64_t n) { return n < LANES ? NAME(load_part)(p, n) : LOAD(p); }

/* The first n numbers, at most LANES. */
INLINE void NAME(store_some)(float *p, VEC v, int64_t n) {
  if (n < LANES)
    memcpy(p, &v, (size_t)n * sizeof(float));
  else
    STORE(p, v);
}

/* Numbers rounded to a float type, as by `round4`. */
INLINE VEC NAME(round)(VEC x, int64_t type) {
  if (type == FLOAT32) return x;
#if LANES == 16
  if (type == FLOAT16) return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const VEC rounded = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000u)));
  return _mm512_mask_mov_ps(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), SET1(NAN));
#else
  return round8(x, type);
#endif
}

/* The sums of the lanes of four vectors. */
INLINE __m128 NAME(sum4)(const VEC *v) {
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(HALVES(v[0]), HALVES(v[1])), _mm256_hadd_ps(HALVES(v[2]), HALVES(v[3])));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* LANES weights of a float type from column k of a row on. */
INLINE VEC NAME(load_weights)(const char *w, int64_t k, const int type) {
  w += k * float_bytes(type);
  return type == FLOAT32 ? LOAD((const float *)w) : type == BFLOAT16 ? WIDEN_BFLOAT16(w) : WIDEN_FLOAT16(w);
}

/* The n < LANES weights from column k on, then zeros. */
INLINE VEC NAME(load_last)(const char *w, int64_t k, int64_t n, const int type) {
  char part[LANES * sizeof(float)] = {0};
  const int64_t bytes = float_bytes(type);
  memcpy(part, w + k * bytes, (size_t)(n * bytes));
  return NAME(load_weights)(part, 0, type);
}

typedef struct {
  const char *w[WEIGHT_ROWS]; /* rows of the block, at its first column */
  int64_t width;              /* columns of the panel */
  int is_first, is_last;      /* whether the panel is the first, the last of its rows */
  const char *ahead;          /* what to prefetch: `num_ahead` lines for each line of a row */
  int64_t num_ahead, line_step, column_step; /* in bytes */
} NAME(block);

/* 1 / sqrt(mean of squares + eps) of x [K]. */
INLINE float NAME(inverse_rms)(const float *x, int64_t K, float eps) {
  VEC sum[WEIGHT_ROWS] = {ZERO(), ZERO(), ZERO(), ZERO()};
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES) {
    const VEC v = LOAD(x + k);
    sum[0] = FMA(v, v, sum[0]);
  }
  if (k < K) {
    const VEC v = NAME(load_part)(x + k, K - k);
    sum[0] = FMA(v, v, sum[0]);
  }
  return 1.0f / sqrtf(_mm_cvtss_f32(NAME(sum4)(sum)) / (float)K + eps);
}

/* Rows of x [R, K] as tiles read them: [tile][column / LANES][row of the tile][LANES], the last columns zero. With `norm`
   [K], each row is first divided by its root mean square and multiplied by `norm` (RMSNorm). */
__attribute__((target(ISA))) static void NAME(pack)(const float *x, int64_t R, int64_t K, const float *norm, float eps,
                                                   float *to) {
  const int64_t tiles = ceil_div(R, TILE);
  for (int64_t t = 0, X; t < tiles; t++, x += X * K) {
    X = R * (t + 1) / tiles - R * t / tiles;
    float factor[TILE];
    if (norm)
      for (int64_t r = 0; r < X; r++) factor[r] = NAME(inverse_rms)(x + r * K, K, eps);
    for (int64_t k = 0; k < K; k += LANES) {
      const int64_t n = K - k;
      for (int64_t r = 0; r < X; r++, to += LANES) {
        VEC v = n < LANES ? NAME(load_part)(x + r * K + k, n) : LOAD(x + r * K + k);
        if (norm) v = (n < LANES ? NAME(load_part)(norm + k, n) : LOAD(norm + k)) * (v * SET1(factor[r]));
        STORE(to, v);
      }
    }
  }
}

/* The products of LANES columns from k on, added to `sum`. */
INLINE void NAME(add_products)(const char *const *w, int64_t k, const float *x, VEC sum[TILE][WEIGHT_ROWS], const int X,
                               const int type) {
  VEC y[TILE]; /* together with one vector of weights and the sums as many as there are registers */
#pragma GCC unroll 8
  for (int r = 0; r < X; r++) y[r] = LOAD(x + r * LANES);
#pragma GCC unroll 4
  for (int i = 0; i < WEIGHT_ROWS; i++) {
    const VEC v = NAME(load_weights)(w[i], k, type);
#pragma GCC unroll 8
    for (int r = 0; r < X; r++) sum[r][i] = FMA(v, y[r], sum[r][i]);
  }
}

/* The products of X rows of x with a block. Sums of former segments come from `acc` [X, 4], those of this panel are added
   there; in the last panel the results go to `out` [X] instead. */
INLINE void NAME(tile)(const NAME(block) * b, const float *x, float *acc, __m128 *out, const int X, const int type) {
  const char *const w[WEIGHT_ROWS] = {b->w[0], b->w[1], b->w[2], b->w[3]};
  const char *ahead = b->ahead;
  const int64_t line = LINE / float_bytes(type); /* columns */
  int is_first = b->is_first;
  for (int64_t k = 0; k < b->width; is_first = 0) {
    const int64_t end = b->width - k < 2 * SEGMENT ? b->width : k + SEGMENT;
    VEC sum[TILE][WEIGHT_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < X; r++)
#pragma GCC unroll 4
      for (int i = 0; i < WEIGHT_ROWS; i++) sum[r][i] = ZERO();
    for (; k + line <= end; ahead += b->column_step) {
      for (int64_t i = 0; i < b->num_ahead; i++) _mm_prefetch(ahead + i * b->line_step, _MM_HINT_T0);
#pragma GCC unroll 1
      for (int64_t i = 0; i < line; i += LANES, k += LANES, x += X * LANES) NAME(add_products)(w, k, x, sum, X, type);
    }
    for (; k + LANES <= end; k += LANES, x += X * LANES) NAME(add_products)(w, k, x, sum, X, type);
    if (k < end) { /* the last columns */
#pragma GCC unroll 8
      for (int r = 0; r < X; r++) {
        const VEC v = LOAD(x + r * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < WEIGHT_ROWS; i++)
          sum[r][i] = FMA(NAME(load_last)(w[i], k, end - k, type), v, sum[r][i]);
      }
      k = end;
    }
    if (!is_first) {
#pragma GCC unroll 8
      for (int r = 0; r < X; r++)
#pragma GCC unroll 4
        for (int i = 0; i < WEIGHT_ROWS; i++) sum[r][i] += LOAD(acc + (r * WEIGHT_ROWS + i) * LANES);
    }
    if (b->is_last && k == b->width) {
#pragma GCC unroll 8
      for (int r = 0; r < X; r++) out[r] = NAME(sum4)(sum[r]);
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < X; r++)
#pragma GCC unroll 4
        for (int i = 0; i < WEIGHT_ROWS; i++) STORE(acc + (r * WEIGHT_ROWS + i) * LANES, sum[r][i]);
    }
  }
}

/* `tile` for X rows of weights of one type. */
INLINE void NAME(tile_of_type)(const NAME(block) * b, const float *x, float *acc, __m128 *out, int64_t X, const int type) {
  switch (X) {
    case 1: NAME(tile)(b, x, acc, out, 1, type); break;
    case 2: NAME(tile)(b, x, acc, out, 2, type); break;
    case 3: NAME(tile)(b, x, acc, out, 3, type); break;
#if TILE > 3
    case 4: NAME(tile)(b, x, acc, out, 4, type); break;
    case 5: NAME(tile)(b, x, acc, out, 5, type); break;
    case 6: NAME(tile)(b, x, acc, out, 6, type); break;
#endif
  }
}

/* One block and all rows of x. `m` is its first row in the chunk, `count` the number of its rows, `first` its first
   column. */
__attribute__((target(ISA))) static void NAME(rows)(const product *p, const chunk *c, NAME(block) * b, int64_t m,
                                                   int64_t count, int64_t first, float *acc) {
  const int64_t R = p->R, tiles = ceil_div(R, TILE), row_bytes = p->K * float_bytes(c->type);
  const int64_t padded = ceil_div(p->K, LANES) * LANES;
  const char *const ahead = b->ahead;
  const int is_linear = p->panel == p->K && (tiles == 1 || (tiles == 2 && R * p->K <= 6 << 10));
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = R * t / tiles, X = R * (t + 1) / tiles - row;
    const int64_t line = WEIGHT_ROWS * t / tiles;
    const float *x = p->packed + row * padded + first * X;
    float *sums = acc + row * WEIGHT_ROWS * LANES;
    __m128 out[TILE];
    b->num_ahead = ahead ? WEIGHT_ROWS * (t + 1) / tiles - line : 0;
    b->line_step = is_linear ? LINE : row_bytes;
    b->column_step = is_linear ? b->num_ahead * LINE : LINE;
    b->ahead = ahead + line * row_bytes;
    switch (c->type) {
      case FLOAT32: NAME(tile_of_type)(b, x, sums, out, X, FLOAT32); break;
      case BFLOAT16: NAME(tile_of_type)(b, x, sums, out, X, BFLOAT16); break;
      default: NAME(tile_of_type)(b, x, sums, out, X, FLOAT16);
    }
    for (int64_t r = 0; b->is_last && r < X; r++) finish(p, c, row + r, m, count, out[r]);
  }
}

/* The product of at most MAX_ROWS rows with one chunk. */
__attribute__((target(ISA))) static void NAME(multiply)(const product *p, const chunk *c, float *acc) {
  if (is_quantised(c->type)) {
    (LANES == 16 && has_vnni() ? vnni_multiply_quantised : avx2_multiply_quantised)(p, c);
    return;
  }
#ifdef PAIRS
  if (c->type == BFLOAT16_PAIRS) {
    multiply_pairs(p, c);
    return;
  }
#endif
  check_chunk(c, p->K);
  const int64_t K = p->K, panels = K / p->panel, bytes = float_bytes(c->type);
  const int64_t distance = 1 + AHEAD_BYTES / (WEIGHT_ROWS * p->panel * bytes);
  const int64_t blocks = ceil_div(c->rows, WEIGHT_ROWS), steps = panels * blocks;
  for (int64_t step = 0; step < steps; step++) {
    const int64_t n = step / blocks, m = step % blocks * WEIGHT_ROWS;
    const int64_t count = min64(WEIGHT_ROWS, c->rows - m), first = n * p->panel;
    NAME(block) b = {.is_first = n == 0, .is_last = n == panels - 1};
    b.width = b.is_last ? K - first : p->panel; /* the last takes what is left */
    for (int i = 0; i < WEIGHT_ROWS; i++) b.w[i] = c->w + ((m + min64(i, count - 1)) * K + first) * bytes;
    const int64_t then = step + distance, later = then < steps ? then : then - steps;
    const char *const from = then < steps ? c->w : c->next;
    const int64_t row = later % blocks * WEIGHT_ROWS, column = later / blocks * p->panel;
    const int is_there = from && row + WEIGHT_ROWS <= (then < steps ? c->rows : c->next_rows);
    b.ahead = is_there && later < steps && column + b.width <= K ? from + (row * K + column) * bytes : NULL;
    NAME(rows)(p, c, &b, m, count, first, acc + m * MAX_ROWS * LANES);
  }
}

/* Floats of a packed row of x. */
INLINE int64_t NAME(packed_row)(int64_t K, int64_t type) {
  if (type == BFLOAT16_PAIRS) return pair_floats(K);
  return is_quantised(type) ? num_groups(K) * (int64_t)(sizeof(group) / sizeof(float)) : ceil_div(K, LANES) * LANES;
}

/* Chunks of the parts until none is left, for all rows of x. */
__attribute__((target(ISA))) static void NAME(multiply_parts)(const rows *x, const part *parts, int num_parts,
                                                             int64_t *next) {
  float acc[CHUNK_ROWS * MAX_ROWS * LANES] __attribute__((aligned(64)));
  chunk c, following;
  run taken = {0};
  for (int found = find_chunk(x, parts, num_parts, next, &taken, &c); found; c = following) {
    found = find_chunk(x, parts, num_parts, next, &taken, &following);
    for (int64_t row = 0; row < x->R; row += MAX_ROWS) {
      const int64_t R = min64(MAX_ROWS, x->R - row);
      const product p = {x, x->packed + row * NAME(packed_row)(x->K, c.type), R, x->K, panel_width(R, x->K)};
      chunk now = c;
      now.out = out_at(x, c.out, row * x->out_step);
      if (found && row + R == x->R) set_next(&now, &following);
      NAME(multiply)(&p, &now, acc);
    }
  }
}

/* Rows of x [R, w->cols] for `multiply_parts` with weights of the type of w, packed in groups of MAX_ROWS. With `norm`
   see `pack`. */
__attribute__((target(ISA))) static void NAME(pack_groups)(const weights *w, const float *x, int64_t R, const float *norm,
                                                          float eps, float *to) {
  const int64_t K = w->cols, step = NAME(packed_row)(K, w->type);
  if (is_quantised(w->type)) {
    round_rows(x, R, K, norm, eps, (group *)to);
    return;
  }
#ifdef PAIRS
  if (w->type == BFLOAT16_PAIRS) { /* rows of 16 bits are normalised before */
    pack_pairs(x, R, K, to);
    return;
  }
#endif
  for (int64_t row = 0; row < R; row += MAX_ROWS)
    NAME(pack)(x + row * K, min64(MAX_ROWS, R - row), K, norm, eps, to + row * step);
}

__attribute__((target(ISA))) static void NAME(worker)(void *data) {
  linear *l = data;
  NAME(multiply_parts)(&l->x, &l->part, 1, &l->next);
}
