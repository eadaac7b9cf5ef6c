/* The loop of a chain; see chain_types.h. Included after decoders of all instruction sets. */

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ends_chain(const chain *c, int64_t token) {
  for (int64_t i = 0; i < c->num_stop; i++)
    if (c->stop[i] == token) return 1;
  return 0;
}

/* Append the likeliest tokens by the counts to the nodes of the only row, of which it has n: as many as save more
   forwards than they cost. `context` ends with the last of them. Returns the new number of nodes. */
static int64_t guess(chain *c, int64_t n, int64_t most, const int64_t *context) {
  const int64_t C = c->table->max_context, first = n;
  int64_t last[MAX_NGRAM_CONTEXT], best = n;
  double prob = 1, gain = 0, best_gain = 0, expected = 0, best_expected = 0;
  distribution found;
  memcpy(last, context, (size_t)C * sizeof(int64_t));
  while (n < most) {
    int64_t token = -1;
    double largest = 0;
    ngram_probs(c->table, last, c->min_unseen, &found);
    for (int64_t i = 0; i < found.n; i++)
      if (found.prob[i] > largest) largest = found.prob[i], token = found.token[i];
    if (token < 0 || token >= c->d.num_embeddings || token >= c->num_biases || c->bias[token] < 0) break;
    prob *= fmin(1, c->trust * largest), expected += prob;
    gain += prob - (c->costs[n] - c->costs[n - 1]);
    c->tokens[n++] = token;
    if (gain > best_gain) best_gain = gain, best_expected = expected, best = n;
    if (prob < 0.05 || ends_chain(c, token)) break;
    memmove(last, last + 1, (size_t)(C - 1) * sizeof(int64_t));
    last[C - 1] = token;
  }
  if (best > first) c->expected += best_expected;
  return best;
}

/* One forward over n nodes of each row; 0 if it is not possible. */
static int run_chain_forward(chain *c, int64_t n, int64_t num_threads, parallel_fn parallel,
                             team_size_fn team_size) {
  decoder *const d = &c->d;
  const int64_t room = d->nodes, keys = d->max_keys;
  const double start = now_s();
  d->nodes = d->span = n, d->max_keys = 0;
  for (int64_t b = 0; b < d->batch; b++) {
    d->max_keys = max64(d->max_keys, c->lengths[b] + n);
    for (int64_t i = 0; i < n; i++) {
      c->depths[b * n + i] = i;
      for (int64_t j = 0; j < n; j++) c->ancestors[(b * n + i) * n + j] = j <= i;
    }
  }
  d->tokens = c->tokens, d->depths = c->depths, d->lengths = c->lengths;
  d->ancestors = n > 1 ? c->ancestors : NULL;
  const int done = few_rows_decode(d, num_threads, parallel, team_size);
  c->seconds[n] += now_s() - start, c->forwards[n]++;
  d->nodes = room, d->max_keys = keys;
  return done;
}

/* Add a step behind node i of row b, of n. Returns the token, or -1 where the chain has ended. */
static int64_t add_step(chain *c, int64_t b, int64_t i, int64_t n, next_tokens_fn next_tokens) {
  const int64_t k = c->top_k, t = c->steps[b], at = (b * c->length + t) * k, V = c->d.vocab_size;
  const float before = t ? c->paths[at - k] : 0;
  const char *const logits = (const char *)c->d.logits + (b * n + i) * V * float_bytes(c->d.type);
  const float *const noise = c->noise ? c->noise + (b * c->length + t) * c->num_biases : NULL;
  next_tokens(c, logits, noise, c->z, c->ids + at, c->paths + at);
  for (int64_t j = 0; j < k; j++) {
    c->paths[at + j] += before - c->level_penalty;
    c->parents[at + j] = t ? (t - 1) * k : -1;
  }
  c->steps[b]++;
  return ends_chain(c, c->ids[at]) ? -1 : c->ids[at];
}

