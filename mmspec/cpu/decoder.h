/* Decoder layers of few_rows.c; included after few_rows.h.

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

INLINE VEC NAME(sigmoid)(VEC x) { return SET1(1.0f) / (SET1(1.0f) + NAME(exp)(-x)); }

/* x [K] in place: divided by its root mean square, times `norm` unless it is NULL (RMSNorm), rounded as the decoder's norms
   round; with `is_centred` the mean is subtracted first (LayerNorm). */
INLINE void NAME(normalise_row)(const decoder *d, float *x, int64_t K, const float *norm) {
  if (d->is_centred) {
    double sum = 0;
    for (int64_t k = 0; k < K; k++) sum += x[k];
    for (int64_t k = 0; k < K; k++) x[k] -= (float)(sum / (double)K);
  }
  const float scale = NAME(inverse_rms)(x, K, d->eps);
  for (int64_t k = 0; k < K; k += LANES) {
    VEC v = NAME(load_some)(x + k, K - k) * SET1(scale);
    if (d->rounds_twice) v = NAME(round)(v, d->type);
    if (norm) v = NAME(load_some)(norm + k, K - k) * v;
    NAME(store_some)(x + k, NAME(round)(v, d->type), K - k);
  }
}

/* R rows of x for products with w, as `pack_groups`; with `norm` normalised first, in half precision at `normed`. */
INLINE void NAME(pack_rows)(const decoder *d, const weights *w, const float *x, int64_t R, const float *norm, float *normed,
                            float *to) {
  const int64_t K = w->cols;
  if (norm && (d->type != FLOAT32 || d->is_centred)) {
    memcpy(normed, x, (size_t)(R * K) * sizeof(float));
    for (int64_t r = 0; r < R; r++) NAME(normalise_row)(d, normed + r * K, K, norm);
    x = normed, norm = NULL;
  }
  NAME(pack_groups)(w, x, R, norm, d->eps, to);
}

/* One head [head_dim] in place: rotation, a factor, and RMSNorm if there is a weight that is not of all heads. */
INLINE void NAME(rotate)(const decoder *d, const decoder_layer *l, float *head, const float *norm, int64_t position,
                         float factor) {
  const int64_t size = d->rotary_size, half = size / 2, type = d->type;
  const int is_last = norm && d->head_norms == ROTATED_HEADS;
  const float scale = is_last ? 1 : factor;
  const float *const cos = (l->cos ? l->cos : d->cos) + position * size;
  const float *const sin = (l->sin ? l->sin : d->sin) + position * size;
  if (norm && d->head_norms == EACH_HEAD) NAME(normalise_row)(d, head, d->head_dim, norm);
  if (d->is_interleaved) {
    for (int64_t i = 0; i < size; i += 2) {
      const float a = head[i], b = head[i + 1];
      head[i] = round1(round1(a * cos[i], type) - round1(b * sin[i], type), type) * scale;
      head[i + 1] = round1(round1(b * cos[i + 1], type) + round1(a * sin[i + 1], type), type) * scale;
    }
  } else if (type == FLOAT32) {
    for (int64_t i = 0; i < half; i++) {
      const float a = head[i], b = head[i + half];
      head[i] = (a * cos[i] - b * sin[i]) * scale;
      head[i + half] = (b * cos[i + half] + a * sin[i + half]) * scale;
    }
  } else {
    for (int64_t i = 0; i < half; i += LANES) {
      const int64_t n = half - i, j = i + half;
      const VEC a = NAME(load_some)(head + i, n), b = NAME(load_some)(head + j, n);
      const VEC ac = NAME(round)(a * NAME(load_some)(cos + i, n), type), bs = NAME(round)(b * NAME(load_some)(sin + i, n), type);
      const VEC bc = NAME(round)(b * NAME(load_some)(cos + j, n), type), as = NAME(round)(a * NAME(load_some)(sin + j, n), type);
      NAME(store_some)(head + i, NAME(round)(ac - bs, type) * SET1(scale), n);
      NAME(store_some)(head + j, NAME(round)(bc + as, type) * SET1(scale), n);
    }
  }
  for (int64_t i = size; i < d->head_dim; i++) head[i] *= scale;
  if (is_last) NAME(normalise_row)(d, head, d->head_dim, norm);
  for (int64_t i = 0; is_last && i < d->head_dim; i++) head[i] *= factor;
}

#include "attention.h"

