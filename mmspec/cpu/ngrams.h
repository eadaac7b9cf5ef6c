/* Counts of n-grams in a hash table.

   A context is the last 1 to `max_context` tokens before a token; its successors are a list in the order of their first
   occurrence. The same, with the same operations in the same order, as drafters/ngram/output_ngrams.py, so that both
   give the same numbers. The caller has all memory, and sees to it that nobody reads while another writes. */

#define MAX_NGRAM_CONTEXT 8
#define MAX_NGRAM_SUCCESSORS 64
#define NO_TOKEN (-2) /* -1 stands for what is no text */

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

/* What may follow a context. */
typedef struct {
  int64_t n;
  double rest; /* probability of all other tokens */
  int32_t token[MAX_NGRAM_CONTEXT * MAX_NGRAM_SUCCESSORS];
  double prob[MAX_NGRAM_CONTEXT * MAX_NGRAM_SUCCESSORS];
} distribution;

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

/* Bytes of a struct (0: `ngram_table`, 1: `ngram_context`, 2: `ngram_successor`). */
EXPORT int64_t few_rows_ngrams_struct_bytes(int number) {
  return number == 0   ? sizeof(ngram_table)
         : number == 1 ? sizeof(ngram_context)
                       : sizeof(ngram_successor);
}
