/* DSpark heads of few_rows.c; included after draft.h.

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

/* The features of the positions of a block, to `x`, and their logits, to `base`. */
INLINE void NAME(dspark_block)(const drafting *g, int64_t thread, float *own, int64_t *next) {
  const draft *h = g->h;
  const int64_t R = h->d.batch * h->block_positions, D = h->d.hidden_size, L = h->d.num_layers;
  const part head = {&h->d.lm_head, h->d.lm_head_bias, g->base, h->d.vocab_size};
  for (int64_t i = 0; i < L; i++) NAME(layer)(&g->s, g->d.layers + i, own, next + layer_phases(&g->d) * i);
  for (int64_t r = 0; thread == 0 && r < R; r++) NAME(normalise_row)(&g->d, g->s.x + r * D, D, h->d.final_norm);
  meet(g->s.team);
  NAME(project)(g, g->s.x, R, NULL, &head, head.N, 0, own, next + layer_phases(&g->d) * L);
}