/* The activation of a gate, rounded. */
INLINE VEC NAME(activate)(const decoder *d, VEC g) {
  if (d->activation == RELU_SQUARED) {
    const VEC positive = MAX(ZERO(), g); /* NaN stays NaN */
    return NAME(round)(positive * positive, d->type);
  }
  VEC u = g; /* gelu, by tanh: g times the sigmoid of u */
  if (d->activation == GELU_TANH) u = SET1(1.59576912f) * FMA(SET1(0.044715f) * g, g * g, g);
  return NAME(round)(g / (SET1(1.0f) + NAME(exp)(-u)), d->type);
}

/* The activation of gate, times up, of all rows, to `out`. Of a run of chunks first gate is computed, then up: memory is
   read faster in the order of its addresses. */
__attribute__((target(ISA))) static void NAME(gated)(const decoder *d, const part *gates, const part *ups,
                                                    const float *packed, int64_t R, float *out, int64_t *next) {
  const int64_t K = d->hidden_size, N = gates->N;
  const int64_t padded = NAME(packed_row)(K, gates->w->type), type = d->type;
  const int64_t chunk_size = chunk_rows(gates->w), count = num_chunks(gates->w, N);
  float acc[CHUNK_ROWS * MAX_ROWS * LANES] __attribute__((aligned(64)));
  float up[MAX_ROWS * 2 * CHUNK_ROWS] __attribute__((aligned(64)));
  const rows gate_rows = {packed, R, K, N, 0, (int)type, 0}, up_rows = {packed, R, K, chunk_size, 0, (int)type, 0};
  for (run now = take_run(next, count), then; now.at < now.end; now = then) {
    const int64_t first = now.at, size = now.end - first;
    then = take_run(next, count);
    for (int64_t i = 0; i < 2 * size; i++) {
      const int is_up = i >= size;
      const int64_t n = first + i % size, is_last = i + 1 == 2 * size;
      chunk c = chunk_at(is_up ? &up_rows : &gate_rows, is_up ? ups : gates, n), following = {0};
      if (!is_last || then.at < then.end)
        following = chunk_at(&gate_rows, i + 1 < size || is_last ? gates : ups, is_last ? then.at : first + (i + 1) % size);
      for (int64_t row = 0; row < R; row += MAX_ROWS) {
        const int64_t M = min64(MAX_ROWS, R - row);
        const product p = {is_up ? &up_rows : &gate_rows, packed + row * padded, M, K, panel_width(M, K)};
        float *const to = out + row * N + n * chunk_size;
        c.out = is_up ? up : to;
        if (row + M == R && following.w) set_next(&c, &following);
        NAME(multiply)(&p, &c, acc);
        for (int64_t r = 0; is_up && r < M; r++)
          for (int64_t k = 0; k < c.rows; k += LANES) {
            const VEC active = NAME(activate)(d, NAME(load_some)(to + r * N + k, c.rows - k));
            const VEC product = NAME(round)(active * LOAD(up + r * chunk_size + k), type);
            NAME(store_some)(to + r * N + k, product, c.rows - k);
          }
      }
    }
  }
}

/* Add `branch` to the residual: normalised first if there is a norm, times a factor; then the sum times `scale` [1], if
   there is one. */
INLINE void NAME(add_branch)(const decoding *s, const float *norm, const float *scale, int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size;
  for (int64_t row = take(next); row < R; row = take(next)) {
    float *const branch = s->branch + row * D, *const x = s->x + row * D;
    if (norm) NAME(normalise_row)(d, branch, D, norm);
    for (int64_t i = 0; i < D; i += LANES) {
      VEC v = NAME(load_some)(branch + i, D - i);
      if (d->residual_scale != 1) v = NAME(round)(v * SET1(d->residual_scale), d->type);
      v = NAME(round)(NAME(load_some)(x + i, D - i) + v, d->type);
      if (scale) v = NAME(round)(v * SET1(*scale), d->type);
      NAME(store_some)(x + i, v, D - i);
    }
  }
  meet(s->team);
}

/* The product of what attention or a mixer has found with `o`, from `attended` to `x`; to `branch` where the layer has
   taps. */
INLINE void NAME(project_out)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size;
  const float *const norm = l->attention_out_norm;
  const int is_added = !norm && d->residual_scale == 1 && !l->num_taps;
  const part o = {&l->o, l->o_bias, is_added ? s->x : s->branch, D};
  NAME(pack_groups)(&l->o, s->attended, R, NULL, 0, own);
  NAME(multiply_parts)(&(rows){own, R, l->o.cols, D, is_added, (int)d->type, 0}, &o, 1, next + O_PHASE);
  meet(s->team);
  if (!is_added && !l->num_taps) NAME(add_branch)(s, norm, NULL, next + ADD_ATTENTION_PHASE);
}

