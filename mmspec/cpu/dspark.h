/* DSpark heads of few_rows.c, and what extends DFlash; included after draft.h.

   The layers run over a block of positions alone. Committed tokens only add keys and values, which every layer projects
   from the same fused states of the target. */

/* The states [S, D] of each committed token, added with the weights of the mixture, to `inputs` [batch, nodes, D]. */
INLINE void NAME(mix_states)(const drafting *g, int64_t *next) {
  const draft *h = g->h;
  const int64_t R = h->d.batch * h->d.nodes, D = h->d.hidden_size, S = h->state_size / D;
  for (int64_t row = take(next); row < R; row = take(next))
    for (int64_t i = 0; i < D; i += LANES) {
      const int64_t n = min64(LANES, D - i);
      VEC sum = ZERO();
      for (int64_t s = 0; s < S; s++)
        sum += NAME(round)(SET1(h->mixture[s]) * NAME(load_some)(h->states + (row * S + s) * D + i, n), h->d.type);
      NAME(store_some)(g->inputs + row * D + i, NAME(round)(sum, h->d.type), n);
    }
  meet(g->s.team);
}

/* Rows x [R, D] of blocks, each mixed with those before it in its block, to `to` [R, D], or added to it: the sum of their
   products with taps [num_taps, D], of which each group of columns has a number of `changes` [R, step] added. */
INLINE void NAME(mix_neighbours)(const drafting *g, int64_t num_taps, const float *x, const float *taps, const float *changes,
                                 int64_t step, int is_added, float *to, int64_t *next) {
  const int64_t R = g->d.batch * g->d.nodes, D = g->d.hidden_size, groups = step / (2 * num_taps), size = D / groups;
  const int64_t type = g->d.type;
  for (int64_t r = take(next); r < R; r = take(next)) {
    const int64_t count = min64(num_taps, r % g->d.nodes + 1);
    for (int64_t group = 0; group < groups; group++)
      for (int64_t i = group * size; i < (group + 1) * size; i += LANES) {
        const int64_t n = (group + 1) * size - i, at = r * D + i;
        VEC sum = ZERO();
        for (int64_t t = 0; t < count; t++) {
          const VEC change = SET1(changes[r * step + t * groups + group]);
          const VEC tap = NAME(round)(NAME(load_some)(taps + t * D + i, n) + change, type);
          sum = NAME(round)(sum + NAME(round)(tap * NAME(load_some)(x + at - t * D, n), type), type);
        }
        if (is_added) sum = NAME(round)(sum + NAME(load_some)(to + at, n), type);
        NAME(store_some)(to + at, sum, n);
      }
  }
  meet(g->s.team);
}

/* One layer of a block, from `x` to `x`. With taps (DFlash 2) its attention and its feed-forward each read normalised rows
   that are mixed with those before them, and so is what they return. */
INLINE void NAME(block_layer)(const drafting *g, const decoder_layer *l, float *own, int64_t *next) {
  const int64_t R = g->d.batch * g->d.nodes, D = g->d.hidden_size, T = l->num_taps;
  decoder_layer bare = *l;
  decoding inner = g->s;
  if (!T) {
    NAME(layer)(&g->s, l, own, next);
    return;
  }
  bare.input_norm = bare.post_norm = NULL, inner.x = g->tapped;
  for (int is_mlp = 0; is_mlp < 2; is_mlp++) {
    int64_t *const tapped = next + is_mlp * (TAP_PHASES_END - TAP_NORM_PHASE);
    const weights *const w = is_mlp ? &l->mlp_changes : &l->attention_changes;
    const float *const taps = is_mlp ? l->mlp_taps : l->attention_taps;
    const part changes = {w, NULL, g->changes, w->rows};
    for (int64_t r = take(tapped + TAP_NORM_PHASE); r < R; r = take(tapped + TAP_NORM_PHASE)) {
      memcpy(g->normed + r * D, g->s.x + r * D, (size_t)D * sizeof(float));
      NAME(normalise_row)(&g->d, g->normed + r * D, D, is_mlp ? l->post_norm : l->input_norm);
    }
    meet(g->s.team);
    NAME(project)(g, g->normed, R, NULL, &changes, w->rows, 0, own, tapped + TAP_CHANGES_PHASE);
    NAME(mix_neighbours)(g, T, g->normed, taps, g->changes, w->rows, 0, g->tapped, tapped + MIX_BEFORE_PHASE);
    if (is_mlp)
      NAME(feed_forward)(&inner, &bare, own, next);
    else
      NAME(self_attention)(&inner, &bare, own, next);
    int64_t *const taken = tapped + MIX_BEHIND_PHASE;
    NAME(mix_neighbours)(g, T, g->s.branch, taps + T * D, g->changes + w->rows / 2, w->rows, 1, g->s.x, taken);
  }
}

/* The features of the positions of a block, to `x`, and their logits, to `base`. */
INLINE void NAME(dspark_block)(const drafting *g, int64_t thread, float *own, int64_t *next) {
  const draft *h = g->h;
  const int64_t R = h->d.batch * h->block_positions, D = h->d.hidden_size, L = h->d.num_layers, V = h->d.vocab_size;
  const part head = {&h->d.lm_head, h->d.lm_head_bias, g->base, V};
  for (int64_t i = 0; i < L; i++) NAME(block_layer)(g, g->d.layers + i, own, next + LEVEL_PHASES + layer_phases(&g->d) * i);
  for (int64_t r = 0; thread == 0 && r < R; r++) NAME(normalise_row)(&g->d, g->s.x + r * D, D, h->d.final_norm);
  meet(g->s.team);
  NAME(project)(g, g->s.x, R, NULL, &head, head.N, 0, own, next + BASE_PHASE);
  if (!h->block_logits || (h->logit_scale == 1 && !h->logit_softcap)) return; /* for a tree they are completed later */
  for (int64_t r = take(next + SCALE_LOGITS_PHASE); r < R; r = take(next + SCALE_LOGITS_PHASE))
    for (int64_t v = 0; v < V; v += LANES) {
      float *const at = g->base + r * V + v;
      NAME(store_some)(at, NAME(scaled_logits)(h, NAME(load_some)(at, V - v)), V - v);
    }
}
