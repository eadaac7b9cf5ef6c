/* Chains that a decoder drafts by itself, one behind each row of its cache. A forward reads what a row has not read yet
   and, where there is one row, the likeliest next tokens by counts of n-grams: those that it confirms need no forward of
   their own. All in one call. */

#define MAX_CHAIN_ROWS 128 /* `MAX_DECODER_ROWS` of decoder.py */

typedef struct {
  decoder d; /* `nodes`: room for the nodes of a row; `max_keys` likewise; what depends on a forward is set here */
  const int64_t *unread, *counts; /* [batch, most_unread] tokens to begin with; [batch] of each row, at least 1 */
  int64_t most_unread, length, top_k, max_nodes, num_biases, num_stop; /* length: most tokens of a chain */
  const float *bias;   /* [num_biases], added to the logits */
  const float *noise;  /* [batch, length, num_biases], subtracted from the logits divided by `temperature`; or NULL */
  const int64_t *stop; /* [num_stop] tokens that end a chain */
  float temperature, logit_scale, logit_softcap, level_penalty;
  float min_prob; /* mean probability of the rows' chains below which they end */
  const ngram_table *table; /* counts, or NULL for no guesses */
  const int64_t *context;   /* [max_context] the last tokens, the unread ones included, NO_TOKEN in front */
  const double *costs;      /* [d.nodes] of a forward of 1, 2, ... nodes, relative to the first */
  double min_unseen, trust; /* trust: factor of what the counts promise */
  /* memory: [batch, d.nodes], ancestors [batch, d.nodes, d.nodes]; [batch] and [num_biases] */
  int64_t *tokens, *depths, *lengths;
  uint8_t *ancestors;
  float *z;
  /* candidates [batch, length, top_k]: tokens after each step, log probabilities of their paths, parents among them */
  int64_t *ids, *parents, *place;
  float *paths;
  /* results: a tree as that of `draft`; positions that each row has read; tokens of each row's chain */
  int64_t *tree_tokens, *tree_parents;
  float *tree_scores;
  uint8_t *tree_mask;
  int64_t *num_read, *steps;
  double *seconds;    /* [d.nodes + 1] of forwards of so many nodes, and */
  int64_t *forwards;  /* their number */
  double expected;    /* guesses that were expected to be right, */
  int64_t num_right;  /* and that were */
} chain;

typedef void (*next_tokens_fn)(const chain *, const void *, const float *, float *, int64_t *, float *);
