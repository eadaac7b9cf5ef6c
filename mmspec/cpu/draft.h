/* Draft heads of few_rows.c; included after decoder.h. */

INLINE VEC NAME(silu)(VEC x) { return x / (SET1(1.0f) + NAME(exp)(-x)); }

/* What the LM head's products become before bias and noise. */
INLINE VEC NAME(scaled_logits)(const draft *h, VEC x) {
  const int64_t type = h->d.type;
  const VEC cap = SET1(h->logit_softcap);
  if (h->logit_scale != 1) x = NAME(round)(x * SET1(h->logit_scale), type);
  if (!h->logit_softcap) return x;
  return NAME(round)(NAME(round)(NAME(tanh)(NAME(round)(x / cap, type)), type) * cap, type);
}

/* The logits `z` of one node, completed by the block's, bias and noise; those of clusters and of pairs are complete. The W
   largest go to `top`, falling, their tokens to `token`. */
INLINE void NAME(top_logits)(const drafting *g, int64_t level, int64_t b, float *z, float *top, int64_t *token) {
  const draft *h = g->h;
  const int64_t V = num_logits(h), W = h->d.nodes;
  const float *const base = has_correction(h) ? g->base + (b * base_rows(h) + h->first_position + level) * V : NULL;
  const float *const noise = h->noise ? h->noise + (b * h->levels + level) * V : NULL;
  const VEC factor = SET1(h->noise ? 1.0f / h->temperature : 1.0f);
  for (int64_t i = 0; i < W; i++) top[i] = -INFINITY, token[i] = 0;
  for (int64_t v = 0; v < V; v += LANES) {
    const int64_t n = min64(LANES, V - v);
    VEC x = NAME(load_some)((base ? base : z) + v, n);
    if (!h->num_best && !h->pair_size) {
      x = NAME(scaled_logits)(h, x);
      if (base && is_corrected(h, level)) x += NAME(load_some)(z + v, n);
      x = (x + NAME(load_some)(h->bias + v, n)) * factor;
      if (noise) x -= NAME(load_some)(noise + v, n);
    }
    NAME(keep_largest)(x, v, n, z + v, W, top, token);
  }
}

/* The sum of the products of a [n] and b [n]. */
INLINE float NAME(dot)(const float *a, const float *b, int64_t n) {
  VEC sum[WEIGHT_ROWS] = {ZERO(), ZERO(), ZERO(), ZERO()};
  for (int64_t i = 0; i < n; i += LANES)
    sum[0] = FMA(NAME(load_some)(a + i, n - i), NAME(load_some)(b + i, n - i), sum[0]);
  return _mm_cvtss_f32(NAME(sum4)(sum));
}

/* The logarithm of the probability that a DSpark head gives to the acceptance of a position: of its feature [D] and the R
   numbers of the token before it. */
INLINE float NAME(log_confidence)(const draft *h, const float *feature, const float *token) {
  const int64_t D = h->d.hidden_size;
  const float *const w = h->confidence;
  const float sum = NAME(dot)(w, feature, D) + NAME(dot)(w + D, token, h->rank) + h->confidence_bias[0];
  const float logit = round1(sum, h->d.type);
  return fminf(logit, 0) - log1pf(expf(-fabsf(logit)));
}

/* The complete scores of the candidates of a level behind one node, to `z`. */
static void NAME(pair_scores)(const drafting *g, int64_t level, int64_t row, float *z) {
  const draft *h = g->h;
  const int64_t C = h->pair_size, at = (level ? row / h->d.nodes : row) * h->levels + level;
  const float *const scores = h->pairs + (at * C + (level ? g->ids[row] : 0)) * C;
  for (int64_t i = 0; i < C; i++) {
    const float *const noise = h->noise ? h->noise + at * h->d.vocab_size + h->candidates[at * C + i] : NULL;
    z[i] = noise ? scores[i] / h->temperature - *noise : scores[i];
  }
}