/* Attention of one layer and its projections, from `x` to `x`; to `branch` where the layer has taps. */
INLINE void NAME(self_attention)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, kv_width = d->num_kv_heads * d->head_dim;
  float *const keys = s->qkv + query_heads(d) * d->head_dim;
  const part qkv[] = {{&l->q, l->q_bias, s->qkv, query_heads(d) * d->head_dim},
                      {&l->head_gate, NULL, keys + 2 * kv_width, d->gates_heads ? l->head_gate.rows : 0},
                      {&l->k, l->k_bias, keys, kv_width},
                      {&l->v, l->v_bias, keys + kv_width, kv_width}};
  const float *const wide = s->attention_inputs;
  const int64_t K = wide ? 2 * d->hidden_size : d->hidden_size;
  NAME(pack_rows)(d, &l->q, wide ? wide : s->x, R, wide ? NULL : l->input_norm, own + normed_at(d), own);
  NAME(multiply_parts)(&(rows){own, R, K, qkv_width(d), 0, (int)d->type, 0}, qkv, l->k.data ? 4 : 2, next + QKV_PHASE);
  meet(s->team);
  if (d->head_norms == ALL_HEADS) {
    for (int64_t r = take(next + HEAD_NORMS_PHASE); r < R; r = take(next + HEAD_NORMS_PHASE)) {
      float *const row = s->qkv + r * qkv_width(d);
      if (l->q_norm) NAME(normalise_row)(d, row, keys - s->qkv, l->q_norm);
      if (l->k_norm) NAME(normalise_row)(d, row + (keys - s->qkv), kv_width, l->k_norm);
    }
    meet(s->team);
  }
  NAME(attend)(s, l, own + scores_at(d), own + queries_at(d), own + tile_at(d), next + ATTEND_PHASE);
  meet(s->team);
  NAME(project_out)(s, l, own, next);
}

#include "experts.h"
#include "mixers.h"

/* Whether what the feed-forward of a layer returns is added by its last product. */
static inline int adds_directly(const decoder *d, const decoder_layer *l) {
  return !l->mlp_out_norm && d->residual_scale == 1 && !d->is_parallel && !l->num_taps;
}

/* The activation of R rows of N numbers in place. */
INLINE void NAME(activate_rows)(const decoder *d, float *x, int64_t R, int64_t N, int64_t *next) {
  for (int64_t r = take(next); r < R; r = take(next))
    for (int64_t i = 0; i < N; i += LANES) {
      float *const at = x + r * N + i;
      NAME(store_some)(at, NAME(activate)(d, NAME(load_some)(at, N - i)), N - i);
    }
}

/* The feed-forward of one layer, from `x` to `x` or `branch`. */
INLINE void NAME(feed_forward)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size, N = l->gate.rows;
  const int is_added = adds_directly(d, l);
  const part gate = {&l->gate, l->gate_bias, s->activated, N}, up = {&l->up, l->up_bias, NULL, N};
  const part down = {&l->down, l->down_bias, is_added ? s->x : s->branch, D};
  NAME(pack_rows)(d, &l->gate, s->x, R, l->post_norm, own + normed_at(d), own);
  if (l->up.data) {
    NAME(gated)(d, &gate, &up, own, R, s->activated, next + GATE_PHASE);
  } else {
    NAME(multiply_parts)(&(rows){own, R, D, N, 0, (int)d->type, 0}, &gate, 1, next + GATE_PHASE);
    meet(s->team);
    NAME(activate_rows)(d, s->activated, R, N, next + ACTIVATE_PHASE);
  }
  meet(s->team);
  NAME(pack_groups)(&l->down, s->activated, R, NULL, 0, own);
  NAME(multiply_parts)(&(rows){own, R, N, D, is_added, (int)d->type, 0}, &down, 1, next + DOWN_PHASE);
  meet(s->team);
}

/* The inputs of all layers of each node, from its embedding and those of their own (Gemma 3n and 4). */
INLINE void NAME(per_layer_inputs)(const decoding *s, float *own) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, P = d->per_layer_size, N = d->per_layer_in.rows, type = d->type;
  float embedded[MOST_LAYER_INPUTS];
  NAME(pack_groups)(&d->per_layer_in, s->x, R, NULL, 0, own);
  const part in = {&d->per_layer_in, NULL, s->per_layer, N};
  NAME(multiply_parts)(&(rows){own, R, d->hidden_size, N, 0, (int)type, 0}, &in, 1, s->next + LAYER_INPUTS_PHASE);
  meet(s->team);
  int64_t *const next = s->next + COMBINE_INPUTS_PHASE;
  for (int64_t task = take(next), P_bytes = P * float_bytes(type); task < R * (N / P); task = take(next)) {
    const int64_t r = task / (N / P), at = d->tokens[r] * (N / P) + task % (N / P);
    float *const x = s->per_layer + task * P;
    widen((const char *)d->per_layer_embeddings.data + at * P_bytes, type, P, embedded);
    for (int64_t i = 0; i < P; i++) x[i] = round1(x[i] * d->per_layer_in_scale, type);
    NAME(normalise_row)(d, x, P, d->per_layer_norm);
    for (int64_t i = 0; i < P; i++) {
      const float sum = round1(x[i] + round1(embedded[i] * d->per_layer_embed_scale, type), type);
      x[i] = round1(sum * d->per_layer_scale, type);
    }
  }
  meet(s->team);
}

