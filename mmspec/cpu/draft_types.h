/* A draft head of one decoder layer or more: a forward over committed tokens, and a tree that is grown level by level.
   Numbers are of the decoder's type, and rounded as its are; what is declared float lies in float32.

   The distributions of a level come from a forward of the layer over its nodes (EAGLE, EAGLE-3, MTP), or, for heads that
   predict a block of positions at once, from the logits of the level's position and a correction by the tokens before (FLASH,
   DSpark, Domino), or from scores of pairs, which are computed elsewhere from the block (DFlash 2, LiLiCorr). What DSpark
   and those upon DFlash alone need is in dspark.h; of DFlash itself the block is computed here, the tree elsewhere. An MTP
   head is a layer of its target: it normalises both inputs, and a node reads the normalised output of its parent. An assistant
   (Gemma 4) is a small decoder over keys and values of its target: its layers write none, it reads nothing of committed
   tokens but the last, and nodes do not see each other. */

typedef struct {
  decoder d; /* the layers and what is around them; `nodes`: tokens of a forward, or nodes of a level, W; `final_norm`:
                before the LM head, or NULL */
  int64_t input_size; /* E, numbers of an embedding and of a hidden state; D but for assistants */
  weights fuse; /* EAGLE, FLASH, MTP, assistants: [D, 2 E], from [embedding ; hidden state] to the input of the layer.
                   EAGLE-3, DSpark: from the states of several of the target's layers to one state */
  const float *fuse_bias;
  const float *hidden_norm;      /* [D] norm of that state, or of the input state; NULL for EAGLE and FLASH */
  const float *embedding_norm;   /* [D] norm of the embedding of an MTP head; NULL for the others */
  const int64_t *positions;      /* [batch] rotary position of the first token of a forward, of a tree's first level */
  float *root;                   /* [batch, D] output of the layer at each row's last token; of an assistant its input; of
                                    DSpark the fused state */
  weights carry;                 /* [E, D] from a normalised output to the state that children read; empty: the output is it */
  /* a forward over committed tokens: sets `root` */
  const float *states;        /* [batch, nodes, state_size] the target's hidden states before each token */
  const int64_t *counts;      /* [batch] valid tokens of a row; `root` stays as it is where there is none */
  int64_t state_size;
  int64_t adds_normed_state;  /* whether an EAGLE-3 layer adds to the normalised state */
  /* a tree: reads `root` */
  int64_t levels, max_nodes;
  const float *bias;     /* [V], added to the logits */
  const float *noise;    /* [batch, levels, V], subtracted from the logits divided by `temperature`; or NULL */
  const int64_t *ids;    /* [V] target ids of the draft vocabulary; NULL if it is the target's */
  float temperature, level_penalty;
  float logit_scale, logit_softcap; /* of the LM head: factor, and limit by tanh; 1 and 0 for none */
  /* an LM head over the ids of each node's likeliest centroids; 0 and NULL for one over all */
  int64_t num_best, cluster_size;
  weights centroids;       /* [number of centroids, D] */
  const int64_t *clusters; /* [number of centroids, cluster_size] the ids of each */
  /* the block of FLASH; NULL and 0 for the others */
  int64_t block_ffn_size;
  const float *block_norm;      /* [D] */
  weights block_up, block_down; /* [F, D], [k D, F] */
  /* the correction of a position's logits by the token before, or all; R: its rank; NULL and 0 for EAGLE and EAGLE-3 */
  int64_t rank;
  const float *feature_norm; /* [D]; NULL where it depends on the token alone, as */
  weights feature_proj;      /* [R, D] */
  const float *token_norm;   /* [D]; NULL with a table, as */
  weights token_proj;        /* [R, D] */
  weights token_table;       /* [number of ids, R] */
  weights vocab_proj;        /* [V, R] */
  int64_t first_corrected;   /* level from which on positions are corrected */
  /* Domino: `token_proj` [R, D + S] reads the feature and the state of a GRU over the tokens of the path; empty else */
  weights gru_in, gru_state; /* [3 S, D], [3 S, S]: reset, update and candidate, from the token and the state before */
  /* DSpark; NULL and 0 for the others */
  int64_t block_positions, first_position; /* of the block; the first that predicts */
  const int64_t *anchors;                  /* [batch] last token of each row, with which its block begins */
  const float *mixture;                    /* [state_size / D] weights of the states, or NULL */
  const float *mask_embedding;             /* [D] input of the positions behind the first; NULL: the embedding of */
  int64_t mask_token;
  const float *confidence, *confidence_bias; /* [D + R], [1]; or NULL */
  /* results of a tree without levels, NULL else: [batch, block_positions, D]; [batch, block_positions, V], complete but for
     `bias` and `noise` */
  float *block_features, *block_logits;
  /* a tree over scores of pairs: of the candidates of each level behind those before, of the first level in each row */
  int64_t pair_size;         /* C, candidates of a level; 0 for none */
  const float *pairs;        /* [batch, levels, C, C] */
  const int64_t *candidates; /* [batch, levels, C] their tokens */
  /* results, [batch, tree_size]; node 0 is the root */
  int64_t *tree_tokens, *tree_parents;
  float *tree_scores;
  uint8_t *tree_mask;
} draft;

