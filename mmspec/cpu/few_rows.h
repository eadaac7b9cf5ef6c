/* The kernel of few_rows.c for one instruction set; included once for each. */

#define INLINE __attribute__((always_inline, target(ISA))) static inline

/* The first n < LANES numbers, then zeros. */
INLINE VEC NAME(load_part)(const float *p, int64_t n) {
  float part[LANES] = {0};
  memcpy(part, p, (size_t)n * sizeof(float));
  return LOAD(part);
}

/* The sums of the lanes of four vectors. */
INLINE __m128 NAME(sum4)(const VEC *v) {
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(HALVES(v[0]), HALVES(v[1])), _mm256_hadd_ps(HALVES(v[2]), HALVES(v[3])));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

typedef struct {
  const float *w[WEIGHT_ROWS]; /* rows of the block, at its first column */
  int64_t width;               /* columns of the panel */
  int is_first, is_last;       /* whether the panel is the first, the last of its rows */
  const float *ahead;          /* what to prefetch: `num_ahead` lines for each LANES columns */
  int64_t num_ahead, line_step, column_step;
} NAME(block);

/* Rows of x as tiles read them: [tile][column / LANES][row of the tile][LANES], the last columns zero. */
__attribute__((target(ISA))) static void NAME(pack)(job *j, float *to) {
  const int64_t R = j->R, tiles = (R + TILE - 1) / TILE;
  j->packed = to;
  for (int64_t t = 0; t < tiles; t++) {
    const float *x = j->x + R * t / tiles * j->K;
    const int64_t X = R * (t + 1) / tiles - R * t / tiles;
    int64_t k = 0;
    for (; k + LANES <= j->K; k += LANES)
      for (int64_t r = 0; r < X; r++, to += LANES) STORE(to, LOAD(x + r * j->K + k));
    if (k < j->K)
      for (int64_t r = 0; r < X; r++, to += LANES) STORE(to, NAME(load_part)(x + r * j->K + k, j->K - k));
  }
}

/* The products of X rows of x with a block. Sums of former segments come from `acc` [X, 4], those of this panel are added
   there; in the last panel the results go to `out` [X] instead. */
