/* Counts of n-grams in a hash table, and draft trees from these and the distributions of a few next positions by heads.

   A context is the last 1 to `max_context` tokens before a token; its successors are a list in the order of their first
   occurrence. The same, with the same operations in the same order, as drafters/ngram/output_ngrams.py, so that both
   give the same numbers. The caller has all memory, and sees to it that nobody reads while another writes. */

#define MAX_NGRAM_CONTEXT 8
#define MAX_NGRAM_SUCCESSORS 64
#define MAX_NGRAM_NODES 64      /* of a tree */
#define MAX_NGRAM_CANDIDATES 50 /* of a node: each has at least 1 / 50 of the probability */
#define NO_TOKEN (-2)           /* -1 stands for what is no text */
#define NUM_LIKELY 16           /* tokens of a head that are drafted though no n-gram names them */

typedef struct {
  uint64_t key; /* hash of the tokens; 0: the place is free */
  int32_t total, distinct; /* occurrences; distinct successors */
  int32_t first, unused;   /* first successor, or -1 */
} ngram_context;

typedef struct {
  int32_t token, count, next; /* next: of the same context, or -1 */
} ngram_successor;

typedef struct {
  int64_t context_places; /* a power of two */
  int64_t successor_places, num_contexts, num_successors;
  int64_t max_context, max_successors; /* of a context */
  ngram_context *contexts;
  ngram_successor *successors;
} ngram_table;

/* Which trees, from what. */
typedef struct {
  const ngram_table *table;
  int64_t batch, max_nodes, slots, num_ids, vocab_size, num_classes; /* slots: positions that the heads predict */
  const int64_t *contexts;       /* [batch, max_context] last tokens of each row; NO_TOKEN in front where there are fewer */
  const uint8_t *active, *flags; /* [batch]; [vocab_size]: bit 0, never drafted; bit 1, ends a row */
  const float *powers, *weights; /* [batch, slots, num_ids] of the heads: powers of the probabilities; these times those of
                                    the tokens' frequencies */
  const double *totals, *floors; /* [batch, slots] sum of `weights`; smallest power of a token that an n-gram names */
  const int64_t *ids;            /* [num_ids] tokens that the heads know */
  const int32_t *index;          /* [vocab_size] place of a token in `ids`, or -1 */
  const double *calibrated;      /* [1 + slots, num_classes + 1] probability of each class, without heads and by position */
  double ngram_power, min_candidate, min_node, max_siblings, min_unseen;
  /* results; node 0 is the root */
  int64_t *tokens, *parents;                 /* [batch, max_nodes] */
  float *scores;                             /* [batch, max_nodes] */
  uint8_t *mask;                             /* [batch, max_nodes] */
  int32_t *candidates, *num_candidates;      /* [batch, max_nodes, MAX_NGRAM_CANDIDATES, 2] token, class; [batch, max_nodes] */
} ngram_draft;

/* What may follow a node. */
typedef struct {
  int64_t n;
  double rest; /* probability of all other tokens */
  int32_t token[MAX_NGRAM_CONTEXT * MAX_NGRAM_SUCCESSORS + NUM_LIKELY];
  double prob[MAX_NGRAM_CONTEXT * MAX_NGRAM_SUCCESSORS + NUM_LIKELY];
} distribution;

typedef struct {
  double score; /* -1: it is in the tree */
  int32_t token, parent;
} open_node;

/* A tree of one row while it grows. */
typedef struct {
  const ngram_draft *g;
  int64_t row, num_open;
  int64_t contexts[MAX_NGRAM_NODES][MAX_NGRAM_CONTEXT];
  int64_t depths[MAX_NGRAM_NODES];
  int64_t num_likely[MAX_NGRAM_NODES]; /* by depth; -1: not looked for */
  int32_t likely[MAX_NGRAM_NODES][NUM_LIKELY];
  open_node open[MAX_NGRAM_NODES * MAX_NGRAM_CANDIDATES];
  distribution found;
} growing;

static uint64_t ngram_hash(uint64_t hash, int64_t token) {
  hash = (hash ^ (uint64_t)token) * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
  return hash ^ hash >> 29;
}

