/* Decoder layers of few_rows.c for one instruction set; included once for each, after few_rows.h.

   A row of the result depends on its own tokens, positions and ancestors alone, bit for bit: not on other nodes, and not
   on where in the tree, or already committed, its ancestors are. Sums over positions are in the order of the cache, and
   a masked position adds 0. */

/* e to the power of x, 0 below -87.3. The polynomial is the Taylor series, of error 1e-8 within log(2) / 2. */
INLINE VEC NAME(exp)(VEC x) {
  const VEC log2e = SET1(1.44269504f), high = SET1(0.693359375f), low = SET1(-2.12194440e-4f);
#if LANES == 16
  const VEC n = _mm512_roundscale_ps(x * log2e, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const VEC n = _mm256_round_ps(x * log2e, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
  const VEC r = (x - n * high) - n * low;
  VEC p = SET1(1.0f / 5040);
  p = FMA(p, r, SET1(1.0f / 720));
  p = FMA(p, r, SET1(1.0f / 120));
  p = FMA(p, r, SET1(1.0f / 24));
  p = FMA(p, r, SET1(1.0f / 6));
  p = FMA(p, r, SET1(0.5f));
  p = FMA(p, r, SET1(1.0f));
  p = FMA(p, r, SET1(1.0f));
#if LANES == 16
  const VEC power = _mm512_scalef_ps(p, n);
  return _mm512_mask_mov_ps(power, _mm512_cmp_ps_mask(x, SET1(-87.3f), _CMP_LT_OQ), ZERO());
#else
  const __m256i exponent = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(n, SET1(128)), SET1(-127)));
  const VEC power = p * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, SET1(-87.3f), _CMP_LT_OQ), power);
#endif
}

INLINE void NAME(wait)(const decoding *s) {
  if (s->has_team) s->barrier();
}

/* x [K] in place: divided by its root mean square, times `norm` (RMSNorm). */
INLINE void NAME(normalise)(float *x, int64_t K, const float *norm, float eps) {
  const float scale = NAME(inverse_rms)(x, K, eps);
  for (int64_t k = 0; k < K; k++) x[k] = norm[k] * (x[k] * scale);
}

/* One head [head_dim] in place: RMSNorm if there is a weight, rotation, and a factor. */
INLINE void NAME(rotate)(const decoder *d, float *head, const float *norm, int64_t position, float factor) {
  const int64_t half = d->head_dim / 2;
  const float *const cos = d->cos + position * d->head_dim, *const sin = d->sin + position * d->head_dim;
  if (norm) NAME(normalise)(head, d->head_dim, norm, d->eps);
  for (int64_t i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = (a * cos[i] - b * sin[i]) * factor;
    head[i + half] = (b * cos[i + half] + a * sin[i + half]) * factor;
  }
}

