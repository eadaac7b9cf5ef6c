/* The parts of mixers.h between the projections, over whole prompts; included by few_rows.c.

   The tokens of a prompt are read one after the other, by the arithmetic of the nodes of a round: the state behind them has the
   same bits however a text is divided into calls. Of a state a block of columns stays in the first cache meanwhile, and
   what a token writes, what it reads and what the next one finds take one pass over it. */

#define PROMPT_STEP 32 /* tokens whose queries and keys, or channels, are kept at once */

/* A gated delta rule; with `skip` a state space, whose q, k and v are C, B and x, and which rounds nothing, as transformers
   reads prompts. Of each token and head the numbers of q, k and v lie side by side. */
typedef struct {
  const void *q, *k, *v;       /* [batch, tokens, heads, size] of `type` */
  const int64_t *steps;        /* [3, 3] numbers from a row, a token, a head of q, k and v to the next */
  const float *decay, *write;  /* [batch, tokens, num_value_heads] logarithm of the decay; what is written, or the step */
  const float *skip;           /* [num_value_heads] factor of v in the output; NULL: a delta rule */
  void *out;                   /* [batch, tokens, num_value_heads, value_size] of `type`, of a state space float32 */
  float *state;                /* [batch, num_value_heads, key_size, value_size] before the tokens, then behind them; of a
                                  state space the last two swapped */
  int64_t batch, tokens, num_key_heads, num_value_heads;
  int64_t key_size, value_size; /* key_size: at most MOST_KEYS */
  int64_t type;
} delta_prompt;

/* A convolution of each channel, then SiLU if wanted. There are zeros before the first token. */
typedef struct {
  const void *x;            /* [batch, tokens, channels] of `type`; the channels lie side by side */
  int64_t row_step, token_step;
  const float *taps, *bias; /* [conv_size, channels]; [channels] or NULL */
  void *out;                /* [batch, tokens, channels] of `type` */
  int64_t batch, tokens, channels;
  int64_t conv_size;        /* at most MOST_TAPS */
  int64_t has_silu, type;
} conv_prompt;

/* What the threads share. */
typedef struct {
  const delta_prompt *p;
  int64_t columns; /* blocks of columns of a value head that a thread takes at once */
  int64_t next;
} delta_work;

typedef struct {
  const conv_prompt *p;
  int64_t next;
} conv_work;

/* Tokens `begin` to `end` of value head h of row b, whose queries and keys are `pairs`, over a block of its state. */
INLINE void NAME(read_tokens)(const delta_prompt *p, int64_t b, int64_t h, int64_t begin, int64_t end, const float *pairs,
                              int64_t first, float *block) {
  const int64_t D = p->key_size, V = p->value_size, H = p->num_value_heads, bytes = float_bytes(p->type);
  const int64_t n = min64(2 * LANES, V - first), *const step = p->steps + 6;
  const float *const decay = p->decay + b * p->tokens * H + h, *const rate = p->write + b * p->tokens * H + h;
  float row[2 * LANES] = {0};
  VEC found[2] = {ZERO(), ZERO()};
  NAME(pass)(block, D, NULL, NULL, NULL, pairs, SET1(expf(decay[begin * H])), found);
  for (int64_t t = begin; t < end; t++, pairs += 2 * D) {
    widen((const char *)p->v + (b * step[0] + t * step[1] + h * step[2] + first) * bytes, p->type, n, row);
    const VEC share = SET1(rate[t * H]);
    const VEC write[2] = {(LOAD(row) - found[0]) * share, (LOAD(row + LANES) - found[1]) * share};
    VEC read[2] = {ZERO(), ZERO()};
    found[0] = found[1] = ZERO();
    if (t + 1 < end)
      NAME(pass)(block, D, pairs, write, read, pairs + 2 * D, SET1(expf(decay[(t + 1) * H])), found);
    else
      NAME(pass)(block, D, pairs, write, read, NULL, ZERO(), NULL);
    STORE(row, NAME(round)(read[0], p->type)), STORE(row + LANES, NAME(round)(read[1], p->type));
    narrow(row, p->type, n, (char *)p->out + (((b * p->tokens + t) * H + h) * V + first) * bytes);
    if (n < 2 * LANES) memset(row, 0, sizeof row);
  }
}

