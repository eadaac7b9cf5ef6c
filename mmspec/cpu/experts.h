/* The feed-forward of a decoder layer that is divided among experts, for one instruction set; included by decoder.h.

   The softmax or sigmoid of a router's logits chooses `experts_per_token` experts for each node: its slots. What the
   experts return for a node is multiplied by their shares and added, with what one returns that all nodes share, if there
   is one. Each expert is multiplied with all nodes that chose it at once; a number of the result depends on its own node
   alone, bit for bit. */

/* The experts of node r and their shares, from its logits, which are overwritten. */
INLINE void NAME(choose)(const decoding *s, const decoder_layer *l, int64_t r) {
  const decoder *d = s->d;
  const int64_t E = d->num_experts, count = d->experts_per_token;
  float *const p = s->routing + r * (E + 1), *const shares = s->shares + r * count;
  int64_t *const chosen = s->chosen + r * count;
  const float *const bias = l->router_bias;
  float largest = -FLT_MAX, total = 0, chosen_total = 0;
  for (int64_t e = 0; e < E; e++)
    if (p[e] > largest) largest = p[e];
  for (int64_t e = 0; e < E; e += LANES) {
    const VEC logits = NAME(load_some)(p + e, E - e);
    NAME(store_some)(p + e, d->is_sigmoid ? NAME(sigmoid)(logits) : NAME(exp)(logits - SET1(largest)), E - e);
  }
  for (int64_t e = 0; e < E; e++) total += p[e];
  if (d->is_sigmoid) total = 1;
  for (int64_t e = 0; e < E; e++) p[e] /= total;
  for (int64_t i = 0; i < count; i++) {
    int64_t best = -1;
    for (int64_t e = 0; e < E; e++) /* -1: chosen before; each is chosen once, also if all are NaN */
      if (p[e] != -1 && (best < 0 || p[e] + (bias ? bias[e] : 0) > p[best] + (bias ? bias[best] : 0))) best = e;
    chosen[i] = best, shares[i] = p[best], p[best] = -1, chosen_total += shares[i];
  }
  for (int64_t i = 0; i < count; i++) {
    if (d->normalises_shares) shares[i] /= chosen_total;
    shares[i] *= d->share_scale;
    if (d->rounds_shares) shares[i] = round1(shares[i], d->type);
  }
  if (d->adds_in_type) sort_slots_of_node(chosen, shares, count);
}

/* What the experts return for node r, added to the residual, or `branch` where a norm follows. */
INLINE void NAME(add_experts)(const decoding *s, const decoder_layer *l, int64_t r) {
  const decoder *d = s->d;
  const int64_t D = d->hidden_size, count = d->experts_per_token;
  const int64_t product = d->rounds_shares || d->adds_in_type ? d->type : FLOAT32, sum = d->adds_in_type ? d->type : FLOAT32;
  const VEC gate = NAME(round)(NAME(sigmoid)(SET1(s->routing[r * (d->num_experts + 1) + d->num_experts])), d->type);
  float *const to = (l->mlp_out_norm ? s->branch : s->x) + r * D;
  for (int64_t k = 0; k < D; k += LANES) {
    VEC v = ZERO();
    for (int64_t i = r * count; i < (r + 1) * count; i++) {
      const VEC one = NAME(load_some)(s->returned + s->places[i] * D + k, D - k) * SET1(s->shares[i]);
      v = NAME(round)(v + NAME(round)(one, product), sum);
    }
    v = NAME(round)(v, d->type);
    if (l->shared_gate.data) {
      VEC shared = NAME(load_some)(s->returned + (d->batch * d->nodes * count + r) * D + k, D - k);
      if (l->shared_router.data) shared = NAME(round)(shared * gate, d->type);
      v = NAME(round)(v + shared, d->type);
    }
    if (!l->mlp_out_norm) v = NAME(round)(NAME(load_some)(to + k, D - k) + v, d->type);
    NAME(store_some)(to + k, v, D - k);
  }
}