/* What the threads of one call share. A candidate is a possible node of the tree, in the order of its level. */
typedef struct {
  decoding s;
  team team;
  decoder d; /* as in `draft`, with the lengths and the mask of the level */
  const draft *h;
  int64_t *lengths, *nodes;                          /* [batch]; [batch, W] candidate that each node is */
  int64_t *ids;                                      /* [batch, W] target id of each node, or its place among the candidates (pairs) */
  int64_t *token, *parent, *place;                   /* [batch, C] candidates; [C] node of the tree, or -1 */
  int64_t *child;                                    /* [batch, W, W] best next tokens of the nodes */
  float *child_log_prob, *path, *node_path;          /* [batch, W, W]; [batch, C]; [batch, W]: log probabilities */
  float *inputs, *logits;                            /* [batch, W, 2 E]; [batch, W, num_logits()] */
  float *carried, *normed, *similar, *nearest;       /* assistants: [batch, W, E]; LM heads of clusters: [batch, W, D],
                                                        of all centroids, of the likeliest */
  int64_t *best;                                     /* [batch, W, num_best] the likeliest centroids */
  float *ffn, *features, *base, *projected, *mixed;  /* heads of blocks: [batch, F]; [batch, levels, D], of a block's
                                                        positions V, [batch, levels, R]; [batch, W, R] */
  float *gates, *states, *parents, *joined; /* of Domino: [2, batch, W, 3 S]; [batch, W, S] of the nodes and of their
                                              parents; [batch, W, D + S] */
  float *changes, *tapped; /* of layers with taps: [batch, block_positions, rows of `attention_changes`], [.., D] */
  uint8_t *mask, *old_mask;
  int64_t num_candidates; /* per row, so far */
} drafting;

/* Phases of one level, before those of its layers. */
enum {
  MIX_STATES_PHASE, FUSE_PHASE, INPUT_NORM_PHASE,                   /* inputs of the layers */
  CENTROIDS_PHASE, NEAREST_PHASE, CLUSTERS_PHASE,                   /* logits of the nodes: of clusters, or */
  LM_HEAD_PHASE, CARRY_PHASE,                                       /* of all ids; what children read */
  BLOCK_UP_PHASE, BLOCK_DOWN_PHASE, FEATURE_PHASE,                  /* the block of FLASH */
  BASE_PHASE, SCALE_LOGITS_PHASE,                                   /* logits of the positions of a block */
  GRU_IN_PHASE, GRU_STATE_PHASE, GRU_PHASE, TOKEN_PHASE, CORRECT_PHASE, /* their corrections */
  CHILDREN_PHASE,
  LEVEL_PHASES
};