/* The place of a context, which is free if the table does not hold it. */
static ngram_context *find_context(const ngram_table *t, uint64_t key) {
  const uint64_t last = (uint64_t)t->context_places - 1;
  uint64_t place = key >> 20 & last;
  while (t->contexts[place].key && t->contexts[place].key != key) place = (place + 1) & last;
  return t->contexts + place;
}

/* Count `count` occurrences of a token after a context. There is room for one more context and successor. */
static void count_ngram(ngram_table *t, uint64_t key, int32_t token, int32_t count) {
  ngram_context *const c = find_context(t, key);
  ngram_successor *const s = t->successors;
  if (!c->key) *c = (ngram_context){.key = key, .first = -1}, t->num_contexts++;
  int32_t last = -1, rarest = -1, before_rarest = -1;
  for (int32_t i = c->first; i >= 0; last = i, i = s[i].next) {
    if (s[i].token == token) {
      s[i].count += count, c->total += count;
      return;
    }
    if (rarest < 0 || s[i].count < s[rarest].count) rarest = i, before_rarest = last;
  }
  int32_t place = (int32_t)t->num_successors;
  if (c->distinct < t->max_successors) {
    t->num_successors++, c->distinct++;
  } else { /* it replaces the rarest */
    place = rarest, c->total -= s[rarest].count;
    if (before_rarest < 0) c->first = s[rarest].next; else s[before_rarest].next = s[rarest].next;
    if (last == rarest) last = before_rarest;
  }
  s[place] = (ngram_successor){token, count, -1};
  if (last < 0) c->first = place; else s[last].next = place;
  c->total += count;
}

static int has_room(const ngram_table *t) {
  return 2 * (t->num_contexts + t->max_context) <= t->context_places &&
         t->num_successors + t->max_context <= t->successor_places;
}

/* Count the tokens of `history` from `begin` to `end`. Returns the end of those that were counted: the table may be full. */
EXPORT int64_t few_rows_ngrams_add(ngram_table *t, const int64_t *history, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    if (!has_room(t)) return i;
    uint64_t hash = 0;
    for (int64_t n = 1; n <= min64(t->max_context, i); n++) {
      hash = ngram_hash(hash, history[i - n]);
      count_ngram(t, hash | 1, (int32_t)history[i], 1);
    }
  }
  return end;
}

/* Fill the empty table `to` with the counts of another, divided and rounded down. It may be full before. */
EXPORT void few_rows_ngrams_copy(const ngram_table *from, ngram_table *to, int64_t divisor) {
  for (int64_t i = 0; i < from->context_places; i++) {
    const ngram_context *const c = from->contexts + i;
    if (!c->key) continue;
    for (int32_t j = c->first; j >= 0; j = from->successors[j].next) {
      const int32_t count = from->successors[j].count / (int32_t)divisor;
      if (count && has_room(to)) count_ngram(to, c->key, from->successors[j].token, count);
    }
  }
}

/* Witten-Bell estimates after the tokens of `context` [max_context]. */
static void ngram_probs(const ngram_table *t, const int64_t *context, double min_unseen, distribution *found) {
  const ngram_context *known[MAX_NGRAM_CONTEXT];
  int64_t length = 0;
  uint64_t hash = 0;
  for (; length < t->max_context && context[t->max_context - 1 - length] != NO_TOKEN; length++) {
    hash = ngram_hash(hash, context[t->max_context - 1 - length]);
    known[length] = find_context(t, hash | 1);
  }
  found->n = 0, found->rest = 1;
  while (length-- > 0) {
    const ngram_context *const c = known[length];
    if (!c->key) continue;
    const double scale = found->rest / (double)(c->total + c->distinct);
    const int64_t before = found->n;
    for (int32_t i = c->first; i >= 0; i = t->successors[i].next) {
      const ngram_successor s = t->successors[i];
      int64_t j = 0;
      while (j < before && found->token[j] != s.token) j++;
      if (j == before) j = found->n++, found->token[j] = s.token, found->prob[j] = 0;
      found->prob[j] += scale * s.count;
    }
    found->rest = scale * c->distinct;
    if (found->rest < min_unseen) break;
  }
}