/* The best next tokens of the nodes of a level, with their log probabilities. */
INLINE void NAME(best_children)(const drafting *g, int64_t level, int64_t *next) {
  const draft *h = g->h;
  const int64_t V = num_logits(h), W = h->d.nodes, D = h->d.hidden_size, R = h->d.batch * (level ? W : 1);
  const int64_t S = h->cluster_size;
  for (int64_t row = take(next); row < R; row = take(next)) {
    float *const z = g->logits + row * V, *const log_prob = g->child_log_prob + row * W;
    int64_t *const child = g->child + row * W;
    const int64_t b = level ? row / W : row, position = b * h->block_positions + h->first_position + level;
    if (h->pair_size) NAME(pair_scores)(g, level, row, z);
    NAME(top_logits)(g, level, b, z, log_prob, child);
    for (int64_t i = 0; h->num_best && i < W; i++)
      child[i] = h->clusters[g->best[row * h->num_best + child[i] / S] * S + child[i] % S];
    const float top = log_prob[0], total = NAME(log_sum)(z, V, top);
    float shift = 0;
    /* Sampled tokens are ranked by the noise, of which the confidence knows nothing. */
    if (h->confidence && !h->noise)
      shift = fminf(0, NAME(log_confidence)(h, g->s.x + position * D, g->mixed + row * h->rank) + total);
    for (int64_t i = 0; i < W; i++) log_prob[i] = log_prob[i] - top - total + shift;
  }
}

/* out [R, N], of which a row begins `step` numbers after that before, = x w^T, x normalised first if there is `norm`. */
INLINE void NAME(project)(const drafting *g, const float *x, int64_t R, const float *norm, const part *p, int64_t step,
                          int is_added, float *own, int64_t *next) {
  NAME(pack_rows)(&g->d, p->w, x, R, norm, draft_normed(g->h, own), own);
  NAME(multiply_parts)(&(rows){own, R, p->w->cols, step, is_added, (int)g->d.type, 0}, p, 1, next);
  meet(g->s.team);
}

/* Of the inputs of an EAGLE-3 layer, or an MTP head, the embedding and the state are normalised apart. An EAGLE-3 layer adds
   to the state, which goes to `x`; the state of a node of MTP is its parent's output, which its own norm comes before. */
INLINE void NAME(normalise_inputs)(const drafting *g, int64_t *next) {
  const draft *h = g->h;
  const int64_t R = h->d.batch * h->d.nodes, D = h->d.hidden_size;
  for (int64_t row = take(next); row < R; row = take(next)) {
    float *const embedding = g->inputs + row * 2 * D, *const state = embedding + D, *const x = g->s.x + row * D;
    memcpy(x, state, (size_t)D * sizeof(float));
    NAME(normalise_row)(&g->d, embedding, D, is_mtp(h) ? h->embedding_norm : g->d.layers->input_norm);
    if (is_mtp(h) && h->levels) NAME(normalise_row)(&g->d, state, D, h->d.final_norm);
    NAME(normalise_row)(&g->d, state, D, h->hidden_norm);
    if (h->adds_normed_state) memcpy(x, state, (size_t)D * sizeof(float));
  }
  meet(g->s.team);
}

/* The layers of the head, from `inputs` to `x`, which the root of an assistant has there. */
INLINE void NAME(head_layer)(const drafting *g, int is_root, float *own, int64_t *next) {
  const draft *h = g->h;
  const int64_t R = g->d.batch * g->d.nodes, D = h->d.hidden_size;
  const part fuse = {&h->fuse, h->fuse_bias, g->s.x, D};
  if (h->hidden_norm) NAME(normalise_inputs)(g, next + INPUT_NORM_PHASE);
  if (!is_eagle3(h) && !is_root) NAME(project)(g, g->inputs, R, NULL, &fuse, D, 0, own, next + FUSE_PHASE);
  for (int64_t i = 0; i < g->d.num_layers; i++)
    NAME(layer)(&g->s, g->d.layers + i, own, next + LEVEL_PHASES + layer_phases(&g->d) * i);
}