static inline int64_t max_candidates(const draft *h) {
  return h->levels ? h->d.nodes + (h->levels - 1) * h->d.nodes * h->d.nodes : 0;
}
static inline int64_t tree_size(const draft *h) { return min64(h->max_nodes, 1 + max_candidates(h)); }
static inline int has_correction(const draft *h) { return h->rank > 0; }
static inline int is_dspark(const draft *h) { return h->block_positions > 0; }
static inline int is_mtp(const draft *h) { return h->embedding_norm != NULL; }
static inline int is_eagle3(const draft *h) { return h->hidden_norm && !is_dspark(h) && !is_mtp(h); }
/* Logits that a node has. */
static inline int64_t num_logits(const draft *h) {
  if (h->pair_size) return h->pair_size;
  return h->num_best ? h->num_best * h->cluster_size : h->d.vocab_size;
}
/* Whether the logits of a level are corrected; the token before that of FLASH's first is read by its layer. */
static inline int is_corrected(const draft *h, int64_t level) { return has_correction(h) && level >= h->first_corrected; }
/* Positions of one row's block that have logits. */
static inline int64_t base_rows(const draft *h) { return is_dspark(h) ? h->block_positions : h->levels; }
/* Rows of the largest forward, per batch row. */
static inline int64_t most_rows(const draft *h) { return max64(h->d.nodes, max64(h->levels, h->block_positions)); }

/* Numbers that one thread needs for packed rows, and what `self_attention` needs behind them. */
static int64_t draft_thread_floats(const draft *h) {
  decoder d = h->d;
  d.nodes = most_rows(h);
  const int64_t read = max64(h->state_size, 2 * h->input_size);
  const int64_t corrects = max64(h->rank, h->token_proj.cols);
  const int64_t widest = max64(max64(widest_row(&d), read), max64(h->block_ffn_size, corrects));
  return align16(packed_rows(d.batch * d.nodes) * (widest + MAX_LANES)) + thread_floats(&d);
}

/* Of one thread's, where rows are normalised. */
static float *draft_normed(const draft *h, float *own) {
  return own + draft_thread_floats(h) - align16(h->d.batch * most_rows(h) * h->d.hidden_size);
}

static int64_t level_phases(const draft *h) { return LEVEL_PHASES + layer_phases(&h->d) * h->d.num_layers; }
static int64_t num_phases(const draft *h) { return level_phases(h) * (max64(1, h->levels) + 1); }
static int64_t *take_ints(float **scratch, int64_t n) { return (int64_t *)take_floats(scratch, 2 * n); }

/* Divide the scratch, and return its end; nothing is read or written. */
static float *divide_scratch(drafting *g, float *scratch) {
  const draft *h = g->h;
  const decoder *d = &h->d;
  const int64_t B = d->batch, W = d->nodes, D = d->hidden_size, C = max_candidates(h), L = h->levels;
  const int64_t R = B * W, most = B * max64(W, h->block_positions), E = h->input_size;
  g->s.next = take_ints(&scratch, num_phases(h));
  g->s.done = take_ints(&scratch, B * d->num_kv_heads);
  g->lengths = take_ints(&scratch, B);
  g->s.positions = take_ints(&scratch, most);
  g->nodes = take_ints(&scratch, R);
  g->ids = take_ints(&scratch, R);
  g->token = take_ints(&scratch, B * C);
  g->parent = take_ints(&scratch, B * C);
  g->place = take_ints(&scratch, C);
  g->child = take_ints(&scratch, R * W);
  g->child_log_prob = take_floats(&scratch, R * W);
  g->path = take_floats(&scratch, B * C);
  g->node_path = take_floats(&scratch, R);
  g->inputs = take_floats(&scratch, R * 2 * E);
  g->logits = take_floats(&scratch, R * num_logits(h));
  g->carried = take_floats(&scratch, R * E);
  g->normed = take_floats(&scratch, h->num_best || d->layers->num_taps ? most * D : 0);
  g->similar = take_floats(&scratch, R * h->centroids.rows);
  g->nearest = take_floats(&scratch, R * h->num_best);
  g->best = take_ints(&scratch, R * h->num_best);
  g->ffn = take_floats(&scratch, B * h->block_ffn_size);
  g->features = take_floats(&scratch, B * L * D);
  g->base = take_floats(&scratch, has_correction(h) ? B * base_rows(h) * d->vocab_size : 0);
  g->projected = take_floats(&scratch, B * L * h->rank);
  g->mixed = take_floats(&scratch, R * h->rank);
  g->gates = take_floats(&scratch, 2 * R * h->gru_in.rows);
  g->states = take_floats(&scratch, R * h->gru_state.cols);
  g->parents = take_floats(&scratch, R * h->gru_state.cols);
  g->joined = take_floats(&scratch, h->gru_in.data ? R * h->token_proj.cols : 0);
  g->changes = take_floats(&scratch, most * d->layers->attention_changes.rows);
  g->tapped = take_floats(&scratch, d->layers->num_taps ? most * D : 0);
  g->mask = (uint8_t *)take_floats(&scratch, R * W * max64(1, L));
  g->old_mask = (uint8_t *)take_floats(&scratch, R * W * max64(1, L));
  g->s.x = take_floats(&scratch, most * D);
  g->s.branch = take_floats(&scratch, most * D);
  g->s.qkv = take_floats(&scratch, most * qkv_width(d));
  g->s.attended = take_floats(&scratch, most * d->num_heads * d->head_dim);
  g->s.activated = take_floats(&scratch, most * d->intermediate_size);
  g->s.partial = take_floats(&scratch, all_partial_floats(d, most));
  g->s.own = scratch;
  return scratch;
}