/* The same of a state space; `pairs` are C, and B times the time step. */
INLINE void NAME(scan_tokens)(const delta_prompt *p, int64_t b, int64_t h, int64_t begin, int64_t end, const float *pairs,
                              int64_t first, float *block) {
  const int64_t D = p->key_size, V = p->value_size, H = p->num_value_heads, bytes = float_bytes(p->type);
  const int64_t *const step = p->steps + 6, n = min64(2 * LANES, V - first);
  float x[2 * LANES], found[2 * LANES];
  for (int64_t t = begin; t < end; t++, pairs += 2 * D) {
    const int64_t at = (b * p->tokens + t) * H + h;
    widen((const char *)p->v + (b * step[0] + t * step[1] + h * step[2] + first) * bytes, p->type, n, x);
    NAME(scan)(block, n, D, pairs + D, pairs, expf(p->decay[at]), x, found, FLOAT32);
    for (int64_t r = 0; r < n; r++) ((float *)p->out)[at * V + first + r] = fmaf(x[r], p->skip[h], found[r]);
  }
}

__attribute__((target(ISA))) static void NAME(read_prompts)(void *data) {
  delta_work *const w = data;
  const delta_prompt *const p = w->p;
  const int64_t D = p->key_size, V = p->value_size, H = p->num_value_heads, bytes = float_bytes(p->type);
  const int64_t width = w->columns * 2 * LANES, parts = ceil_div(V, width), *const q = p->steps, *const k = q + 3;
  float block[MOST_KEYS * 2 * LANES] __attribute__((aligned(64))), pairs[PROMPT_STEP * 2 * MOST_KEYS], wide[2 * MOST_KEYS];
  for (int64_t task = take(&w->next); task < p->batch * H * parts; task = take(&w->next)) {
    const int64_t b = task / parts / H, h = task / parts % H, key_head = h / (H / p->num_key_heads);
    const int64_t left = task % parts * width, right = min64(V, left + width);
    float *const state = p->state + (b * H + h) * D * V;
    for (int64_t begin = 0; begin < p->tokens; begin += PROMPT_STEP) {
      const int64_t end = min64(p->tokens, begin + PROMPT_STEP);
      for (int64_t t = begin; t < end; t++) {
        widen((const char *)p->q + (b * q[0] + t * q[1] + key_head * q[2]) * bytes, p->type, D, wide);
        widen((const char *)p->k + (b * k[0] + t * k[1] + key_head * k[2]) * bytes, p->type, D, wide + D);
        float *const pair = pairs + (t - begin) * 2 * D;
        if (!p->skip) NAME(normalise_pair)(wide, wide + D, D, pair);
        for (int64_t i = 0; p->skip && i < D; i++)
          pair[i] = wide[i], pair[D + i] = wide[D + i] * p->write[(b * p->tokens + t) * H + h];
      }
      for (int64_t first = left; first < right; first += 2 * LANES) {
        NAME(load_block)(state, D, V, first, !!p->skip, block);
        if (p->skip)
          NAME(scan_tokens)(p, b, h, begin, end, pairs, first, block);
        else
          NAME(read_tokens)(p, b, h, begin, end, pairs, first, block);
        NAME(store_block)(block, D, V, first, !!p->skip, state);
      }
    }
  }
}

__attribute__((target(ISA))) static void NAME(convolve_prompts)(void *data) {
  conv_work *const w = data;
  const conv_prompt *const p = w->p;
  const int64_t T = p->tokens, C = p->channels, K = p->conv_size, type = p->type, bytes = float_bytes(type);
  const int64_t steps = ceil_div(T, PROMPT_STEP), blocks = ceil_div(C, CHANNELS);
  for (int64_t task = take(&w->next); task < p->batch * steps * blocks; task = take(&w->next)) {
    const int64_t b = task / blocks / steps, begin = task / blocks % steps * PROMPT_STEP, end = min64(T, begin + PROMPT_STEP);
    const int64_t first = task % blocks * CHANNELS, n = min64(CHANNELS, C - first);
    float rows[(MOST_TAPS + PROMPT_STEP) * CHANNELS] = {0}; /* the first K - 1 lie before `begin` */
    for (int64_t t = max64(0, begin - K + 1); t < end; t++) {
      const char *const from = (const char *)p->x + (b * p->row_step + t * p->token_step + first) * bytes;
      widen(from, type, n, rows + (t - begin + K - 1) * CHANNELS);
    }
    for (int64_t t = 0; t < end - begin; t++) {
      float *const row = rows + t * CHANNELS; /* which later tokens do not read */
      for (int64_t c = 0; c < n; c += LANES) {
        VEC sum = p->bias ? NAME(load_some)(p->bias + first + c, n - c) : ZERO();
        for (int64_t k = 0; k < K; k++)
          sum = FMA(NAME(load_some)(p->taps + k * C + first + c, n - c), LOAD(row + k * CHANNELS + c), sum);
        sum = NAME(round)(sum, type);
        STORE(row + c, p->has_silu ? NAME(round)(sum * NAME(sigmoid)(sum), type) : sum);
      }
      narrow(row, type, n, (char *)p->out + ((b * T + begin + t) * C + first) * bytes);
    }
  }
}
