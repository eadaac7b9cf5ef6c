/* What each thread does in the functions of draft heads; included after dspark.h. */

/* A forward over committed tokens. */
__attribute__((target(ISA))) static void NAME(head_forward)(void *data) {
  drafting *g = data;
  const draft *h = g->h;
  const int64_t thread = join(&g->team), N = h->d.nodes, D = h->d.hidden_size;
  float *const own = g->s.own + thread * draft_thread_floats(h);
  const part fuse = {&h->fuse, h->fuse_bias, g->inputs + D, D};
  if (is_eagle3(h)) NAME(project)(g, h->states, h->d.batch * N, NULL, &fuse, 2 * D, 0, own, g->s.next + FUSE_PHASE);
  NAME(head_layer)(g, 0, own, g->s.next);
  for (int64_t b = 0; thread == 0 && b < h->d.batch; b++)
    if (h->counts[b])
      memcpy(h->root + b * D, g->s.x + (b * N + h->counts[b] - 1) * D, (size_t)D * sizeof(float));
}

/* A forward of a DSpark head over committed tokens: their keys and values in every layer. */
__attribute__((target(ISA))) static void NAME(dspark_forward)(void *data) {
  drafting *g = data;
  const draft *h = g->h;
  const decoder *d = &g->d;
  const int64_t thread = join(&g->team), R = d->batch * d->nodes, D = d->hidden_size;
  const int64_t kv_width = d->num_kv_heads * d->head_dim, tasks = d->batch * d->num_kv_heads;
  float *const own = g->s.own + thread * draft_thread_floats(h), *const keys = g->s.qkv + d->num_heads * d->head_dim;
  if (h->mixture) NAME(mix_states)(g, g->s.next + MIX_STATES_PHASE);
  const part fuse = {&h->fuse, h->fuse_bias, g->s.x, D};
  NAME(project)(g, h->mixture ? g->inputs : h->states, R, NULL, &fuse, D, 0, own, g->s.next + FUSE_PHASE);
  NAME(pack_rows)(d, &d->layers->k, g->s.x, R, h->hidden_norm, draft_normed(h, own), own); /* once for all layers */
  for (int64_t b = 0; thread == 0 && b < d->batch; b++) {
    float *const root = h->root + b * D;
    if (!h->counts[b]) continue;
    memcpy(root, g->s.x + (b * d->nodes + h->counts[b] - 1) * D, (size_t)D * sizeof(float));
    NAME(normalise_row)(d, root, D, h->hidden_norm);
  }
  for (int64_t i = 0; i < d->num_layers; i++) {
    const decoder_layer *l = d->layers + i;
    int64_t *const next = g->s.next + LEVEL_PHASES + layer_phases(d) * i;
    const part kv[] = {{&l->k, l->k_bias, keys, kv_width}, {&l->v, l->v_bias, keys + kv_width, kv_width}};
    NAME(multiply_parts)(&(rows){own, R, D, qkv_width(d), 0, (int)d->type, 0}, kv, 2, next + QKV_PHASE);
    meet(g->s.team);
    for (int64_t task = take(next + ATTEND_PHASE); task < tasks; task = take(next + ATTEND_PHASE))
      NAME(store)(&g->s, l, task / d->num_kv_heads, task % d->num_kv_heads);
    meet(g->s.team);
  }
}

/* A tree, or the block of one alone. */
__attribute__((target(ISA))) static void NAME(draft_tree)(void *data) {
  drafting *g = data;
  const draft *h = g->h;
  const int64_t thread = join(&g->team);
  float *const own = g->s.own + thread * draft_thread_floats(h);
  if (is_dspark(h) && !h->pair_size) NAME(dspark_block)(g, thread, own, g->s.next + level_phases(h) * h->levels);
  for (int64_t level = 0; level < h->levels; level++) {
    int64_t *const next = g->s.next + level_phases(h) * level;
    if (!has_correction(h) && !h->pair_size) NAME(layer_logits)(g, level, own, next);
    if (h->block_ffn_size && !level) NAME(block_features)(g, thread, own, next);
    if (has_correction(h)) NAME(corrections)(g, level, thread, own, next);
    NAME(best_children)(g, level, next + CHILDREN_PHASE);
    meet(g->s.team);
    if (thread == 0) next_level(g, level);
    meet(g->s.team);
  }
  for (int64_t b = 0; h->levels && thread == 0 && b < h->d.batch; b++) finish_tree(g, b);
}