static void begin_drafting(drafting *g, const draft *h) {
  *g = (drafting){.h = h, .d = h->d};
  g->s.d = &g->d, g->s.team = &g->team;
  divide_scratch(g, h->d.scratch);
  if (h->block_logits) g->base = h->block_logits, g->s.x = h->block_features;
  if (is_eagle3(h)) g->s.attention_inputs = g->inputs;
  memset(g->s.done, 0, (size_t)(h->d.batch * h->d.num_kv_heads) * sizeof(int64_t));
  memset(g->s.next, 0, (size_t)num_phases(h) * sizeof(int64_t));
  memcpy(g->lengths, h->d.lengths, (size_t)h->d.batch * sizeof(int64_t));
  g->d.lengths = g->lengths;
  copy_vectors(&h->d);
}

/* The embedding of a target id, of which there may be fewer than logits. */
__attribute__((target("avx2,fma,f16c"))) static void embed(const draft *h, int64_t id, float *to) {
  widen_row(&h->d.embeddings, id >= 0 && id < h->d.num_embeddings ? id : 0, to);
  if (h->d.embed_scale == 1) return;
  for (int64_t i = 0; i < h->input_size; i++) to[i] = round1(to[i] * h->d.embed_scale, h->d.type);
}

/* Inputs and positions of the layers of an assistant at the roots. */
static void begin_root(drafting *g) {
  const draft *h = g->h;
  memcpy(g->s.x, h->root, (size_t)(h->d.batch * h->d.hidden_size) * sizeof(float));
  memcpy(g->s.positions, h->positions, (size_t)h->d.batch * sizeof(int64_t));
  g->d.nodes = 1;
}

/* Inputs, positions and causal mask of a forward over committed tokens. */
static void begin_forward(drafting *g) {
  const draft *h = g->h;
  const int64_t N = h->d.nodes, D = h->d.hidden_size;
  for (int64_t r = 0; r < h->d.batch * N; r++) {
    g->s.positions[r] = h->positions[r / N] + r % N;
    for (int64_t n = 0; n < N; n++) g->mask[r * N + n] = n <= r % N;
    if (is_dspark(h)) continue; /* it reads no embeddings of committed tokens */
    embed(h, h->d.tokens[r], g->inputs + r * 2 * D);
    if (!is_eagle3(h)) memcpy(g->inputs + r * 2 * D + D, h->states + r * D, (size_t)D * sizeof(float));
  }
  g->d.ancestors = g->mask;
  g->d.span = N;
}

/* Inputs and positions of the layers of a DSpark head over its block, and the tokens of the roots for their correction. */
static void begin_block(drafting *g) {
  const draft *h = g->h;
  const int64_t K = h->block_positions, D = h->d.hidden_size;
  for (int64_t r = 0; r < h->d.batch * K; r++) {
    const int64_t b = r / K;
    if (r % K && h->mask_embedding)
      memcpy(g->s.x + r * D, h->mask_embedding, (size_t)D * sizeof(float));
    else
      embed(h, r % K ? h->mask_token : h->anchors[b], g->s.x + r * D);
    if (r % K == 0) memcpy(g->inputs + b * D, g->s.x + r * D, (size_t)D * sizeof(float));
    g->s.positions[r] = h->positions[b] + r % K;
  }
  memset(g->parents, 0, (size_t)(h->d.batch * h->gru_state.cols) * sizeof(float));
  g->d.nodes = K;
  g->d.ancestors = NULL; /* a position attends to all of its block */
}