/* The expert of one layer that all nodes share, from `branch` to the end of `returned`. */
INLINE void NAME(shared_expert)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size, N = l->shared_gate.rows;
  const part gate = {&l->shared_gate, NULL, NULL, N}, up = {&l->shared_up, NULL, NULL, N};
  const part down = {&l->shared_down, NULL, s->returned + R * d->experts_per_token * D, D};
  NAME(pack_groups)(&l->shared_gate, s->branch, R, NULL, 0, own);
  NAME(gated)(d, &gate, &up, own, R, s->activated, next + SHARED_GATE_PHASE);
  meet(s->team);
  NAME(pack_groups)(&l->shared_down, s->activated, R, NULL, 0, own);
  NAME(multiply_parts)(&(rows){own, R, N, D, 0, (int)d->type, 0}, &down, 1, next + SHARED_DOWN_PHASE);
  meet(s->team);
}

/* The experts of one layer, from `x` to `x` or `branch`. */
INLINE void NAME(experts)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size, E = d->num_experts, N = d->expert_size;
  const int type = (int)d->type;
  const part routers[] = {{&l->router, NULL, s->routing, E},
                          {&l->shared_router, NULL, s->routing + E, l->shared_router.rows}};
  float *const gathered = own + normed_at(d);
  for (int64_t r = take(next + EXPERT_NORM_PHASE); r < R; r = take(next + EXPERT_NORM_PHASE)) {
    memcpy(s->branch + r * D, s->x + r * D, (size_t)D * sizeof(float));
    NAME(normalise_row)(d, s->branch + r * D, D, l->post_norm);
  }
  meet(s->team);
  NAME(pack_groups)(&l->router, s->branch, R, NULL, 0, own);
  NAME(multiply_parts)(&(rows){own, R, D, E + 1, 0, d->rounds_routing ? type : FLOAT32, 0}, routers, 2, next + ROUTER_PHASE);
  meet(s->team);
  for (int64_t r = take(next + CHOOSE_PHASE); r < R; r = take(next + CHOOSE_PHASE)) {
    NAME(choose)(s, l, r);
    if (__atomic_add_fetch(next + CHOSEN_PHASE, 1, __ATOMIC_ACQ_REL) == R) sort_slots(s);
  }
  meet(s->team);
  for (int64_t e = 0; e < E; e++) {
    const int64_t first = s->starts[e], count = s->starts[e + 1] - first;
    int64_t *const taken = next + EXPERT_PHASES + e;
    if (!count || __atomic_load_n(taken, __ATOMIC_RELAXED) >= num_chunks(&l->gate, N)) continue;
    const weights gate = matrix_at(&l->gate, 2 * e, N), up = matrix_at(&l->gate, 2 * e + 1, N);
    for (int64_t i = 0; i < count; i++)
      memcpy(gathered + i * D, s->branch + s->slots[first + i] / d->experts_per_token * D, (size_t)D * sizeof(float));
    NAME(pack_groups)(&gate, gathered, count, NULL, 0, own);
    NAME(gated)(d, &(part){&gate, NULL, NULL, N}, &(part){&up, NULL, NULL, N}, own, count, s->activated + first * N, taken);
  }
  meet(s->team);
  for (int64_t e = 0; e < E; e++) {
    const int64_t first = s->starts[e], count = s->starts[e + 1] - first;
    int64_t *const taken = next + EXPERT_PHASES + E + e;
    if (!count || __atomic_load_n(taken, __ATOMIC_RELAXED) >= num_chunks(&l->down, D)) continue;
    const weights down = matrix_at(&l->down, e, D);
    NAME(pack_groups)(&down, s->activated + first * N, count, NULL, 0, own);
    NAME(multiply_parts)(&(rows){own, count, N, D, 0, type, 0}, &(part){&down, NULL, s->returned + first * D, D}, 1, taken);
  }
  meet(s->team);
  if (l->shared_gate.data) NAME(shared_expert)(s, l, own, next);
  for (int64_t r = take(next + ADD_EXPERTS_PHASE); r < R; r = take(next + ADD_EXPERTS_PHASE)) NAME(add_experts)(s, l, r);
  meet(s->team);
}
