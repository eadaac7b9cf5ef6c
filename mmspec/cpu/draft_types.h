/* A draft head of one decoder layer: a forward over committed tokens, and a tree that is grown level by level.

   The distributions of a level come from a forward of the layer over its nodes (EAGLE), or, for heads that predict a block
   of positions at once (FLASH), from the logits of the level's position and a correction by the token before. */

typedef struct {
  decoder d; /* the layer and what is around it; `nodes`: tokens of a forward, or nodes of a level, W */
  const float *fuse, *fuse_bias; /* [D, 2 D]: to the input of the layer, from [embedding ; hidden state] */
  const int64_t *positions;      /* [batch] rotary position of the first token of a forward, of a tree's first level */
  float *root;                   /* [batch, D] output of the layer at each row's last token */
  /* a forward over committed tokens: sets `root` */
  const float *states;   /* [batch, nodes, D] hidden state before each token */
  const int64_t *counts; /* [batch] valid tokens of a row; `root` stays as it is where there is none */
  /* a tree: reads `root` */
  int64_t levels, max_nodes;
  const float *bias;     /* [V], added to the logits */
  const float *noise;    /* [batch, levels, V], subtracted from the logits divided by `temperature`; or NULL */
  const int64_t *ids;    /* [V] target ids of the draft vocabulary; NULL if it is the target's */
  float temperature, level_penalty;
  /* a block head, R: its rank; NULL and 0 for heads that run the layer for each level */
  int64_t block_ffn_size, rank;
  const float *block_norm, *block_up, *block_down;               /* [D], [F, D], [k D, F] */
  const float *feature_norm, *feature_proj, *token_norm, *token_proj, *vocab_proj; /* [D], [R, D], [D], [R, D], [V, R] */
  /* results, [batch, tree_size]; node 0 is the root */
  int64_t *tree_tokens, *tree_parents;
  float *tree_scores;
  uint8_t *tree_mask;
} draft;

/* What the threads of one call share. A candidate is a possible node of the tree, in the order of its level. */
typedef struct {
  decoding s;
  decoder d; /* as in `draft`, with the lengths and the mask of the level */
  const draft *h;
  int64_t *lengths, *nodes;                          /* [batch]; [batch, W] candidate that each node is */
  int64_t *token, *parent, *place;                   /* [batch, C] candidates; [C] node of the tree, or -1 */
  int64_t *child;                                    /* [batch, W, W] best next tokens of the nodes */
  float *child_log_prob, *path, *node_path;          /* [batch, W, W]; [batch, C]; [batch, W]: log probabilities */
  float *inputs, *logits;                            /* [batch, W, 2 D]; [batch, W, V] */
  float *ffn, *features, *base, *projected, *mixed;  /* block heads: [batch, F]; [batch, levels, D or V or R]; [batch, W, R] */
  uint8_t *mask, *old_mask;
  int64_t num_candidates; /* per row, so far */
} drafting;

#define PHASES 8 /* of one level */

static inline int64_t max_candidates(const draft *h) {
  return h->levels ? h->d.nodes + (h->levels - 1) * h->d.nodes * h->d.nodes : 0;
}
static inline int64_t tree_size(const draft *h) { return min64(h->max_nodes, 1 + max_candidates(h)); }
static inline int is_block(const draft *h) { return h->block_up != NULL; }

/* Numbers that one thread needs for packed rows, and what `self_attention` needs behind them. */
static int64_t draft_thread_floats(const draft *h) {
  const int64_t rows = h->d.batch * max64(h->d.nodes, h->levels);
  const int64_t widest = max64(max64(widest_row(&h->d), h->block_ffn_size), h->rank);
  return align16(rows * (widest + MAX_LANES)) + thread_floats(&h->d);
}

static int64_t *take_ints(float **scratch, int64_t n) { return (int64_t *)take_floats(scratch, 2 * n); }

