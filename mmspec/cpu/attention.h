/* Attention of decoder.h, which includes it for each instruction set. */

/* Scores [T, QUERIES] of QUERIES rows of queries [QUERIES, step] with T keys [T, D]. */
INLINE void NAME(scores)(const float *queries, int64_t step, const char *keys, int64_t T, int64_t D, float *out,
                         const int type) {
  for (int64_t t = 0; t < T; t += TILE / 3 * 2) {
    const char *key[TILE / 3 * 2];
    VEC sum[TILE / 3 * 2][QUERIES];
#pragma GCC unroll 4
    for (int j = 0; j < TILE / 3 * 2; j++) {
      key[j] = keys + min64(t + j, T - 1) * D * float_bytes(type);
#pragma GCC unroll 4
      for (int i = 0; i < QUERIES; i++) sum[j][i] = ZERO();
    }
    for (int64_t k = 0; k < D; k += LANES) {
      VEC q[QUERIES];
#pragma GCC unroll 4
      for (int i = 0; i < QUERIES; i++) q[i] = LOAD(queries + i * step + k);
#pragma GCC unroll 4
      for (int j = 0; j < TILE / 3 * 2; j++) {
        const VEC v = k + LANES <= D ? NAME(load_weights)(key[j], k, type) : NAME(load_last)(key[j], k, D - k, type);
#pragma GCC unroll 4
        for (int i = 0; i < QUERIES; i++) sum[j][i] = FMA(v, q[i], sum[j][i]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < TILE / 3 * 2; j++) _mm_storeu_ps(out + (t + j) * QUERIES, NAME(sum4)(sum[j]));
  }
}

/* The hyperbolic tangent. */
INLINE VEC NAME(tanh)(VEC x) {
  const VEC square = x * x, large = SET1(1) - SET1(2) / (NAME(exp)(x + x) + SET1(1));
  VEC p = SET1(62.0f / 2835);
  p = FMA(p, square, SET1(-17.0f / 315));
  p = FMA(p, square, SET1(2.0f / 15));
  p = FMA(p, square, SET1(-1.0f / 3));
  p = FMA(p, square * x, x);
#if LANES == 16
  return _mm512_mask_mov_ps(large, _mm512_cmp_ps_mask(square, SET1(0.0625f), _CMP_LT_OQ), p);
#else
  return _mm256_blendv_ps(large, p, _mm256_cmp_ps(square, SET1(0.0625f), _CMP_LT_OQ));
#endif
}

/* What is done to scores [T, QUERIES] before the mask: eager attention rounds them before and after their factor. */
INLINE void NAME(limit)(const decoder *d, float *scores, int64_t T) {
  const VEC cap = SET1(d->attention_softcap), factor = SET1(d->scaling);
  const int64_t type = d->is_eager ? d->type : FLOAT32;
  if (type == FLOAT32 && !d->attention_softcap) return;
  for (int64_t i = 0; i < T * QUERIES; i += LANES) {
    VEC v = LOAD(scores + i);
    if (type != FLOAT32) v = NAME(round)(NAME(round)(v, type) * factor, type);
    if (d->attention_softcap)
      v = NAME(round)(NAME(round)(NAME(tanh)(NAME(round)(v / cap, type)), type) * cap, type);
    STORE(scores + i, v);
  }
}

/* The first position that one of the queries sees through the layer's window. */
static inline int64_t NAME(first_seen)(const decoder *d, const decoder_layer *l, int64_t b, const int64_t *node) {
  int64_t first = d->lengths[b];
  for (int i = 0; l->window && i < QUERIES; i++)
    first = min64(first, d->lengths[b] + d->depths[b * d->nodes + node[i]] - l->window + 1);
  return l->window ? max64(first, 0) : 0;
}

/* Minus infinity at what the queries do not see through the layer's window. Scores begin at position `begin`. */
INLINE void NAME(mask_window)(const decoder *d, const decoder_layer *l, int64_t b, const int64_t *node, float *scores,
                              int64_t begin) {
  const int64_t length = d->lengths[b], *const depths = d->depths + b * d->nodes;
  for (int i = 0; l->window && i < QUERIES; i++) {
    const int64_t depth = depths[node[i]];
    for (int64_t t = begin; t <= min64(length + depth - l->window, length - 1); t++)
      scores[(t - begin) * QUERIES + i] = -INFINITY;
    for (int64_t n = 0; n < d->nodes; n++)
      if (depth - depths[n] >= l->window) scores[(length + n - begin) * QUERIES + i] = -INFINITY;
  }
}

/* Minus infinity at what the queries must not see, and at the numbers behind the last of T positions from `begin` on. */
INLINE void NAME(mask)(const decoder *d, int64_t b, const int64_t *node, float *scores, int64_t T, int64_t begin) {
  const int64_t length = d->lengths[b];
  const uint8_t *const padding = d->padding ? d->padding + b * d->padding_length + begin : NULL;
  for (int64_t t = 0; padding && t < min64(d->padding_length, length) - begin; t++)
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
INLINE void NAME(weigh)(const float *weights, const char *values, int64_t T, int64_t D, const float *total,
                        float *const *out, const int width, int64_t rest, const int type) {
  VEC sum[QUERIES][LANES / 4];
#pragma GCC unroll 4
  for (int i = 0; i < QUERIES; i++)
#pragma GCC unroll 4
    for (int j = 0; j < width; j++) sum[i][j] = ZERO();
  for (int64_t t = 0; t < T; t++) {
    VEC v[LANES / 4];
#pragma GCC unroll 4
    for (int j = 0; j < width; j++)
      v[j] = rest ? NAME(load_last)(values, t * D, rest, type) : NAME(load_weights)(values, t * D + j * LANES, type);
#pragma GCC unroll 4
    for (int i = 0; i < QUERIES; i++) {
      const VEC weight = SET1(weights[t * QUERIES + i]);
#pragma GCC unroll 4
      for (int j = 0; j < width; j++) sum[i][j] = FMA(weight, v[j], sum[i][j]);
    }
  }
  for (int i = 0; i < QUERIES; i++)
    for (int j = 0; j < width; j++) {
      const VEC result = NAME(round)(sum[i][j] / SET1(total[i]), type);
      if (rest)
        memcpy(out[i], &result, (size_t)rest * sizeof(float));
      else
        STORE(out[i] + j * LANES, result);
    }
}

/* Rotate the new keys of one head of one row; store them and the values behind the committed positions. */
__attribute__((target(ISA))) static void NAME(store)(const decoding *s, const decoder_layer *l, int64_t b, int64_t h) {
  const decoder *d = s->d;
  const int64_t D = d->head_dim, N = d->nodes, width = qkv_width(d), bytes = D * float_bytes(d->type);
  const int64_t first = ((b * d->num_kv_heads + h) * l->capacity + d->lengths[b]) * bytes;
  for (int64_t n = 0; n < N; n++) {
    float *const key = s->qkv + (b * N + n) * width + (d->num_heads + h) * D;
    NAME(rotate)(d, l, key, l->k_norm, s->positions[b * N + n], 1.0f);
    narrow(key, d->type, D, (char *)l->keys + first + n * bytes);
    narrow(key + d->num_kv_heads * D, d->type, D, (char *)l->values + first + n * bytes);
  }
}

/* Exponentials [T, QUERIES] and their sums as the attention kernel of a type rounds them before they weigh values. */
INLINE void NAME(round_weights)(const decoder *d, float *weights, int64_t T, float *total) {
  float lanes[LANES];
  for (int i = 0; i < LANES; i++) lanes[i] = d->is_eager ? total[i % QUERIES] : 1;
  const VEC divisor = LOAD(lanes);
  for (int64_t i = 0; i < T * QUERIES; i += LANES)
    STORE(weights + i, NAME(round)(LOAD(weights + i) / divisor, d->type));
  for (int i = 0; d->is_eager && i < QUERIES; i++) total[i] = 1;
}

/* Attention of all queries of one key-value head of one row. */
INLINE void NAME(attend_of_type)(const decoding *s, const decoder_layer *l, int64_t b, int64_t h, float *scores,
                                 float *queries, const int type) {
  const decoder *d = s->d;
  const int64_t D = d->head_dim, N = d->nodes, heads = d->num_heads / d->num_kv_heads, width = qkv_width(d);
  const int64_t step = (D + LANES - 1) / LANES * LANES, size = float_bytes(type);
  const int64_t offset = (b * d->num_kv_heads + h) * l->capacity * D * size;
  const float factor = type != FLOAT32 && d->is_eager ? 1 : d->scaling;
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
      NAME(rotate)(d, l, to, l->q_norm, s->positions[b * N + node[i]], factor);
      out[i] = s->attended + (b * N + node[i]) * d->num_heads * D + head * D;
    }
    const int64_t first = NAME(first_seen)(d, l, b, node), T = d->lengths[b] + N - first;
    const char *const keys = (const char *)l->keys + offset + first * D * size;
    const char *const values = (const char *)l->values + offset + first * D * size;
    NAME(scores)(queries, step, keys, T, D, scores, type);
    NAME(limit)(d, scores, T);
    NAME(mask_window)(d, l, b, node, scores, first);
    NAME(mask)(d, b, node, scores, T, first);
    NAME(exponentials)(scores, T, total);
    if (type != FLOAT32) NAME(round_weights)(d, scores, T, total);
    for (int64_t k = 0; k < D;) {
      float *const to[QUERIES] = {out[0] + k, out[1] + k, out[2] + k, out[3] + k};
      if (k + LANES / 4 * LANES <= D) {
        NAME(weigh)(scores, values + k * size, T, D, total, to, LANES / 4, 0, type);
        k += LANES / 4 * LANES;
      } else {
        NAME(weigh)(scores, values + k * size, T, D, total, to, 1, k + LANES <= D ? 0 : D - k, type);
        k += LANES;
      }
    }
  }
}

__attribute__((target(ISA))) static void NAME(attend)(const decoding *s, const decoder_layer *l, int64_t b, int64_t h,
                                                     float *scores, float *queries) {
  switch (s->d->type) {
    case FLOAT32: NAME(attend_of_type)(s, l, b, h, scores, queries, FLOAT32); break;
    case BFLOAT16: NAME(attend_of_type)(s, l, b, h, scores, queries, BFLOAT16); break;
    default: NAME(attend_of_type)(s, l, b, h, scores, queries, FLOAT16);
  }
}