/* The tree of one row: its likeliest candidates, likeliest first. */
static void finish_chain(chain *c, int64_t b) {
  const int64_t C = c->length * c->top_k, known = c->steps[b] * c->top_k, N = c->max_nodes, first = b * N;
  const float *const paths = c->paths + b * C;
  for (int64_t i = 0; i < C; i++) c->place[i] = -1;
  c->tree_tokens[first] = 0, c->tree_parents[first] = -1, c->tree_scores[first] = 1, c->tree_mask[first] = 1;
  for (int64_t n = 1; n < N; n++) {
    const int64_t i = likeliest(paths, c->place, known);
    c->tree_tokens[first + n] = c->tree_parents[first + n] = 0, c->tree_scores[first + n] = 0;
    c->tree_mask[first + n] = 0;
    if (i < 0) continue;
    const int64_t parent = c->parents[b * C + i];
    c->place[i] = n;
    c->tree_tokens[first + n] = c->ids[b * C + i];
    c->tree_parents[first + n] = parent < 0 || c->place[parent] < 0 ? 0 : c->place[parent];
    c->tree_scores[first + n] = expf(paths[i]);
    c->tree_mask[first + n] = paths[i] > -INFINITY;
  }
}

/* What one row does with the logits of its nodes, of which the last `guessed` of the `count` are guesses. Returns whether its
   chain may go on, from `next`. */
static int follow_chain(chain *c, int64_t b, int64_t n, int64_t count, int64_t guessed, next_tokens_fn next_tokens,
                        int64_t *next) {
  int64_t i = count - guessed - 1, token = add_step(c, b, i, n, next_tokens);
  while (token >= 0 && c->steps[b] < c->length && i + 1 < count && c->tokens[b * n + i + 1] == token) {
    i++, c->num_right++;
    token = add_step(c, b, i, n, next_tokens);
  }
  c->num_read[b] += i + 1, c->lengths[b] += i + 1;
  *next = token;
  return token >= 0 && token < c->d.num_embeddings && c->steps[b] < c->length;
}

/* Draft. Returns the number of forwards, 0 if the first one was not possible. */
EXPORT int64_t few_rows_chain(chain *c, int64_t num_threads, parallel_fn parallel, team_size_fn team_size) {
  const next_tokens_fn next_tokens = NAME(next_tokens);
  const int64_t B = c->d.batch, k = c->top_k, C = c->table ? c->table->max_context : 0;
  int64_t n = c->most_unread, count = c->counts[0], guessed = 0, forwards = 0, goes_on = 1, last[MAX_NGRAM_CONTEXT];
  int64_t next[MAX_CHAIN_ROWS], on[MAX_CHAIN_ROWS]; /* of each row: the token to read, and whether its chain goes on */
  for (int64_t b = 0; b < B; b++) on[b] = 1;
  memcpy(c->tokens, c->unread, (size_t)(B * n) * sizeof(int64_t));
  if (C) memcpy(last, c->context, (size_t)C * sizeof(int64_t));
  while (goes_on) {
    if (C && c->length - c->steps[0] > 1) {
      n = guess(c, count, min64(c->d.nodes, count + c->length - c->steps[0] - 1), last);
      guessed = n - count, count = n;
    }
    if (!run_chain_forward(c, n, num_threads, parallel, team_size)) break;
    const int64_t before = c->steps[0];
    double prob = 0;
    forwards++, goes_on = 0;
    for (int64_t b = 0; b < B; b++) {
      const int64_t own = forwards == 1 && B > 1 ? c->counts[b] : count;
      if (on[b]) on[b] = follow_chain(c, b, n, own, guessed, next_tokens, next + b);
      goes_on |= on[b];
      prob += expf(c->paths[(b * c->length + c->steps[b] - 1) * k]) / (float)B;
    }
    if (prob < c->min_prob) break;
    for (int64_t t = before; C && t < c->steps[0]; t++) {
      memmove(last, last + 1, (size_t)(C - 1) * sizeof(int64_t));
      last[C - 1] = c->ids[t * k];
    }
    n = count = 1, guessed = 0;
    for (int64_t b = 0; b < B; b++) c->tokens[b] = on[b] ? next[b] : 0; /* what rows that have ended read is not kept */
  }
  for (int64_t b = 0; b < B; b++) finish_chain(c, b);
  return forwards;
}