/* Scores [T, QUERIES] of QUERIES rows of queries [QUERIES, step] with T keys [T, D]. */
INLINE void NAME(scores)(const float *queries, int64_t step, const float *keys, int64_t T, int64_t D, float *out) {
  for (int64_t t = 0; t < T; t += TILE / 3 * 2) {
    const float *key[TILE / 3 * 2];
    VEC sum[TILE / 3 * 2][QUERIES];
#pragma GCC unroll 4
    for (int j = 0; j < TILE / 3 * 2; j++) {
      key[j] = keys + min64(t + j, T - 1) * D;
#pragma GCC unroll 4
      for (int i = 0; i < QUERIES; i++) sum[j][i] = ZERO();
    }
    for (int64_t k = 0; k < D; k += LANES) {
      VEC q[QUERIES];
#pragma GCC unroll 4
      for (int i = 0; i < QUERIES; i++) q[i] = LOAD(queries + i * step + k);
#pragma GCC unroll 4
      for (int j = 0; j < TILE / 3 * 2; j++) {
        const VEC v = k + LANES <= D ? LOAD(key[j] + k) : NAME(load_part)(key[j] + k, D - k);
#pragma GCC unroll 4
        for (int i = 0; i < QUERIES; i++) sum[j][i] = FMA(v, q[i], sum[j][i]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < TILE / 3 * 2; j++) _mm_storeu_ps(out + (t + j) * QUERIES, NAME(sum4)(sum[j]));
  }
}

/* Minus infinity at what the queries must not see, and at the numbers behind the last position. */
INLINE void NAME(mask)(const decoder *d, int64_t b, const int64_t *node, float *scores, int64_t T) {
  const int64_t length = d->lengths[b];
  const uint8_t *const padding = d->padding ? d->padding + b * d->padding_length : NULL;
  for (int64_t t = 0; padding && t < min64(d->padding_length, length); t++)
    if (!padding[t])
      for (int i = 0; i < QUERIES; i++) scores[t * QUERIES + i] = -INFINITY;
  for (int64_t n = 0, first = T - d->span; d->ancestors && n < d->span; n++)
    for (int i = 0; i < QUERIES; i++)
      if (!d->ancestors[(b * d->nodes + node[i]) * d->span + n]) scores[(first + n) * QUERIES + i] = -INFINITY;
  for (int64_t i = T * QUERIES; i < (T + 3) / 4 * 4 * QUERIES; i++) scores[i] = -INFINITY;
}

/* Scores [T, QUERIES] to exponentials relative to each query's largest score; their sums go to `total` [QUERIES]. */
INLINE void NAME(exponentials)(float *scores, int64_t T, float *total) {
  const int64_t n = (T + 3) / 4 * 4 * QUERIES;
  float largest[LANES];
  VEC top = SET1(-INFINITY);
  for (int64_t i = 0; i < n; i += LANES) top = MAX(LOAD(scores + i), top);
  STORE(largest, top);
  for (int i = QUERIES; i < LANES; i++)
    if (largest[i] > largest[i % QUERIES]) largest[i % QUERIES] = largest[i];
  for (int i = QUERIES; i < LANES; i++) largest[i] = largest[i % QUERIES];
  top = LOAD(largest);
  for (int64_t i = 0; i < n; i += LANES) STORE(scores + i, NAME(exp)(LOAD(scores + i) - top));
  __m128 sum = _mm_setzero_ps();
  for (int64_t t = 0; t < T; t++) sum = _mm_add_ps(sum, _mm_loadu_ps(scores + t * QUERIES));
  _mm_storeu_ps(total, sum);
}

/* Columns of `width` vectors, at most LANES / 4: sums over the positions of weight times value, by 1 / total. */
INLINE void NAME(weigh)(const float *weights, const float *values, int64_t T, int64_t D, const float *total,
                        float *const *out, const int width, int64_t rest) {
  VEC sum[QUERIES][LANES / 4];
#pragma GCC unroll 4
  for (int i = 0; i < QUERIES; i++)
#pragma GCC unroll 4
    for (int j = 0; j < width; j++) sum[i][j] = ZERO();
  for (int64_t t = 0; t < T; t++) {
    VEC v[LANES / 4];
#pragma GCC unroll 4
    for (int j = 0; j < width; j++)
      v[j] = rest ? NAME(load_part)(values + t * D, rest) : LOAD(values + t * D + j * LANES);
#pragma GCC unroll 4
    for (int i = 0; i < QUERIES; i++) {
      const VEC weight = SET1(weights[t * QUERIES + i]);
#pragma GCC unroll 4
      for (int j = 0; j < width; j++) sum[i][j] = FMA(weight, v[j], sum[i][j]);
    }
  }
  for (int i = 0; i < QUERIES; i++)
    for (int j = 0; j < width; j++) {
      const VEC result = sum[i][j] / SET1(total[i]);
      if (rest)
        memcpy(out[i], &result, (size_t)rest * sizeof(float));
      else
        STORE(out[i] + j * LANES, result);
    }
}

/* Rotate the new keys of one head of one row; store them and the values behind the committed positions. */
__attribute__((target(ISA))) static void NAME(store)(const decoding *s, const decoder_layer *l, int64_t b, int64_t h) {
  const decoder *d = s->d;
  const int64_t D = d->head_dim, N = d->nodes, width = qkv_width(d);
  float *const keys = l->keys + (b * d->num_kv_heads + h) * l->capacity * D;
  float *const values = l->values + (b * d->num_kv_heads + h) * l->capacity * D;
  for (int64_t n = 0; n < N; n++) {
    float *const key = s->qkv + (b * N + n) * width + (d->num_heads + h) * D;
    NAME(rotate)(d, key, l->k_norm, s->positions[b * N + n], 1.0f);
    memcpy(keys + (d->lengths[b] + n) * D, key, (size_t)D * sizeof(float));
    memcpy(values + (d->lengths[b] + n) * D, key + d->num_kv_heads * D, (size_t)D * sizeof(float));
  }
}

/* Attention of all queries of one key-value head of one row. */
__attribute__((target(ISA))) static void NAME(attend)(const decoding *s, const decoder_layer *l, int64_t b, int64_t h,
                                                     float *scores, float *queries) {
  const decoder *d = s->d;
  const int64_t D = d->head_dim, N = d->nodes, heads = d->num_heads / d->num_kv_heads, width = qkv_width(d);
  const int64_t T = d->lengths[b] + N, step = (D + LANES - 1) / LANES * LANES;
  const float *const keys = l->keys + (b * d->num_kv_heads + h) * l->capacity * D;
  const float *const values = l->values + (b * d->num_kv_heads + h) * l->capacity * D;
  NAME(store)(s, l, b, h);
  for (int64_t begin = 0; begin < heads * N; begin += QUERIES) {
    int64_t node[QUERIES];
    float total[QUERIES], *out[QUERIES];
    for (int i = QUERIES - 1; i >= 0; i--) { /* behind the last query, copies of it */
      const int64_t query = min64(begin + i, heads * N - 1), head = h * heads + query / N;
      node[i] = query % N;
      float *const from = s->qkv + (b * N + node[i]) * width + head * D, *const to = queries + i * step;
      memset(to, 0, (size_t)step * sizeof(float));
      memcpy(to, from, (size_t)D * sizeof(float));
      NAME(rotate)(d, to, l->q_norm, s->positions[b * N + node[i]], d->scaling);
      out[i] = s->attended + (b * N + node[i]) * d->num_heads * D + head * D;
    }
    NAME(scores)(queries, step, keys, T, D, scores);
    NAME(mask)(d, b, node, scores, T);
    NAME(exponentials)(scores, T, total);
    for (int64_t k = 0; k < D;) {
      float *const to[QUERIES] = {out[0] + k, out[1] + k, out[2] + k, out[3] + k};
      if (k + LANES / 4 * LANES <= D) {
        NAME(weigh)(scores, values + k, T, D, total, to, LANES / 4, 0);
        k += LANES / 4 * LANES;
      } else {
        NAME(weigh)(scores, values + k, T, D, total, to, 1, k + LANES <= D ? 0 : D - k);
        k += LANES;
      }
    }
  }
}

/* silu(gate) * up of all rows, chunk by chunk. */
__attribute__((target(ISA))) static void NAME(gated)(const decoding *s, const decoder_layer *l, const float *packed,
                                                    int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, K = d->hidden_size, N = d->intermediate_size;
  const int64_t padded = NAME(packed_row)(K, l->gate.type), count = num_chunks(N);
  float acc[CHUNK_ROWS * MAX_ROWS * LANES] __attribute__((aligned(64)));
  float gate[MAX_ROWS * CHUNK_ROWS] __attribute__((aligned(64))), up[MAX_ROWS * CHUNK_ROWS] __attribute__((aligned(64)));
  const rows x = {packed, R, K, CHUNK_ROWS, 0};
  const part gates = {&l->gate, l->gate_bias, gate, N}, ups = {&l->up, l->up_bias, up, N};
  for (int64_t now = take(next), then; now < count; now = then) {
    then = take(next);
    for (int64_t row = 0; row < R; row += MAX_ROWS) {
      const int64_t M = min64(MAX_ROWS, R - row);
      const product p = {&x, packed + row * padded, M, K, panel_width(M, K)};
      chunk c = chunk_at(&x, &gates, now), other = chunk_at(&x, &ups, now);
      c.out = gate, other.out = up;
      set_next(&c, &other);
      if (row + M == R && then < count) {
        const chunk following = chunk_at(&x, &gates, then);
        set_next(&other, &following);
      }
      NAME(multiply)(&p, &c, acc);
      NAME(multiply)(&p, &other, acc);
      for (int64_t r = 0; r < M; r++) {
        float *const line = gate + r * CHUNK_ROWS;
        for (int64_t i = 0; i < CHUNK_ROWS; i += LANES) {
          const VEC g = LOAD(line + i);
          STORE(line + i, g / (SET1(1.0f) + NAME(exp)(-g)) * LOAD(up + r * CHUNK_ROWS + i));
        }
        memcpy(s->activated + (row + r) * N + now * CHUNK_ROWS, line, (size_t)c.rows * sizeof(float));
      }
    }
  }
}

/* Attention of one layer and its projections. */
INLINE void NAME(self_attention)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size, width = d->num_heads * d->head_dim;
  const int64_t kv_width = d->num_kv_heads * d->head_dim, tasks = d->batch * d->num_kv_heads;
  float *const scores = own + align16(R * (widest_row(d) + MAX_LANES));
  float *const queries = scores + align16(QUERIES * (d->max_keys + 4));
  const part qkv[] = {{&l->q, l->q_bias, s->qkv, width},
                      {&l->k, l->k_bias, s->qkv + width, kv_width},
                      {&l->v, l->v_bias, s->qkv + width + kv_width, kv_width}};
  const part o = {&l->o, l->o_bias, s->x, D};
  const float *const wide = s->attention_inputs;
  const int64_t K = wide ? 2 * D : D;
  NAME(pack_groups)(&l->q, wide ? wide : s->x, R, wide ? NULL : l->input_norm, d->eps, own);
  NAME(multiply_parts)(&(rows){own, R, K, qkv_width(d), 0}, qkv, 3, next);
  NAME(wait)(s);
  for (int64_t task = take(next + 1); task < tasks; task = take(next + 1))
    NAME(attend)(s, l, task / d->num_kv_heads, task % d->num_kv_heads, scores, queries);
  NAME(wait)(s);
  NAME(pack_groups)(&l->o, s->attended, R, NULL, 0, own);
  NAME(multiply_parts)(&(rows){own, R, width, D, 1}, &o, 1, next + 2);
  NAME(wait)(s);
}

/* One layer, from `x` to `x`. */
INLINE void NAME(layer)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const int64_t R = s->d->batch * s->d->nodes, D = s->d->hidden_size, N = s->d->intermediate_size;
  const part down = {&l->down, l->down_bias, s->x, D};
  NAME(self_attention)(s, l, own, next);
  if (!l->gate.data) return;
  NAME(pack_groups)(&l->gate, s->x, R, l->post_norm, s->d->eps, own);
  NAME(gated)(s, l, own, next + 3);
  NAME(wait)(s);
  NAME(pack_groups)(&l->down, s->activated, R, NULL, 0, own);
  NAME(multiply_parts)(&(rows){own, R, N, D, 1}, &down, 1, next + 4);
  NAME(wait)(s);
}

/* Work of one thread. */
__attribute__((target(ISA))) static void NAME(decode)(void *data) {
  decoding *s = data;
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size, thread = take(&s->ticket);
  float *const own = s->own + thread * thread_floats(d);
  for (int64_t i = 0; i < d->num_layers; i++) {
    const decoder_layer *l = d->layers + i;
    NAME(layer)(s, l, own, s->next + 5 * i);
    if (l->hidden && thread == 0) memcpy(l->hidden, s->x, (size_t)(R * D) * sizeof(float));
  }
  const part head = {&d->lm_head, d->lm_head_bias, d->logits, d->vocab_size};
  NAME(pack_groups)(&d->lm_head, s->x, R, d->final_norm, d->eps, own);
  NAME(multiply_parts)(&(rows){own, R, D, d->vocab_size, 0}, &head, 1, s->next + 5 * d->num_layers);
  if (d->normed && thread == 0)
    for (int64_t r = 0; r < R; r++) {
      memcpy(d->normed + r * D, s->x + r * D, (size_t)D * sizeof(float));
      NAME(normalise)(d->normed + r * D, D, d->final_norm, d->eps);
    }
}
