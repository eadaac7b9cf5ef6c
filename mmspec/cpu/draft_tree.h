/* How a tree of draft.h grows, level by level: on the host, by one thread. */

/* The likeliest of n candidates that have no place; of equals the first. */
static int64_t likeliest(const float *path, const int64_t *place, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; i++)
    if (place[i] < 0 && (best < 0 || path[i] > path[best])) best = i;
  return best;
}

/* Add the children of one row's nodes to its candidates. */
static void add_candidates(drafting *g, int64_t level, int64_t b) {
  const draft *h = g->h;
  const int64_t W = h->d.nodes, C = max_candidates(h), first = b * C + g->num_candidates;
  for (int64_t c = 0; c < (level ? W * W : W); c++) {
    const int64_t node = b * W + c / W, child = level ? node * W + c % W : b * W + c;
    g->path[first + c] = (level ? g->node_path[node] : 0) + g->child_log_prob[child] - h->level_penalty;
    g->token[first + c] = g->child[child];
    if (h->pair_size) g->token[first + c] = h->candidates[(b * h->levels + level) * h->pair_size + g->child[child]];
    g->parent[first + c] = level ? g->nodes[node] : -1;
  }
}

/* Of the candidates of this level the likeliest W are the nodes of the next: their inputs, positions and masks. */
static void choose_nodes(drafting *g, int64_t level, int64_t b) {
  const draft *h = g->h;
  const int64_t W = h->d.nodes, D = h->d.hidden_size, E = h->input_size, C = max_candidates(h);
  const int64_t old = level * W, step = has_correction(h) ? D : 2 * E, count = level ? W * W : W; /* old: drafted positions */
  const float *const path = g->path + b * C + g->num_candidates;
  for (int64_t c = 0; c < count; c++) g->place[c] = -1;
  for (int64_t i = 0; i < W; i++) {
    const int64_t c = likeliest(path, g->place, count), r = b * W + i, parent = b * W + c / W;
    const int64_t token = g->token[b * C + g->num_candidates + c];
    float *const input = g->inputs + r * step;
    g->place[c] = i;
    g->nodes[r] = g->num_candidates + c;
    g->node_path[r] = path[c];
    if (h->pair_size) { /* the place of the node among the candidates is all that its children depend on */
      g->ids[r] = g->child[level ? parent * W + c % W : b * W + c];
      continue;
    }
    g->ids[r] = h->ids ? h->ids[token] : token;
    embed(h, g->ids[r], input);
    const int64_t S = h->gru_state.cols;
    memcpy(g->parents + r * S, g->states + (level ? parent : b) * S, (size_t)S * sizeof(float));
    if (has_correction(h)) continue;
    const float *const output = level ? g->s.x + parent * D : h->root + b * D;
    memcpy(input + E, h->carry.data ? g->carried + (level ? parent : b) * E : output, (size_t)E * sizeof(float));
    g->s.positions[r] = h->positions[b] + (h->d.hides_nodes ? 0 : level);
    if (h->d.hides_nodes) continue;
    uint8_t *const mask = g->mask + r * (old + W);
    if (level) memcpy(mask, g->old_mask + parent * old, (size_t)old);
    for (int64_t j = 0; j < W; j++) mask[old + j] = i == j;
  }
}

/* After the children of one level are known: the nodes of the next. */
static void next_level(drafting *g, int64_t level) {
  const int64_t W = g->h->d.nodes;
  for (int64_t b = 0; b < g->h->d.batch; b++) {
    add_candidates(g, level, b);
    if (level + 1 < g->h->levels) choose_nodes(g, level, b);
    if (level && !g->d.hides_nodes) g->lengths[b] += W;
  }
  g->num_candidates += level ? W * W : W;
  if (g->d.hides_nodes) {
    g->d.nodes = W;
    return;
  }
  uint8_t *const mask = g->mask;
  g->d.ancestors = mask, g->d.span = W * (level + 1);
  g->mask = g->old_mask, g->old_mask = mask;
}

/* The tree of one row: its likeliest candidates, likeliest first; a parent is likelier than its children. */
static void finish_tree(const drafting *g, int64_t b) {
  const draft *h = g->h;
  const int64_t C = max_candidates(h), N = tree_size(h);
  int64_t *const tokens = h->tree_tokens + b * N, *const parents = h->tree_parents + b * N;
  for (int64_t c = 0; c < C; c++) g->place[c] = -1;
  tokens[0] = 0, parents[0] = -1, h->tree_scores[b * N] = 1, h->tree_mask[b * N] = 1;
  for (int64_t n = 1; n < N; n++) {
    const int64_t c = likeliest(g->path + b * C, g->place, C), token = g->token[b * C + c];
    const int64_t parent = g->parent[b * C + c];
    g->place[c] = n;
    tokens[n] = h->ids ? h->ids[token] : token;
    parents[n] = parent < 0 || g->place[parent] < 0 ? 0 : g->place[parent];
    h->tree_mask[b * N + n] = g->path[b * C + c] > -INFINITY;
    h->tree_scores[b * N + n] = expf(g->path[b * C + c]);
  }
}