/* Divide the scratch, and return its end; nothing is read or written. */
static float *divide_scratch(drafting *g, float *scratch) {
  const draft *h = g->h;
  const decoder *d = &h->d;
  const int64_t B = d->batch, W = d->nodes, R = B * W, D = d->hidden_size, C = max_candidates(h), L = h->levels;
  g->s.next = take_ints(&scratch, PHASES * max64(1, L));
  g->lengths = take_ints(&scratch, B);
  g->s.positions = take_ints(&scratch, R);
  g->nodes = take_ints(&scratch, R);
  g->token = take_ints(&scratch, B * C);
  g->parent = take_ints(&scratch, B * C);
  g->place = take_ints(&scratch, C);
  g->child = take_ints(&scratch, R * W);
  g->child_log_prob = take_floats(&scratch, R * W);
  g->path = take_floats(&scratch, B * C);
  g->node_path = take_floats(&scratch, R);
  g->inputs = take_floats(&scratch, R * 2 * D);
  g->logits = take_floats(&scratch, R * d->vocab_size);
  g->ffn = take_floats(&scratch, B * h->block_ffn_size);
  g->features = take_floats(&scratch, B * L * D);
  g->base = take_floats(&scratch, is_block(h) ? B * L * d->vocab_size : 0);
  g->projected = take_floats(&scratch, B * L * h->rank);
  g->mixed = take_floats(&scratch, R * h->rank);
  g->mask = (uint8_t *)take_floats(&scratch, R * W * max64(1, L));
  g->old_mask = (uint8_t *)take_floats(&scratch, R * W * max64(1, L));
  g->s.x = take_floats(&scratch, R * D);
  g->s.qkv = take_floats(&scratch, R * qkv_width(d));
  g->s.attended = take_floats(&scratch, R * d->num_heads * d->head_dim);
  g->s.activated = take_floats(&scratch, R * d->intermediate_size);
  g->s.own = scratch;
  return scratch;
}

static void begin_drafting(drafting *g, const draft *h, barrier_fn barrier) {
  *g = (drafting){.h = h, .d = h->d};
  g->s.d = &g->d, g->s.barrier = barrier;
  divide_scratch(g, h->d.scratch);
  memset(g->s.next, 0, (size_t)(PHASES * max64(1, h->levels)) * sizeof(int64_t));
  memcpy(g->lengths, h->d.lengths, (size_t)h->d.batch * sizeof(int64_t));
  g->d.lengths = g->lengths;
}

/* Copy the embedding of a target id, of which there may be fewer than logits. */
static void embed(const draft *h, int64_t id, float *to) {
  const int64_t D = h->d.hidden_size, row = id >= 0 && id < h->d.num_embeddings ? id : 0;
  memcpy(to, h->d.embeddings + row * D, (size_t)D * sizeof(float));
}

/* Inputs, positions and causal mask of a forward over committed tokens. */
static void begin_forward(drafting *g) {
  const draft *h = g->h;
  const int64_t N = h->d.nodes, D = h->d.hidden_size;
  for (int64_t r = 0; r < h->d.batch * N; r++) {
    embed(h, h->d.tokens[r], g->inputs + r * 2 * D);
    memcpy(g->inputs + r * 2 * D + D, h->states + r * D, (size_t)D * sizeof(float));
    g->s.positions[r] = h->positions[r / N] + r % N;
    for (int64_t n = 0; n < N; n++) g->mask[r * N + n] = n <= r % N;
  }
  g->d.ancestors = g->mask;
  g->d.span = N;
}

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
    g->parent[first + c] = level ? g->nodes[node] : -1;
  }
}

/* Of the candidates of this level the likeliest W are the nodes of the next: their inputs, positions and masks. */
static void choose_nodes(drafting *g, int64_t level, int64_t b) {
  const draft *h = g->h;
  const int64_t W = h->d.nodes, D = h->d.hidden_size, C = max_candidates(h);
  const int64_t old = level * W, step = is_block(h) ? D : 2 * D, count = level ? W * W : W; /* old: drafted positions */
  const float *const path = g->path + b * C + g->num_candidates;
  for (int64_t c = 0; c < count; c++) g->place[c] = -1;
  for (int64_t i = 0; i < W; i++) {
    const int64_t c = likeliest(path, g->place, count), r = b * W + i, parent = b * W + c / W;
    const int64_t token = g->token[b * C + g->num_candidates + c];
    float *const input = g->inputs + r * step;
    g->place[c] = i;
    g->nodes[r] = g->num_candidates + c;
    g->node_path[r] = path[c];
    embed(h, h->ids ? h->ids[token] : token, input);
    if (is_block(h)) continue;
    memcpy(input + D, level ? g->s.x + parent * D : h->root + b * D, (size_t)D * sizeof(float));
    g->s.positions[r] = h->positions[b] + level;
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
    if (level) g->lengths[b] += W;
  }
  g->num_candidates += level ? W * W : W;
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