/* What the per-layer inputs add, from `x` to `x`: their product with a gate of x. */
INLINE void NAME(add_per_layer)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size, P = d->per_layer_size, N = d->per_layer_in.rows;
  const int type = (int)d->type;
  NAME(pack_groups)(&l->per_layer_gate, s->x, R, NULL, 0, own);
  const part gate = {&l->per_layer_gate, NULL, s->activated, P}, out = {&l->per_layer_out, NULL, s->branch, D};
  NAME(multiply_parts)(&(rows){own, R, D, P, 0, type, 0}, &gate, 1, next + INPUT_GATE_PHASE);
  meet(s->team);
  for (int64_t r = take(next + INPUT_PRODUCT_PHASE); r < R; r = take(next + INPUT_PRODUCT_PHASE))
    for (int64_t i = 0; i < P; i += LANES) {
      const VEC g = NAME(activate)(d, NAME(load_some)(s->activated + r * P + i, P - i));
      const VEC v = NAME(round)(g * NAME(load_some)(s->per_layer + r * N + l->number * P + i, P - i), type);
      NAME(store_some)(s->activated + r * P + i, v, P - i);
    }
  meet(s->team);
  NAME(pack_groups)(&l->per_layer_out, s->activated, R, NULL, 0, own);
  NAME(multiply_parts)(&(rows){own, R, P, D, 0, type, 0}, &out, 1, next + INPUT_OUT_PHASE);
  meet(s->team);
  NAME(add_branch)(s, l->per_layer_norm, l->output_scale, next + ADD_INPUT_PHASE);
}

/* One layer, from `x` to `x`. */
INLINE void NAME(layer)(const decoding *all, const decoder_layer *l, float *own, int64_t *next) {
  const decoder sizes = sizes_of(all->d, l), *const d = &sizes;
  decoding with_sizes = *all;
  const decoding *const s = &with_sizes;
  with_sizes.d = d;
  if (d->is_parallel) NAME(feed_forward)(s, l, own, next);
  if (l->conv)
    NAME(mixer)(s, l, own, next);
  else
    NAME(self_attention)(s, l, own, next);
  if (!l->gate.data) return;
  if (l->router.data)
    NAME(experts)(s, l, own, next + LAYER_PHASES);
  else if (!d->is_parallel)
    NAME(feed_forward)(s, l, own, next);
  const float *const scale = d->per_layer_size ? NULL : l->output_scale;
  if (!adds_directly(d, l)) NAME(add_branch)(s, l->mlp_out_norm, scale, next + ADD_MLP_PHASE);
  if (d->per_layer_size) NAME(add_per_layer)(s, l, own, next);
}

/* Work of one thread. */
__attribute__((target(ISA))) static void NAME(decode)(void *data) {
  decoding *s = data;
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size, thread = join(s->team);
  float *const own = s->own + thread * thread_floats(d);
  if (d->per_layer_size) NAME(per_layer_inputs)(s, own);
  for (int64_t i = 0; i < d->num_layers; i++) {
    const decoder_layer *l = d->layers + i;
    NAME(layer)(s, l, own, s->next + DECODER_PHASES + layer_phases(d) * i);
    if (l->hidden && thread == 0) memcpy(l->hidden, s->x, (size_t)(R * D) * sizeof(float));
  }
  const part head = {&d->lm_head, d->lm_head_bias, d->logits, d->vocab_size};
  const rows x = {own, R, D, d->vocab_size, 0, (int)d->type, d->type != FLOAT32};
  NAME(pack_rows)(d, &d->lm_head, s->x, R, d->final_norm, own + normed_at(d), own);
  NAME(multiply_parts)(&x, &head, 1, s->next + LOGITS_PHASE);
  if (d->normed && thread == 0)
    for (int64_t r = 0; r < R; r++) {
      memcpy(d->normed + r * D, s->x + r * D, (size_t)D * sizeof(float));
      NAME(normalise_row)(d, d->normed + r * D, D, d->final_norm);
    }
}