/* The tokens after `context` [max_context], NO_TOKEN in front, with their probabilities. Returns how many; `rest`: of all others. */
EXPORT int64_t few_rows_ngrams_probs(const ngram_table *t, const int64_t *context, double min_unseen, int64_t *tokens,
                                     double *probs, double *rest) {
  distribution found;
  ngram_probs(t, context, min_unseen, &found);
  for (int64_t i = 0; i < found.n; i++) tokens[i] = found.token[i], probs[i] = found.prob[i];
  *rest = found.rest;
  return found.n;
}

/* From logits [R, n] of heads: `powers`, `weights`, `totals` and `floors` of `ngram_draft`. `priors`, `frequencies` [n]:
   factors of the powers, of the weights. */
EXPORT void few_rows_ngrams_weigh(const float *logits, const float *priors, const float *frequencies, int64_t R, int64_t n,
                                  float power, float *powers, float *weights, double *totals, double *floors) {
  for (int64_t r = 0; r < R; r++, logits += n, powers += n, weights += n) {
    float top = -INFINITY, smallest = INFINITY, sum = 0;
    double total = 0;
    for (int64_t i = 0; i < n; i++) top = fmaxf(top, logits[i]);
    for (int64_t i = 0; i < n; i++) sum += expf(logits[i] - top);
    const float log_sum = top + logf(sum);
    for (int64_t i = 0; i < n; i++) {
      const float value = expf(power * (logits[i] - log_sum)) * priors[i];
      powers[i] = value < INFINITY ? value : 0; /* 0 for what is not a number, too */
      weights[i] = powers[i] * frequencies[i];
      total += weights[i];
      smallest = fminf(smallest, powers[i]);
    }
    totals[r] = total, floors[r] = smallest;
  }
}

/* The places of the NUM_LIKELY largest weights above 0 of a position, falling; of equals the first. */
static void find_likely(growing *t, int64_t depth) {
  const ngram_draft *g = t->g;
  const float *const weights = g->weights + (t->row * g->slots + depth) * g->num_ids;
  int32_t *const likely = t->likely[depth];
  int64_t n = 0;
  for (int64_t i = 0; i < g->num_ids; i++) {
    if (!(weights[i] > 0) || (n == NUM_LIKELY && !(weights[i] > weights[likely[n - 1]]))) continue;
    int64_t j = n < NUM_LIKELY ? n++ : n - 1;
    for (; j > 0 && weights[i] > weights[likely[j - 1]]; j--) likely[j] = likely[j - 1];
    likely[j] = (int32_t)i;
  }
  t->num_likely[depth] = n;
}

/* Replace the n-grams' probabilities by their normalised product with those of the heads. */
static void combine_with_heads(growing *t, int64_t depth) {
  const ngram_draft *g = t->g;
  distribution *const found = &t->found;
  const int64_t slot = t->row * g->slots + depth, seen = found->n;
  const float *const powers = g->powers + slot * g->num_ids, *const weights = g->weights + slot * g->num_ids;
  const double unseen = pow(found->rest, g->ngram_power), floor = g->floors[slot];
  double total = 0, others = g->totals[slot];
  if (t->num_likely[depth] < 0) find_likely(t, depth);
  for (int64_t i = 0; i < seen; i++) {
    const int64_t place = found->token[i] < g->vocab_size ? g->index[found->token[i]] : -1;
    double power = floor;
    if (place >= 0) {
      others -= weights[place];
      if (powers[place] > power) power = powers[place];
    }
    found->prob[i] = power * pow(found->prob[i], g->ngram_power);
    total += found->prob[i];
  }
  if (others > 0) total += others * unseen;
  for (int64_t i = 0; i < t->num_likely[depth]; i++) {
    const int64_t place = t->likely[depth][i];
    int64_t j = 0;
    while (j < seen && found->token[j] != g->ids[place]) j++;
    if (j < seen) continue;
    found->token[found->n] = (int32_t)g->ids[place];
    found->prob[found->n++] = weights[place] * unseen;
  }
  const double scale = total > 0 ? 1 / total : 0;
  for (int64_t i = 0; i < found->n; i++) found->prob[i] *= scale;
}

