/* The likeliest next tokens by logits; included after decoder.h. */

/* Store the first n numbers of x, of tokens v and following, to `z`, and keep them among the W largest so far, falling; of
   equals the first. */
INLINE void NAME(keep_largest)(VEC x, int64_t v, int64_t n, float *z, int64_t W, float *top, int64_t *token) {
  float lanes[LANES];
  STORE(lanes, x);
  memcpy(z, lanes, (size_t)n * sizeof(float));
  if (!ANY_ABOVE(x, SET1(top[W - 1]))) return;
  for (int64_t i = 0; i < n; i++) {
    if (!(lanes[i] > top[W - 1])) continue;
    int64_t j = W - 1;
    for (; j > 0 && lanes[i] > top[j - 1]; j--) top[j] = top[j - 1], token[j] = token[j - 1];
    top[j] = lanes[i], token[j] = v + i;
  }
}

/* The logarithm of the sum of the exponentials of z [V] relative to its largest number, `top`. */
INLINE float NAME(log_sum)(const float *z, int64_t V, float top) {
  float lanes[LANES], sum = 0;
  VEC sums = ZERO();
  int64_t v = 0;
  for (; v + LANES <= V; v += LANES) sums += NAME(exp)(LOAD(z + v) - SET1(top));
  STORE(lanes, sums);
  for (int i = 0; i < LANES; i++) sum += lanes[i];
  STORE(lanes, NAME(exp)(NAME(load_part)(z + v, V - v) - SET1(top)));
  for (int64_t i = 0; i < V - v; i++) sum += lanes[i];
  return logf(sum);
}

/* The W likeliest tokens after a node of a chain, falling, with their log probabilities, from its logits of the decoder's
   type. `noise` [V] or NULL; `z` [V] is scratch memory. */
__attribute__((target(ISA))) static void NAME(next_tokens)(const chain *c, const void *logits, const float *noise,
                                                          float *z, int64_t *token, float *log_prob) {
  const int64_t V = min64(c->d.vocab_size, c->num_biases), W = c->top_k;
  const VEC scale = SET1(c->logit_scale), cap = SET1(c->logit_softcap), one = SET1(1.0f);
  const VEC factor = SET1(noise ? 1.0f / c->temperature : 1.0f);
  for (int64_t i = 0; i < W; i++) log_prob[i] = -INFINITY, token[i] = 0;
  widen(logits, c->d.type, V, z);
  for (int64_t v = 0; v < V; v += LANES) {
    const int64_t n = min64(LANES, V - v);
    VEC x = NAME(load_some)(z + v, n) * scale;
    if (c->logit_softcap) x = cap * (one - SET1(2.0f) / (NAME(exp)(SET1(2.0f) * x / cap) + one));
    x = (x + NAME(load_some)(c->bias + v, n)) * factor;
    if (noise) x -= NAME(load_some)(noise + v, n);
    NAME(keep_largest)(x, v, n, z + v, W, log_prob, token);
  }
  const float top = log_prob[0], total = NAME(log_sum)(z, V, top);
  for (int64_t i = 0; i < W; i++) log_prob[i] = log_prob[i] - top - total;
}
