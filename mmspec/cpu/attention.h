/* Attention of decoder.h, which includes it.

   A number of a score is a sum over the head's columns in ascending order; values are added in the order of positions. With
   BFLOAT16_PAIRS two columns of keys, or two positions of values, are multiplied at once by VDPBF16PS, which adds the
   product of the upper number of a pair, then that of the lower: the first position is the upper. So they are added in the
   order of positions too, whatever the pairs. */

/* Fetch what a tile of so many bytes is followed by. */
INLINE void NAME(prefetch)(const char *tile, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += LINE) _mm_prefetch(tile + bytes + i, _MM_HINT_T0);
}

/* sum + a b, for each number of a pair. */
INLINE VEC NAME(add_product)(VEC a, VEC b, VEC sum, const int type) {
#ifdef PAIRS
  if (type == BFLOAT16_PAIRS) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
  return FMA(a, b, sum);
}

/* Keys [n, D], at most 2 LANES, as float32 [D, 2 LANES]. */
INLINE void NAME(load_keys)(const char *keys, int64_t n, int64_t D, float *tile, const int type) {
  const int64_t bytes = float_bytes(type);
  NAME(prefetch)(keys, 2 * LANES * D * bytes);
  for (int64_t t = 0; t < 2 * LANES; t += 8) {
    const char *row[8];
    __m256 v[8];
    int64_t k = 0;
    for (int i = 0; i < 8; i++) row[i] = keys + min64(t + i, n - 1) * D * bytes;
    for (; k + 8 <= D; k += 8) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) v[i] = load8(row[i] + k * bytes, type);
      transpose8(v);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) _mm256_storeu_ps(tile + (k + i) * 2 * LANES + t, v[i]);
    }
    if (k == D) continue;
    for (int i = 0; i < 8; i++) v[i] = load_first(row[i] + k * bytes, D - k, type);
    transpose8(v);
    for (int i = 0; i < D - k; i++) _mm256_storeu_ps(tile + (k + i) * 2 * LANES + t, v[i]);
  }
}

/* Values [n, D] as pairs of positions [(n + 1) / 2, step], the last columns zero. */
INLINE void NAME(pair_values)(const char *values, int64_t n, int64_t D, int64_t step, float *tile) {
  NAME(prefetch)(values, VALUES * D * 2);
  for (int64_t t = 0; t < n; t += 2, tile += step, values += 4 * D)
    for (int64_t k = 0; k < step; k += 8) {
      const int64_t count = max64(0, min64(8, D - k)), other = t + 1 < n ? count : 0;
      const char *const at = values + 2 * k;
      const __m256 upper = count == 8 ? load8(at, BFLOAT16) : load_first(at, count, BFLOAT16);
      const __m256 lower = other == 8 ? load8(at + 2 * D, BFLOAT16) : load_first(at + 2 * D, other, BFLOAT16);
      const __m256i pair = _mm256_or_si256(_mm256_castps_si256(upper), _mm256_srli_epi32(_mm256_castps_si256(lower), 16));
      _mm256_storeu_si256((__m256i *)(tile + k), pair);
    }
}