/* Record the candidates at a node; those that are likely enough are open. */
static void expand_node(growing *t, int64_t node, double score) {
  const ngram_draft *g = t->g;
  const int64_t depth = t->depths[node], first_class = depth < g->slots ? (1 + depth) * (g->num_classes + 1) : 0;
  distribution *const found = &t->found;
  int32_t *const candidates = g->candidates + (t->row * g->max_nodes + node) * MAX_NGRAM_CANDIDATES * 2;
  int32_t n = 0;
  double total = 0, probs[MAX_NGRAM_CANDIDATES];
  ngram_probs(g->table, t->contexts[node], g->min_unseen, found);
  if (first_class) combine_with_heads(t, depth);
  for (int64_t i = 0; i < found->n && n < MAX_NGRAM_CANDIDATES; i++) {
    const int32_t token = found->token[i];
    if (!(found->prob[i] >= g->min_candidate) || (token < g->vocab_size && g->flags[token] & 1)) continue;
    const int32_t class = (int32_t)(first_class + (int64_t)(fmin(found->prob[i], 1) * (double)g->num_classes));
    const double prob = g->calibrated[class];
    candidates[2 * n] = token, candidates[2 * n + 1] = class;
    probs[n++] = prob < g->min_node ? 0 : prob;
    total += probs[n - 1];
  }
  g->num_candidates[t->row * g->max_nodes + node] = n;
  const double scale = total > g->max_siblings ? g->max_siblings / total : 1;
  for (int32_t i = 0; i < n; i++)
    if (probs[i] > 0 && score * (probs[i] * scale) >= g->min_node)
      t->open[t->num_open++] = (open_node){score * (probs[i] * scale), candidates[2 * i], (int32_t)node};
}

/* The likeliest open node, of equals the first; NULL if there is none. */
static open_node *best_open(growing *t) {
  open_node *best = NULL;
  for (int64_t i = 0; i < t->num_open; i++)
    if (t->open[i].score >= 0 && (!best || t->open[i].score > best->score)) best = t->open + i;
  return best;
}

/* The tree of one row. Returns its size. */
static int64_t grow_tree(growing *t) {
  const ngram_draft *g = t->g;
  const int64_t C = g->table->max_context, first = t->row * g->max_nodes;
  memcpy(t->contexts[0], g->contexts + t->row * C, (size_t)C * sizeof(int64_t));
  t->depths[0] = t->num_open = 0;
  for (int64_t i = 0; i < MAX_NGRAM_NODES; i++) t->num_likely[i] = -1;
  expand_node(t, 0, 1);
  int64_t n = 1;
  for (open_node *o = best_open(t); o && n < g->max_nodes; o = best_open(t), n++) {
    const double score = o->score;
    const int64_t parent = o->parent, token = o->token;
    o->score = -1;
    g->tokens[first + n] = token, g->parents[first + n] = parent;
    g->scores[first + n] = (float)score, g->mask[first + n] = 1;
    memcpy(t->contexts[n], t->contexts[parent] + 1, (size_t)(C - 1) * sizeof(int64_t));
    t->contexts[n][C - 1] = token;
    t->depths[n] = t->depths[parent] + 1;
    if (n + 1 < g->max_nodes && !(token < g->vocab_size && g->flags[token] & 2)) expand_node(t, n, score);
  }
  return n;
}

/* Trees of all active rows. Returns the size of the largest; `tokens` and so on are those of a root alone before. */
EXPORT int64_t few_rows_ngrams_draft(const ngram_draft *g) {
  growing t;
  int64_t largest = 1;
  for (int64_t b = 0; b < g->batch; b++) {
    t.g = g, t.row = b;
    if (g->active[b]) largest = max64(largest, grow_tree(&t));
  }
  return largest;
}

/* Bytes of a struct (0: `ngram_table`, 1: `ngram_draft`, 2: `ngram_context`, 3: `ngram_successor`). */
EXPORT int64_t few_rows_ngrams_struct_bytes(int number) {
  return number == 0   ? sizeof(ngram_table)
         : number == 1 ? sizeof(ngram_draft)
         : number == 2 ? sizeof(ngram_context)
                       : sizeof(ngram_successor);
}