INLINE void NAME(tile)(const NAME(block) * b, const float *x, float *acc, __m128 *out, const int X) {
  const float *const w0 = b->w[0], *const w1 = b->w[1], *const w2 = b->w[2], *const w3 = b->w[3];
  const float *ahead = b->ahead;
  int is_first = b->is_first;
  for (int64_t k = 0; k < b->width; is_first = 0) {
    const int64_t end = b->width - k < 2 * SEGMENT ? b->width : k + SEGMENT;
    VEC sum[TILE][WEIGHT_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < X; r++)
#pragma GCC unroll 4
      for (int i = 0; i < WEIGHT_ROWS; i++) sum[r][i] = ZERO();
    for (; k + LANES <= end; k += LANES, x += X * LANES) {
      for (int64_t i = 0; i < b->num_ahead; i++) _mm_prefetch((const char *)(ahead + i * b->line_step), _MM_HINT_T0);
      ahead += b->column_step;
      const VEC w[WEIGHT_ROWS] = {LOAD(w0 + k), LOAD(w1 + k), LOAD(w2 + k), LOAD(w3 + k)};
#pragma GCC unroll 8
      for (int r = 0; r < X; r++) {
        const VEC v = LOAD(x + r * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < WEIGHT_ROWS; i++) sum[r][i] = FMA(w[i], v, sum[r][i]);
      }
    }
    if (k < end) { /* the last columns */
#pragma GCC unroll 8
      for (int r = 0; r < X; r++) {
        const VEC v = LOAD(x + r * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < WEIGHT_ROWS; i++) sum[r][i] = FMA(NAME(load_part)(b->w[i] + k, end - k), v, sum[r][i]);
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

/* One block and all rows of x. `n` is its first row of w, `count` the number of its rows, `first` its first column. */
__attribute__((target(ISA))) static void NAME(rows)(const job *j, NAME(block) * b, int64_t n, int64_t count,
                                                   int64_t first, float *acc) {
  const int64_t R = j->R, tiles = (R + TILE - 1) / TILE;
  const int64_t padded = (j->K + LANES - 1) / LANES * LANES;
  const float *const ahead = b->ahead;
  float bias[WEIGHT_ROWS] = {0};
  if (j->bias) memcpy(bias, j->bias + n, (size_t)count * sizeof(float));
  const int is_linear = j->panel == j->K && (tiles == 1 || (tiles == 2 && R * j->K <= 6 << 10));
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = R * t / tiles, X = R * (t + 1) / tiles - row;
    const int64_t line = WEIGHT_ROWS * t / tiles;
    const float *x = j->packed + row * padded + first * X;
    float *sums = acc + row * WEIGHT_ROWS * LANES;
    __m128 out[TILE];
    b->num_ahead = ahead ? WEIGHT_ROWS * (t + 1) / tiles - line : 0;
    b->line_step = is_linear ? LANES : j->K;
    b->column_step = is_linear ? b->num_ahead * LANES : LANES;
    b->ahead = ahead + line * j->K;
    switch (X) {
      case 1: NAME(tile)(b, x, sums, out, 1); break;
      case 2: NAME(tile)(b, x, sums, out, 2); break;
      case 3: NAME(tile)(b, x, sums, out, 3); break;
#if TILE > 3
      case 4: NAME(tile)(b, x, sums, out, 4); break;
      case 5: NAME(tile)(b, x, sums, out, 5); break;
      case 6: NAME(tile)(b, x, sums, out, 6); break;
#endif
    }
    if (!b->is_last) continue;
    for (int64_t r = 0; r < X; r++) {
      float *to = j->out + (row + r) * j->N + n;
      const __m128 sum = _mm_add_ps(out[r], _mm_loadu_ps(bias));
      if (count == WEIGHT_ROWS)
        _mm_storeu_ps(to, sum);
      else
        memcpy(to, &sum, (size_t)count * sizeof(float));
    }
  }
}

/* Chunks of w until none is left. */
__attribute__((target(ISA))) static void NAME(worker)(void *data) {
  job *j = data;
  const int64_t K = j->K, N = j->N, panels = K / j->panel;
  const int64_t distance = 1 + AHEAD_BYTES / (WEIGHT_ROWS * j->panel * (int64_t)sizeof(float));
  float acc[CHUNK_ROWS * MAX_ROWS * LANES] __attribute__((aligned(64)));
  for (int64_t begin = take_chunk(j), following; begin < N; begin = following) {
    following = take_chunk(j);
    const int64_t rows = min64(j->chunk, N - begin), blocks = (rows + WEIGHT_ROWS - 1) / WEIGHT_ROWS;
    const int64_t steps = panels * blocks;
    for (int64_t step = 0; step < steps; step++) {
      const int64_t p = step / blocks, m = step % blocks * WEIGHT_ROWS, n = begin + m;
      const int64_t count = min64(WEIGHT_ROWS, begin + rows - n), first = p * j->panel;
      NAME(block) b = {.is_first = p == 0, .is_last = p == panels - 1};
      b.width = b.is_last ? K - first : j->panel; /* the last takes what is left */
      for (int i = 0; i < WEIGHT_ROWS; i++) b.w[i] = j->w + (n + min64(i, count - 1)) * K + first;
      const int64_t then = step + distance, later = then < steps ? then : then - steps;
      const int64_t row = (then < steps ? begin : following) + later % blocks * WEIGHT_ROWS;
      const int64_t column = later / blocks * j->panel;
      b.ahead = row + WEIGHT_ROWS <= N && later < steps && column + b.width <= K ? j->w + row * K + column : NULL;
      NAME(rows)(j, &b, n, count, first, acc + m * MAX_ROWS * LANES);
    }
  }
}

#undef INLINE
#undef NAME
#undef ISA
#undef LANES
#undef TILE
#undef VEC
#undef ZERO
#undef LOAD
#undef STORE
#undef FMA
#undef HALVES