/* The features of FLASH's block [batch, levels, D] from the output of the layer, their logits and their R numbers. */
INLINE void NAME(block_features)(const drafting *g, int64_t thread, float *own, int64_t *next) {
  const draft *h = g->h;
  const int64_t B = h->d.batch, L = h->levels, D = h->d.hidden_size, F = h->block_ffn_size;
  const part up = {&h->block_up, NULL, g->ffn, F}, down = {&h->block_down, NULL, g->features, L * D};
  const part head = {&h->d.lm_head, h->d.lm_head_bias, g->base, h->d.vocab_size};
  const part project = {&h->feature_proj, NULL, g->projected, h->rank};
  for (int64_t r = 0; thread == 0 && r < B * L; r++)
    memcpy(g->features + r * D, h->root + r / L * D, (size_t)D * sizeof(float));
  NAME(project)(g, h->root, B, h->block_norm, &up, F, 0, own, next + BLOCK_UP_PHASE);
  if (thread == 0)
    for (int64_t i = 0; i < B * F; i += LANES) {
      const int64_t n = min64(LANES, B * F - i);
      NAME(store_some)(g->ffn + i, NAME(round)(NAME(silu)(NAME(load_some)(g->ffn + i, n)), h->d.type), n);
    }
  meet(g->s.team);
  NAME(project)(g, g->ffn, B, NULL, &down, L * D, 1, own, next + BLOCK_DOWN_PHASE);
  NAME(project)(g, g->features, B * L, NULL, &head, head.N, 0, own, next + BASE_PHASE);
  NAME(project)(g, g->features, B * L, h->feature_norm, &project, h->rank, 0, own, next + FEATURE_PHASE);
}

/* The R numbers of the nodes of a level, to `mixed`: of their tokens and, with FLASH, of the feature of the position. */
INLINE void NAME(mix_tokens)(const drafting *g, int64_t level, int64_t R) {
  const draft *h = g->h;
  const int64_t W = h->d.nodes, K = h->rank;
  for (int64_t r = 0; r < R; r++)
    for (int64_t i = 0; i < K; i += LANES) {
      const int64_t n = min64(LANES, K - i);
      VEC y = NAME(load_some)(g->mixed + r * K + i, n);
      if (h->feature_proj.data) {
        const float *const feature = g->projected + (r / W * h->levels + level) * K + i;
        y = NAME(round)(y + NAME(load_some)(feature, n), h->d.type);
      }
      NAME(store_some)(g->mixed + r * K + i, NAME(round)(NAME(silu)(y), h->d.type), n);
    }
}

/* The states of the nodes of a level, of their tokens and the states of their parents (Domino), and beside them in `joined`
   the features of the position. */
INLINE void NAME(path_states)(const drafting *g, int64_t level, int64_t R, float *own, int64_t *next) {
  const draft *h = g->h;
  const int64_t D = h->d.hidden_size, S = h->gru_state.cols, type = h->d.type, W = level ? h->d.nodes : 1;
  float *const of_states = g->gates + h->d.batch * h->d.nodes * 3 * S;
  const part in = {&h->gru_in, NULL, g->gates, 3 * S}, state = {&h->gru_state, NULL, of_states, 3 * S};
  NAME(project)(g, g->inputs, R, NULL, &in, 3 * S, 0, own, next + GRU_IN_PHASE);
  NAME(project)(g, g->parents, R, NULL, &state, 3 * S, 0, own, next + GRU_STATE_PHASE);
  for (int64_t r = take(next + GRU_PHASE); r < R; r = take(next + GRU_PHASE)) {
    const float *const x = g->gates + r * 3 * S, *const y = of_states + r * 3 * S;
    const int64_t position = r / W * h->block_positions + h->first_position + level;
    float *const joined = g->joined + r * (D + S);
    memcpy(joined, g->s.x + position * D, (size_t)D * sizeof(float));
    for (int64_t i = 0; i < S; i += LANES) {
      const int64_t n = S - i;
      VEC gate[2];
      for (int k = 0; k < 2; k++) {
        const VEC sum = NAME(round)(NAME(load_some)(x + k * S + i, n) + NAME(load_some)(y + k * S + i, n), type);
        gate[k] = NAME(round)(NAME(sigmoid)(sum), type);
      }
      VEC v = NAME(round)(gate[0] * NAME(load_some)(y + 2 * S + i, n), type);
      v = NAME(round)(NAME(tanh)(NAME(round)(NAME(load_some)(x + 2 * S + i, n) + v, type)), type);
      const VEC kept = NAME(round)(NAME(load_some)(g->parents + r * S + i, n) - v, type);
      v = NAME(round)(v + NAME(round)(gate[1] * kept, type), type);
      NAME(store_some)(g->states + r * S + i, v, n);
      NAME(store_some)(joined + D + i, v, n);
    }
  }
  meet(g->s.team);
}