/* Weights [width] that bfloat16 holds as pairs of positions. */
INLINE void NAME(pair_weights)(float *weights, int64_t width) {
  for (int64_t t = 0; t < width; t += 8) {
    const __m256i v = _mm256_loadu_si256((const __m256i *)(weights + t)), upper = _mm256_set1_epi64x(0xffff0000);
    const __m256i pair = _mm256_or_si256(_mm256_and_si256(v, upper), _mm256_srli_epi64(v, 48));
    const __m256i packed = _mm256_permutevar8x32_epi32(pair, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    _mm_storeu_si128((__m128i *)(weights + t / 2), _mm256_castsi256_si128(packed));
  }
}

#ifdef TILES
#include "attention_tiles.h"
#endif

/* Values [n, D] as float32 [n, step], the last columns zero. */
INLINE void NAME(load_values)(const char *values, int64_t n, int64_t D, int64_t step, float *tile, const int type) {
  const int64_t bytes = float_bytes(type);
  NAME(prefetch)(values, VALUES * D * bytes);
  for (int64_t t = 0; t < n; t++, tile += step, values += D * bytes) {
    int64_t k = 0;
    for (; k + 8 <= D; k += 8) _mm256_storeu_ps(tile + k, load8(values + k * bytes, type));
    if (k < D) _mm256_storeu_ps(tile + k, load_first(values + k * bytes, D - k, type)), k += 8;
    if (k < step) _mm256_storeu_ps(tile + k, _mm256_setzero_ps());
  }
}

/* Scores of X queries, `step` numbers apart, with the keys of a tile; `out` of a query begins `width` numbers apart. */
INLINE void NAME(score_tile)(const float *queries, int64_t step, const float *tile, int64_t D, float *out, int64_t width,
                             const int X, const int type) {
  VEC sum[MOST_QUERIES][2];
#pragma GCC unroll 8
  for (int i = 0; i < X; i++) sum[i][0] = sum[i][1] = ZERO();
  for (int64_t k = 0; k < D; k++, tile += (2 * LANES)) {
    const VEC low = LOAD(tile), high = LOAD(tile + LANES);
#pragma GCC unroll 8
    for (int i = 0; i < X; i++) {
      const VEC q = SET1(queries[i * step + k]);
      sum[i][0] = NAME(add_product)(q, low, sum[i][0], type), sum[i][1] = NAME(add_product)(q, high, sum[i][1], type);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < X; i++) STORE(out + i * width, sum[i][0]), STORE(out + i * width + LANES, sum[i][1]);
}

/* Weights of X queries, `width` numbers apart, times the n rows of a tile [n, step], added to `out` [X, `to_next`]. */
INLINE void NAME(weigh_tile)(const float *weights, int64_t width, const float *tile, int64_t n, int64_t step, float *out,
                             int64_t to_next, const int X, const int type) {
  for (int64_t k = 0; k < step; k += 2 * LANES) {
    const int64_t other = k + LANES < step ? LANES : 0; /* the last vector alone: twice the same */
    VEC sum[MOST_QUERIES][2];
#pragma GCC unroll 8
    for (int i = 0; i < X; i++) sum[i][0] = LOAD(out + i * to_next + k), sum[i][1] = LOAD(out + i * to_next + k + other);
    for (int64_t t = 0; t < n; t++) {
      const VEC low = LOAD(tile + t * step + k), high = LOAD(tile + t * step + k + other);
#pragma GCC unroll 8
      for (int i = 0; i < X; i++) {
        const VEC w = SET1(weights[i * width + t]);
        sum[i][0] = NAME(add_product)(w, low, sum[i][0], type), sum[i][1] = NAME(add_product)(w, high, sum[i][1], type);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < X; i++)
      STORE(out + i * to_next + k, sum[i][0]), STORE(out + i * to_next + k + other, sum[i][1]);
  }
}

#define OF_EACH_COUNT(X, call) \
  switch (X) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    default: call(6); \
  }

/* Scores [queries, width] of at most MANY_QUERIES queries with the positions of a stretch. */
INLINE void NAME(scores)(const stretch *p, const float *queries, int64_t num_queries, int64_t step, const char *keys,
                         int64_t D, float *tile, float *out, int64_t width, const int type) {
  const int64_t groups = ceil_div(num_queries, MOST_QUERIES), columns = type == BFLOAT16_PAIRS ? D / 2 : D;
  const int whole = type == BFLOAT16_PAIRS ? FLOAT32 : type; /* a pair is as long as a number of float32 */
  for (int64_t t = 0; t < p->T; t += (2 * LANES)) {
    NAME(load_keys)(keys + t * D * float_bytes(type), min64((2 * LANES), p->T - t), columns, tile, whole);
#ifdef TILES
    if (type == BFLOAT16_PAIRS && D % (2 * TILE_ROWS) == 0) {
      score_by_tiles(queries, num_queries, step, tile, columns, out + t, width);
      continue;
    }
#endif
    for (int64_t g = 0; g < groups; g++) {
      const int64_t i = num_queries * g / groups, X = num_queries * (g + 1) / groups - i;
#define CALL(X) NAME(score_tile)(queries + i * step, step, tile, columns, out + i * width + t, width, X, type)
      OF_EACH_COUNT(X, CALL)
#undef CALL
    }
  }
}

/* Weights [queries, width] of consecutive queries from `first` on times the values of a stretch, to `out` [queries,
   partial_floats]; the weights may change. */
INLINE void NAME(weigh)(const decoder *d, const stretch *p, int64_t first, float *weights, int64_t num_queries,
                        int64_t width, const char *values, float *tile, float *out, const int type) {
  const int64_t groups = ceil_div(num_queries, MOST_QUERIES), D = d->head_dim, step = query_step(d);
  const int64_t to_next = partial_floats(d);
  int64_t done = 0;
  for (int64_t i = 0; i < num_queries; i++) memset(out + i * to_next, 0, (size_t)step * sizeof(float));
#ifdef TILES
  if (type == BFLOAT16_PAIRS && D % (2 * TILE_ROWS) == 0)
    done = weigh_by_tiles(d, p, first, weights, num_queries, width, values, tile, out, to_next);
#endif
  (void)first;
  for (int64_t t = done; t < p->T; t += VALUES) {
    const int64_t n = min64(VALUES, p->T - t);
    const int64_t size = type == BFLOAT16_PAIRS ? 2 : 1; /* positions of a row of the tile */
    if (type == BFLOAT16_PAIRS)
      NAME(pair_values)(values + t * D * 2, n, D, step, tile);
    else
      NAME(load_values)(values + t * D * float_bytes(type), n, D, step, tile, type);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t i = num_queries * g / groups, X = num_queries * (g + 1) / groups - i;
#define CALL(X) NAME(weigh_tile)(weights + i * width + t / size, width, tile, (n + size - 1) / size, step, out + i * to_next, to_next, X, type)
      OF_EACH_COUNT(X, CALL)
#undef CALL
    }
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

/* Whether scores are multiplied by their factor, in place of the queries. */
static inline int scales_scores(const decoder *d) {
  return d->attention_type == BFLOAT16_PAIRS || (d->is_eager && d->type != FLOAT32);
}

/* What is done to T scores before the mask: eager attention rounds them before and after their factor. */
INLINE void NAME(limit)(const decoder *d, float *scores, int64_t T) {
  const VEC cap = SET1(d->attention_softcap), factor = SET1(d->scaling);
  const int64_t type = d->is_eager ? d->type : FLOAT32;
  if (!scales_scores(d) && !d->attention_softcap) return;
  for (int64_t i = 0; i < T; i += LANES) {
    VEC v = LOAD(scores + i);
    if (scales_scores(d)) v = NAME(round)(NAME(round)(v, type) * factor, type);
    if (d->attention_softcap)
      v = NAME(round)(NAME(round)(NAME(tanh)(NAME(round)(v / cap, type)), type) * cap, type);
    STORE(scores + i, v);
  }
}

/* Minus infinity at what node `node` must not see, and at the numbers behind the last position. */
INLINE void NAME(mask)(const decoder *d, const decoder_layer *l, const stretch *p, int64_t node, float *scores) {
  const int64_t length = d->lengths[p->b], first = length + d->nodes - d->span - p->begin; /* of `ancestors` */
  const int64_t *const depths = d->depths + p->b * d->nodes, count = p->end - p->begin, depth = l->window && d->depths ? depths[node] : 0;
  const uint8_t *const padding = d->padding ? d->padding + p->b * d->padding_length + p->begin : NULL;
  const uint8_t *const ancestors = d->ancestors ? d->ancestors + (p->b * d->nodes + node) * d->span - first : NULL;
  for (int64_t t = 0; padding && t < min64(d->padding_length, p->end) - p->begin; t++)
    if (!padding[t]) scores[t] = -INFINITY;
  for (int64_t t = max64(first, 0); ancestors && t < p->T; t++)
    if (!ancestors[t]) scores[t] = -INFINITY;
  for (int64_t t = 0; l->window && t < min64(length + depth - l->window + 1 - p->begin, count); t++) scores[t] = -INFINITY;
  for (int64_t n = 0; l->window && n < p->T - count; n++)
    if (depth - depths[n] >= l->window) scores[count + n] = -INFINITY;
  for (int64_t n = 0; p->is_divided && n < d->nodes; n++)
    if (part_of_node(d, p->b, p->origin, n) != p->number) scores[count + n] = -INFINITY;
  for (int64_t t = p->T; t % (2 * LANES); t++) scores[t] = -INFINITY;
}

/* Scores of one query to weights, as the attention kernel of a type rounds them: exponentials relative to the largest
   score, which is returned, with their sum in `total`. Where all are minus infinity weights are 0.

   Each lane adds the exponentials of every LANES-th position of the row, of the nodes in the order of their depths. */
INLINE float NAME(weights)(const decoder *d, const stretch *p, float *scores, float *total, const int type) {
  const int64_t T = p->T, count = p->end - p->begin, whole = count / LANES * LANES;
  const int64_t *const depths = d->depths ? d->depths + p->b * d->nodes : NULL;
  const int rounds = type != FLOAT32 && !d->is_eager;
  float largest[LANES], lanes[LANES], e[LANES];
  VEC top = SET1(-FLT_MAX), sum = ZERO();
  for (int64_t t = 0; t < T; t += LANES) top = MAX(LOAD(scores + t), top);
  STORE(largest, top);
  for (int i = 1; i < LANES; i++)
    if (largest[i] > largest[0]) largest[0] = largest[i];
  top = SET1(largest[0]);
  for (int64_t t = 0; t < whole; t += LANES) {
    const VEC v = NAME(exp)(LOAD(scores + t) - top);
    sum += v;
    STORE(scores + t, rounds ? NAME(round)(v, type) : v);
  }
  STORE(lanes, sum);
  for (int64_t t = whole; t < T; t += LANES) {
    const VEC v = NAME(exp)(LOAD(scores + t) - top);
    STORE(e, v);
    STORE(scores + t, rounds ? NAME(round)(v, type) : v);
    for (int64_t i = t; i < min64(t + LANES, T); i++) {
      const int64_t depth = i < count ? i - count : depths ? depths[i - count] : i - count;
      lanes[(p->end - p->origin + depth) % LANES] += e[i - t];
    }
  }
  *total = 0;
  for (int i = 0; i < LANES; i++) *total += lanes[i];
  if (type == FLOAT32 || rounds) return largest[0];
  for (int64_t t = 0; t < T; t += LANES) STORE(scores + t, NAME(round)(LOAD(scores + t) / SET1(*total), type));
  *total = 1;
  return largest[0];
}

/* Rotate the new keys of one head of one row; store them and the values behind the committed positions. */
__attribute__((target(ISA))) static void NAME(store)(const decoding *s, const decoder_layer *l, int64_t b, int64_t h) {
  const decoder *d = s->d;
  const int64_t D = d->head_dim, N = d->nodes, width = qkv_width(d), bytes = D * float_bytes(d->type);
  const int64_t first = ((cache_row(d, b) * d->num_kv_heads + h) * l->capacity + d->lengths[b]) * bytes;
  for (int64_t n = 0; n < N; n++) {
    float *const key = s->qkv + (b * N + n) * width + (query_heads(d) + h) * D;
    NAME(rotate)(d, l, key, l->k_norm, s->positions[b * N + n], 1.0f);
    if (d->normalises_values) NAME(normalise_row)(d, key + d->num_kv_heads * D, D, NULL);
    narrow(key, d->type, D, (char *)l->keys + first + n * bytes);
    narrow(key + d->num_kv_heads * D, d->type, D, (char *)l->values + first + n * bytes);
  }
}

/* The query of one head of node r; its gate follows. */
static inline float *query_at(const decoding *s, int64_t r, int64_t head) {
  const int64_t step = s->d->gates_attention ? 2 : 1;
  return s->qkv + r * qkv_width(s->d) + head * step * s->d->head_dim;
}

/* The gate of the output of one head of node r; gates of heads are the last numbers of a node. */
static inline float *head_gate_at(const decoding *s, int64_t r, int64_t head) {
  return s->qkv + (r + 1) * qkv_width(s->d) - s->d->num_heads + head;
}

/* The queries of one key-value head of one row as attention reads them, [heads, nodes, step]. */
INLINE void NAME(turn_queries)(const decoding *s, const decoder_layer *l, int64_t b, int64_t h, float *queries) {
  const decoder *d = s->d;
  const int64_t D = d->head_dim, N = d->nodes, heads = d->num_heads / d->num_kv_heads, step = query_step(d);
  const float factor = scales_scores(d) ? 1 : d->scaling;
  for (int64_t i = 0; i < heads * N; i++, queries += step) {
    memset(queries, 0, (size_t)step * sizeof(float));
    memcpy(queries, query_at(s, b * N + i % N, h * heads + i / N), (size_t)D * sizeof(float));
    NAME(rotate)(d, l, queries, l->q_norm, s->positions[b * N + i % N], factor);
    if (d->attention_type == BFLOAT16_PAIRS) narrow(queries, BFLOAT16, step, queries);
  }
}

/* Attention of the queries of one key-value head to one stretch of the cache, to `s->partial`. */
INLINE void NAME(attend_stretch)(const decoding *s, const decoder_layer *l, const stretch *p, const float *queries,
                                 float *scores, float *tile, const int type) {
  const decoder *d = s->d;
  const int64_t D = d->head_dim, N = d->nodes, count = d->num_heads / d->num_kv_heads * N, step = query_step(d);
  const int64_t head = cache_row(d, p->b) * d->num_kv_heads + p->h;
  const int64_t at = (head * l->capacity + p->begin) * D * float_bytes(type);
  const int64_t width = (p->T + (2 * LANES) - 1) / (2 * LANES) * (2 * LANES);
  for (int64_t begin = 0; begin < count; begin += MANY_QUERIES) {
    const int64_t n = min64(MANY_QUERIES, count - begin);
    float *const out = partial_at(s, p->b, p->h, p->number) + begin * partial_floats(d);
    NAME(scores)(p, queries + begin * step, n, step, (const char *)l->keys + at, D, tile, scores, width, type);
    for (int64_t i = 0; i < n; i++) {
      float *const row = scores + i * width, *const found = out + i * partial_floats(d) + step;
      NAME(limit)(d, row, p->T);
      NAME(mask)(d, l, p, (begin + i) % N, row);
      found[0] = NAME(weights)(d, p, row, found + 1, type);
      if (type == BFLOAT16_PAIRS) NAME(pair_weights)(row, width);
    }
    NAME(weigh)(d, p, begin, scores, n, width, (const char *)l->values + at, tile, out, type);
  }
}

/* What the queries of one key-value head of one row have found in parts `first` to `last`, in this order. */
INLINE void NAME(combine)(const decoding *s, int64_t b, int64_t h, int64_t first, int64_t last) {
  const decoder *d = s->d;
  const int64_t D = d->head_dim, N = d->nodes, heads = d->num_heads / d->num_kv_heads, step = query_step(d);
  const int64_t next = heads * N * partial_floats(d);
  for (int64_t i = 0; i < heads * N; i++) {
    float *const found = partial_at(s, b, h, first) + i * partial_floats(d);
    float *const to = s->attended + ((b * N + i % N) * d->num_heads + h * heads + i / N) * D;
    float largest = -FLT_MAX, total = 0;
    for (int64_t n = 0; n <= last - first; n++) largest = fmaxf(largest, found[n * next + step]);
    for (int64_t n = 0; n <= last - first; n++) {
      const float *const part = found + n * next;
      const VEC factor = NAME(exp)(SET1(part[step]) - SET1(largest));
      for (int64_t k = 0; k < D; k += LANES) STORE(found + k, (n ? LOAD(found + k) : ZERO()) + factor * LOAD(part + k));
      total += factor[0] * part[step + 1];
    }
    const float *const gate = query_at(s, b * N + i % N, h * heads + i / N) + D;
    const VEC of_head = SET1(d->gates_heads ? *head_gate_at(s, b * N + i % N, h * heads + i / N) : 0);
    for (int64_t k = 0; k < D; k += LANES) {
      VEC v = NAME(round)(LOAD(found + k) / SET1(total), d->type);
      if (d->gates_attention || d->gates_heads) {
        const VEC g = d->gates_heads ? of_head : NAME(load_some)(gate + k, D - k);
        v = NAME(round)(v * NAME(round)(NAME(sigmoid)(g), d->type), d->type);
      }
      NAME(store_some)(to + k, v, D - k);
    }
  }
}

/* Task of attention: of one key-value head of one row to one part of the cache, or to the last ones, where the nodes are.
   Who finishes the last task of a head combines what was found. `turned` is the head whose queries are in `queries`. */
INLINE void NAME(attend_of_type)(const decoding *s, const decoder_layer *l, int64_t task, int64_t *turned, float *scores,
                                 float *queries, float *tile, const int type) {
  const decoder *d = s->d;
  const int64_t head = task / num_parts(d), b = head / d->num_kv_heads, h = head % d->num_kv_heads;
  const int64_t length = d->lengths[b], origin = origin_of(d, b), size = part_size(d), tail = (length - origin) / size;
  const int64_t seen = l->window ? max64(length - l->window + 1, origin) : origin, first = (seen - origin) / size;
  const int64_t number = first + task % num_parts(d);
  if (number > tail) return;
  if (*turned != head) NAME(turn_queries)(s, l, b, h, queries), *turned = head;
  if (number == tail && l->k.data) NAME(store)(s, l, b, h);
  int64_t last = tail;
  for (int64_t n = 0; n < d->nodes; n++) last = max64(last, part_of_node(d, b, origin, n));
  for (int64_t i = number; i <= (number == tail ? last : number); i++) {
    const int64_t begin = origin + max64(i * size, (seen - origin) / (2 * MAX_LANES) * (2 * MAX_LANES));
    stretch p = {b, h, i, origin, min64(begin, length), length, 0, i >= tail && last > tail};
    if (i < tail) p.end = origin + (i + 1) * size;
    p.T = p.end - p.begin + (i < tail || d->hides_nodes ? 0 : d->nodes);
    NAME(attend_stretch)(s, l, &p, queries, scores, tile, type);
  }
  if (__atomic_add_fetch(s->done + head, 1, __ATOMIC_ACQ_REL) <= tail - first) return;
  s->done[head] = 0;
  NAME(combine)(s, b, h, first, last);
}

/* Attention of all queries of one layer. */
__attribute__((target(ISA))) static void NAME(attend)(const decoding *s, const decoder_layer *l, float *scores,
                                                     float *queries, float *tile, int64_t *next) {
  const decoder *d = s->d;
  int64_t turned = -1;
  for (int64_t task = take(next); task < d->batch * d->num_kv_heads * num_parts(d); task = take(next))
    switch (d->attention_type) {
#ifdef PAIRS
      case BFLOAT16_PAIRS: NAME(attend_of_type)(s, l, task, &turned, scores, queries, tile, BFLOAT16_PAIRS); break;
#endif
      case FLOAT32: NAME(attend_of_type)(s, l, task, &turned, scores, queries, tile, FLOAT32); break;
      case BFLOAT16: NAME(attend_of_type)(s, l, task, &turned, scores, queries, tile, BFLOAT16); break;
      default: NAME(attend_of_type)(s, l, task, &turned, scores, queries, tile, FLOAT16);
    }
}
