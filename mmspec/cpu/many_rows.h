/* Products of more than MAX_ROWS rows, such as a prompt's, with weights of a float type; included after few_rows.h.

   An element of out has the same bits as that of `tile`. Its LANES partial sums are computed one after the other instead
   of side by side: a vector has a column of LANES rows of w, which one number of x multiplies. That loads less for a
   product. For it rows lie interleaved: column by column, the columns of one partial sum together. */

#define WIDE W_ROWS(LANES)
#define TALL X_ROWS(LANES)

typedef VEC NAME(sums)[TALL][2];

INLINE void NAME(add_sums)(VEC sum[TALL][2], const NAME(sums) * other) {
#pragma GCC unroll 12
  for (int r = 0; r < TALL; r++) sum[r][0] += (*other)[r][0], sum[r][1] += (*other)[r][1];
}

INLINE void NAME(keep_sums)(VEC sum[TALL][2], NAME(sums) * to) {
#pragma GCC unroll 12
  for (int r = 0; r < TALL; r++) (*to)[r][0] = sum[r][0], (*to)[r][1] = sum[r][1];
}

/* Rows [count, K] as [column % LANES][column / LANES][width], with zeros where there are none. */
INLINE void NAME(interleave)(const char *from, int64_t count, int64_t K, const int type, float *to, const int width) {
  const int64_t bytes = float_bytes(type), step = plane(K, LANES, width);
#pragma GCC unroll 1
  for (int first = 0; first < width; first += 8) {
    const size_t stored = (size_t)(width - first < 8 ? width - first : 8) * sizeof(float);
    for (int64_t k = 0; k < num_steps(K, LANES) * LANES; k += 8) {
      float *const at = to + k % LANES * step + k / LANES * width + first;
      __m256 v[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        const char *const row = from + ((first + i) * K + k) * bytes;
        v[i] = first + i >= count || k >= K ? _mm256_setzero_ps()
               : K - k < 8                  ? load_first(row, K - k, type)
                                            : load8(row, type);
      }
      transpose8(v);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) memcpy(at + i * step, v + i, stored);
    }
  }
}

INLINE void NAME(interleave_type)(const char *from, int64_t count, int64_t K, int64_t type, float *to, const int width) {
  switch (type) {
    case FLOAT32: NAME(interleave)(from, count, K, FLOAT32, to, width); break;
    case BFLOAT16: NAME(interleave)(from, count, K, BFLOAT16, to, width); break;
    default: NAME(interleave)(from, count, K, FLOAT16, to, width);
  }
}

/* The products of WIDE with TALL interleaved rows. Partial sums are added as by `sum4`, in pairs. */
__attribute__((target(ISA))) static void NAME(many_tile)(const float *w, const float *x, int64_t K, NAME(sums) * out) {
  NAME(sums) stack[6]; /* of sums of 1, 2, 4, ... partial sums; the last place is for segments */
  int depth = 0;
  for (int turn = 0; turn < LANES; turn++) {
    const int lane = LANES == 16 ? turn / 2 + turn % 2 * 8 : turn;
    const float *a = w + lane * plane(K, LANES, WIDE), *b = x + lane * plane(K, LANES, TALL);
    VEC sum[TALL][2];
    int64_t k = 0;
    do {
      const int64_t steps = K - k < 2 * SEGMENT ? num_steps(K - k, LANES) : SEGMENT / LANES;
#pragma GCC unroll 12
      for (int r = 0; r < TALL; r++) sum[r][0] = sum[r][1] = ZERO();
#pragma GCC unroll 1
      for (int64_t j = 0; j < steps; j++, a += WIDE, b += TALL) {
        const VEC first = LOAD(a), second = LOAD(a + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < TALL; r++) {
          const VEC v = SET1(b[r]);
          sum[r][0] = FMA(first, v, sum[r][0]), sum[r][1] = FMA(second, v, sum[r][1]);
        }
      }
      if (k) NAME(add_sums)(sum, stack + depth);
      k += steps * LANES;
      if (k < K) NAME(keep_sums)(sum, stack + depth);
    } while (k < K);
    for (int n = turn + 1; n % 2 == 0; n /= 2) NAME(add_sums)(sum, stack + --depth);
    NAME(keep_sums)(sum, turn < LANES - 1 ? stack + depth++ : out);
  }
}

/* Interleaves tiles of x until none is left. */
__attribute__((target(ISA))) static void NAME(many_pack)(void *data) {
  many *const m = data;
  const int64_t K = m->x.K, type = m->x.type;
  for (int64_t t = take(&m->next_tile), row; (row = t * TALL) < m->x.R; t = take(&m->next_tile))
    NAME(interleave_type)(m->from + row * K * float_bytes(type), min64(TALL, m->x.R - row), K, type,
                          m->packed + t * LANES * plane(K, LANES, TALL), TALL);
}

/* Multiplies WIDE rows of w with a part of the tiles until none is left. */
__attribute__((target(ISA))) static void NAME(many_worker)(void *data) {
  many *const m = data;
  const weights *const w = m->part.w;
  const product p = {.x = &m->x};
  const int64_t K = m->x.K, N = m->part.N, tiles = ceil_div(m->x.R, TALL);
  float *const own = m->own + take(&m->ticket) * LANES * plane(K, LANES, WIDE);
  int64_t held = -1;
  for (int64_t task = take(&m->next), n; (n = task / m->parts * WIDE) < N; task = take(&m->next)) {
    const int64_t part = task % m->parts, count = min64(WIDE, N - n);
    const chunk c = {.bias = m->part.bias ? m->part.bias + n : NULL, .out = out_at(&m->x, m->part.out, n)};
    if (n != held)
      NAME(interleave_type)((const char *)w->data + bytes_of_rows(w->type, n, K), count, K, w->type, own, WIDE);
    held = n;
    for (int64_t t = tiles * part / m->parts; t < tiles * (part + 1) / m->parts; t++) {
      NAME(sums) sum;
      NAME(many_tile)(own, m->packed + t * LANES * plane(K, LANES, TALL), K, &sum);
      for (int64_t r = 0; r < min64(TALL, m->x.R - t * TALL); r++) {
        const float *const from = (const float *)sum[r];
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) finish(&p, &c, t * TALL + r, i, 4, _mm_loadu_ps(from + i));
        if (i < count) finish(&p, &c, t * TALL + r, i, count - i, _mm_loadu_ps(from + i));
      }
    }
  }
}

#undef WIDE
#undef TALL