/* Corrections of the logits of a position by the tokens of the nodes, to `logits`; the only node of level 0 is the root. */
INLINE void NAME(corrections)(const drafting *g, int64_t level, int64_t thread, float *own, int64_t *next) {
  const draft *h = g->h;
  const int64_t R = h->d.batch * (level ? h->d.nodes : 1), K = h->rank;
  const part token = {&h->token_proj, NULL, g->mixed, K}, vocab = {&h->vocab_proj, NULL, g->logits, h->d.vocab_size};
  if (h->gru_in.data) NAME(path_states)(g, level, R, own, next);
  if (!is_corrected(h, level)) return;
  if (!h->token_table.data) {
    NAME(project)(g, h->gru_in.data ? g->joined : g->inputs, R, h->token_norm, &token, K, 0, own, next + TOKEN_PHASE);
    if (thread == 0) NAME(mix_tokens)(g, level, R);
  } else {
    for (int64_t r = 0; thread == 0 && r < R; r++) {
      const int64_t id = level ? g->ids[r] : h->anchors[r], row = id >= 0 && id < h->token_table.rows ? id : 0;
      widen_row(&h->token_table, row, g->mixed + r * K);
    }
  }
  meet(g->s.team);
  NAME(project)(g, g->mixed, R, NULL, &vocab, vocab.N, 0, own, next + CORRECT_PHASE);
}

/* The complete logits of R nodes for the ids of their likeliest centroids. */
INLINE void NAME(cluster_logits)(const drafting *g, int64_t level, int64_t R, float *own, int64_t *next) {
  const draft *h = g->h;
  const int64_t D = h->d.hidden_size, C = h->centroids.rows, B = h->num_best, S = h->cluster_size, V = h->d.vocab_size;
  const part centroids = {&h->centroids, NULL, g->similar, C};
  NAME(project)(g, g->s.x, R, h->d.final_norm, &centroids, C, 0, own, next + CENTROIDS_PHASE);
  for (int64_t row = take(next + NEAREST_PHASE); row < R; row = take(next + NEAREST_PHASE)) {
    float *const z = g->similar + row * C, *const top = g->nearest + row * B;
    for (int64_t i = 0; i < B; i++) top[i] = -INFINITY, g->best[row * B + i] = 0;
    for (int64_t v = 0; v < C; v += LANES) {
      const int64_t n = min64(LANES, C - v);
      NAME(keep_largest)(NAME(load_some)(z + v, n), v, n, z + v, B, top, g->best + row * B);
    }
    memcpy(g->normed + row * D, g->s.x + row * D, (size_t)D * sizeof(float));
    NAME(normalise_row)(&g->d, g->normed + row * D, D, h->d.final_norm);
  }
  meet(g->s.team);
  for (int64_t task = take(next + CLUSTERS_PHASE); task < R * B; task = take(next + CLUSTERS_PHASE)) {
    const int64_t row = task / B, b = level ? row / h->d.nodes : row, *const ids = h->clusters + g->best[task] * S;
    const float *const noise = h->noise ? h->noise + (b * h->levels + level) * V : NULL;
    for (int64_t i = 0; i < S; i++) {
      widen_row(&h->d.lm_head, ids[i], own);
      const float z = round1(NAME(dot)(g->normed + row * D, own, D), h->d.type) + h->bias[ids[i]];
      g->logits[task * S + i] = noise ? z / h->temperature - noise[ids[i]] : z;
    }
  }
  meet(g->s.team);
}

/* The logits of a level from a forward of the layer over its nodes; the root's was before, but for assistants. */
INLINE void NAME(layer_logits)(const drafting *g, int64_t level, float *own, int64_t *next) {
  const draft *h = g->h;
  const int64_t R = h->d.batch * (level ? h->d.nodes : 1);
  const part head = {&h->d.lm_head, h->d.lm_head_bias, g->logits, h->d.vocab_size};
  const part carry = {&h->carry, NULL, g->carried, h->input_size};
  if (level || h->d.hides_nodes) NAME(head_layer)(g, !level, own, next);
  const float *const outputs = level || h->d.hides_nodes ? g->s.x : h->root;
  if (h->num_best)
    NAME(cluster_logits)(g, level, R, own, next);
  else
    NAME(project)(g, outputs, R, h->d.final_norm, &head, head.N, 0, own, next + LM_HEAD_PHASE);
  if (h->carry.data) NAME(project)(g, outputs, R, h->d.final_norm, &carry, carry.N, 0, own, next + CARRY_PHASE);
}
