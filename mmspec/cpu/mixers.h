/* Layers of a decoder that keep a state in place of keys and values, for one instruction set; included by decoder.h.

   A short convolution (LFM2) multiplies two parts of a projection, convolves the product channel by channel and multiplies
   the result with the third. A gated delta rule (Qwen3.5) convolves queries, keys and values; then each value head
   lets its state decay, writes to it what differs from the value that the key finds there, and reads it by the query. A
   state space (Mamba-2) writes its value times the key, and rounds as transformers decodes one token. A
   node reads the state behind its parent, which is copied for all children but the last. The states of a row stay as they
   are: what a commit needs of the nodes is written beside them, all of it where the row is in the caches. */

#define CHANNELS 64 /* that a thread takes at once */

/* The decay of the state of each value head and what it writes (a state space: its time step, which transformers limits in
   prompts alone), from the products of one node. */
INLINE void NAME(rates)(const decoder_layer *l, const float *write, float *to, int64_t type) {
  const int64_t H = l->num_value_heads, kept = l->skip ? type : FLOAT32;
  for (int64_t h = 0; h < H; h++) {
    const float x = round1(write[l->write.rows + h] + round1(l->decay_bias[h], kept), kept);
    const float step = round1(x > 20 ? x : log1pf(expf(x)), kept);
    to[h] = -expf(l->decay_log[h]) * step;
    to[H + h] = l->skip ? step : round1(1 / (1 + expf(-write[h])), type);
  }
}

/* The parent of each node of row b; -1 of the first. */
static inline void find_parents(const decoder *d, int64_t b, int64_t *parents) {
  for (int64_t n = 0; n < d->nodes; n++) {
    parents[n] = n - 1;
    if (!d->ancestors) continue;
    const uint8_t *const own = d->ancestors + (b * d->nodes + n) * d->span + d->span - d->nodes;
    while (parents[n] > 0 && !own[parents[n]]) parents[n]--;
  }
}

/* Channels `first` to `last` of row b: the window, and the convolution of the nodes to `out` [nodes, step]. */
INLINE void NAME(convolve)(const decoding *s, const decoder_layer *l, int64_t b, int64_t first, int64_t last, float *out,
                           int64_t step) {
  const decoder *d = s->d;
  const int64_t N = d->nodes, K = l->conv_size, C = l->channels, bytes = float_bytes(d->type), type = d->type;
  const int64_t cached = cache_row(d, b);
  float window[MOST_TAPS + MAX_NODES];
  int64_t parents[MAX_NODES];
  uint8_t read[MAX_NODES * MOST_TAPS]; /* where in the window each node reads, for each tap */
  find_parents(d, b, parents);
  for (int64_t n = 0; n < N; n++) {
    for (int64_t k = 0; k < K - 1; k++) read[n * K + k] = n ? read[parents[n] * K + k + 1] : (uint8_t)(k + 1);
    read[n * K + K - 1] = (uint8_t)(K + n);
  }
  for (int64_t c = first; c < last; c++) {
    const float *row = s->qkv + b * N * d->mixer_width + c, *const taps = l->conv + c * K;
    widen((const char *)l->conv_state + (cached * C + c) * K * bytes, type, K, window);
    for (int64_t n = 0; n < N; n++, row += d->mixer_width) window[K + n] = l->z.data ? *row : round1(*row * row[2 * C], type);
    narrow(window, type, K + N, (char *)l->conv_window + (cached * C + c) * (K + N) * bytes);
    for (int64_t n = 0; n < N; n++) {
      float sum = l->conv_bias ? l->conv_bias[c] : 0;
      for (int64_t k = 0; k < K; k++) sum = fmaf(taps[k], window[read[n * K + k]], sum); /* as `convolve_prompts` */
      out[n * step + c] = round1(sum, type);
    }
  }
}

/* A block of the state `from` [key_size, V] of a value head: columns from `first` on, at most 2 LANES of them, as
   [key_size, 2, LANES]; of a state space [V, key_size] as many rows, as they lie. */
INLINE void NAME(load_block)(const float *from, int64_t D, int64_t V, int64_t first, int in_rows, float *block) {
  if (in_rows) {
    memcpy(block, from + first * D, (size_t)(min64(2 * LANES, V - first) * D) * sizeof(float));
    return;
  }
  from += first;
  for (int64_t i = 0; i < D; i++, from += V)
    for (int64_t j = 0; j < 2; j++) {
      const int64_t n = V - first - j * LANES;
      STORE(block + (2 * i + j) * LANES, n > 0 ? NAME(load_some)(from + j * LANES, n) : ZERO());
    }
}

INLINE void NAME(store_block)(const float *block, int64_t D, int64_t V, int64_t first, int in_rows, float *to) {
  if (in_rows) {
    memcpy(to + first * D, block, (size_t)(min64(2 * LANES, V - first) * D) * sizeof(float));
    return;
  }
  to += first;
  for (int64_t i = 0; i < D; i++, to += V)
    for (int64_t j = 0; j < 2 && first + j * LANES < V; j++)
      NAME(store_some)(to + j * LANES, LOAD(block + (2 * i + j) * LANES), V - first - j * LANES);
}

/* A query and a key of one head as a state is read, [2, D]: divided by their lengths, the query by sqrt(D) besides. */
INLINE void NAME(normalise_pair)(const float *q, const float *k, int64_t D, float *pair) {
  VEC squares[4] = {ZERO(), ZERO(), ZERO(), ZERO()};
  float sums[4];
  for (int64_t i = 0; i < D; i += LANES) {
    const VEC a = NAME(load_some)(q + i, D - i), b = NAME(load_some)(k + i, D - i);
    squares[0] = FMA(a, a, squares[0]), squares[1] = FMA(b, b, squares[1]);
  }
  _mm_storeu_ps(sums, NAME(sum4)(squares));
  const VEC q_scale = SET1(1 / sqrtf(sums[0] + 1e-6f) / sqrtf((float)D)), k_scale = SET1(1 / sqrtf(sums[1] + 1e-6f));
  for (int64_t i = 0; i < D; i += LANES) {
    const VEC a = NAME(load_some)(q + i, D - i) * q_scale, b = NAME(load_some)(k + i, D - i) * k_scale;
    NAME(store_some)(pair + i, a, D - i), NAME(store_some)(pair + D + i, b, D - i);
  }
}

/* One pass over a block: what node `now` writes by its key, and reads by its query, unless `now` is NULL; then it decays, and
   `next` finds what is there by its key, unless `next` is NULL. Both are of `normalise_pair`. */
INLINE void NAME(pass)(float *block, int64_t D, const float *now, const VEC *write, VEC *read, const float *next, VEC decay,
                       VEC *found) {
  for (int64_t i = 0; i < D; i++) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      float *const at = block + (2 * i + j) * LANES;
      VEC s = LOAD(at);
      if (now) s = FMA(write[j], SET1(now[D + i]), s), read[j] = FMA(s, SET1(now[i]), read[j]);
      if (next) s = s * decay, found[j] = FMA(s, SET1(next[D + i]), found[j]);
      STORE(at, s);
    }
  }
}

/* Let a block of a state read logged node n. What the node reads there goes to `out`, rounded, unless it is NULL. */
INLINE void NAME(delta_rule)(const decoder_layer *l, int64_t n, int64_t h, int64_t first, float *block, float *out, int64_t type) {
  const int64_t H = l->num_value_heads, D = l->key_size, V = l->value_size, key_head = h / (H / l->num_key_heads);
  const int64_t n0 = V - first, n1 = max64(0, V - first - LANES);
  const float *const q = l->mixed + n * l->channels + key_head * D, *const k = q + l->num_key_heads * D;
  const float *const v = l->mixed + n * l->channels + 2 * l->num_key_heads * D + h * V + first;
  const float *const rates = l->rates + 2 * n * H + h;
  float pair[2 * MOST_KEYS];
  VEC found[2] = {ZERO(), ZERO()}, read[2] = {ZERO(), ZERO()};
  NAME(normalise_pair)(q, k, D, pair);
  NAME(pass)(block, D, NULL, NULL, NULL, pair, SET1(expf(rates[0])), found);
  found[0] = (NAME(load_some)(v, n0) - found[0]) * SET1(rates[H]);
  if (n1) found[1] = (NAME(load_some)(v + LANES, n1) - found[1]) * SET1(rates[H]);
  NAME(pass)(block, D, pair, found, read, NULL, ZERO(), NULL);
  if (!out) return;
  NAME(store_some)(out, NAME(round)(read[0], type), n0);
  if (n1) NAME(store_some)(out + LANES, NAME(round)(read[1], type), n1);
}

/* One token in n rows [D] of a state space: they decay, `write` [D] times the token's x is added, and `read` [D] reads them,
   to `found`. What is written, and what is read, is rounded to `type`. */
INLINE void NAME(scan)(float *block, int64_t n, int64_t D, const float *write, const float *read, float decay, const float *x,
                       float *found, int64_t type) {
  for (int64_t r = 0; r < n; r += 4) {
    const int64_t rows = min64(4, n - r);
    VEC sums[4] = {ZERO(), ZERO(), ZERO(), ZERO()};
    float four[4];
    for (int64_t j = 0; j < rows; j++)
      for (int64_t i = 0; i < D; i += LANES) {
        float *const at = block + (r + j) * D + i;
        const VEC written = NAME(round)(NAME(load_some)(write + i, D - i) * SET1(x[r + j]), type);
        const VEC s = FMA(NAME(load_some)(at, D - i), SET1(decay), written);
        NAME(store_some)(at, s, D - i);
        sums[j] = FMA(NAME(round)(s, type), NAME(load_some)(read + i, D - i), sums[j]);
      }
    _mm_storeu_ps(four, NAME(sum4)(sums));
    memcpy(found + r, four, (size_t)rows * sizeof(float));
  }
}

/* Let a block of a state space read logged node n, as `delta_rule`. */
INLINE void NAME(scan_node)(const decoder_layer *l, int64_t n, int64_t h, int64_t first, float *block, float *out) {
  const int64_t H = l->num_value_heads, D = l->key_size, V = l->value_size, rows = min64(2 * LANES, V - first);
  const int64_t type = l->state_type, group = h / (H / l->num_key_heads);
  const float *const x = l->mixed + n * l->channels + h * V + first, *const rates = l->rates + 2 * n * H + h;
  const float *const B = l->mixed + n * l->channels + H * V + group * D, *const C = B + l->num_key_heads * D;
  float write[MOST_KEYS], found[2 * LANES];
  for (int64_t i = 0; i < D; i++) write[i] = round1(rates[H] * B[i], type);
  NAME(scan)(block, rows, D, write, C, expf(rates[0]), x, found, type);
  for (int64_t r = 0; out && r < rows; r++)
    out[r] = round1(round1(found[r], type) + round1(x[r] * l->skip[h], type), type);
}

INLINE void NAME(read_node)(const decoder_layer *l, int64_t n, int64_t h, int64_t first, float *block, float *out, int64_t type) {
  if (l->skip)
    NAME(scan_node)(l, n, h, first, block, out);
  else
    NAME(delta_rule)(l, n, h, first, block, out, type);
}

/* The same block behind each node of row b, at `own`, which must have room for `nodes` of them: what the nodes read to
   `attended`, the block behind the last node to `next_state`. */
INLINE void NAME(read_nodes)(const decoding *s, const decoder_layer *l, int64_t b, int64_t h, int64_t first, float *own) {
  const decoder *d = s->d;
  const int64_t N = d->nodes, V = l->value_size, D = l->key_size, width = l->num_value_heads * V, size = D * 2 * LANES;
  const int64_t cached = cache_row(d, b), state = (cached * l->num_value_heads + h) * D * V;
  int64_t parents[MAX_NODES], last_child[MAX_NODES], used = 1;
  float *blocks[MAX_NODES] = {own};
  find_parents(d, b, parents);
  for (int64_t n = 1; n < N; n++) last_child[parents[n]] = n;
  NAME(load_block)(l->state + state, D, V, first, !!l->skip, own);
  for (int64_t n = 0; n < N; n++) {
    if (n && last_child[parents[n]] == n) {
      blocks[n] = blocks[parents[n]];
    } else if (n) {
      blocks[n] = own + size * used++;
      memcpy(blocks[n], blocks[parents[n]], (size_t)size * sizeof(float));
    }
    NAME(read_node)(l, cached * N + n, h, first, blocks[n], s->attended + (b * N + n) * width + h * V + first, d->type);
  }
  NAME(store_block)(blocks[N - 1], D, V, first, !!l->skip, l->next_state + state);
}

/* The states of one layer behind the first counts[b] of the nodes of `path` [batch, steps], to `to`. */
__attribute__((target(ISA))) static void NAME(advance)(const decoder_layer *l, int64_t batch, int64_t N, const int64_t *path,
                                                      int64_t steps, const int64_t *counts, float *to) {
  const int64_t H = l->num_value_heads, D = l->key_size, V = l->value_size;
  float block[MOST_KEYS * 2 * LANES] __attribute__((aligned(64)));
  for (int64_t i = 0; i < batch * H; i++)
    for (int64_t first = 0; first < V; first += 2 * LANES) {
      const int64_t b = i / H, h = i % H;
      NAME(load_block)(l->state + i * D * V, D, V, first, !!l->skip, block);
      for (int64_t n = 0; n < counts[b]; n++)
        NAME(read_node)(l, b * N + path[b * steps + n], h, first, block, NULL, FLOAT32);
      NAME(store_block)(block, D, V, first, !!l->skip, to + i * D * V);
    }
}

/* What the heads have read, normalised and gated, in place. */
INLINE void NAME(gate_heads)(const decoding *s, const decoder_layer *l, int64_t *next) {
  const decoder *d = s->d;
  const int64_t H = l->num_value_heads, V = l->value_size, type = d->type;
  for (int64_t task = take(next); task < d->batch * d->nodes * H; task = take(next)) {
    float *const x = s->attended + task * V;
    const float *const z = s->qkv + task / H * d->mixer_width + l->channels + task % H * V;
    const VEC scale = SET1(NAME(inverse_rms)(x, V, d->eps));
    for (int64_t k = 0; k < V; k += LANES) {
      const VEC gate = NAME(load_some)(z + k, V - k), v = NAME(round)(NAME(load_some)(x + k, V - k) * scale, type);
      const VEC scaled = NAME(round)(v * NAME(load_some)(l->mix_scale + k, V - k), type);
      NAME(store_some)(x + k, NAME(round)(scaled * (gate * NAME(sigmoid)(gate)), type), V - k);
    }
  }
  meet(s->team);
}

/* What the heads of a state space have read, gated, then normalised in as many groups as B has, in place. */
INLINE void NAME(gate_groups)(const decoding *s, const decoder_layer *l, int64_t *next) {
  const decoder *d = s->d;
  const int64_t G = l->num_key_heads, size = l->num_value_heads * l->value_size / G, type = d->type;
  for (int64_t task = take(next); task < d->batch * d->nodes * G; task = take(next)) {
    float *const x = s->attended + task * size;
    const float *const z = s->qkv + task / G * d->mixer_width + l->channels + task % G * size;
    for (int64_t k = 0; k < size; k += LANES) {
      const VEC gate = NAME(load_some)(z + k, size - k), v = NAME(load_some)(x + k, size - k);
      NAME(store_some)(x + k, v * (gate * NAME(sigmoid)(gate)), size - k);
    }
    const VEC scale = SET1(NAME(inverse_rms)(x, size, d->eps));
    for (int64_t k = 0; k < size; k += LANES) {
      const VEC v = NAME(round)(NAME(load_some)(x + k, size - k) * scale, type);
      const VEC scaled = v * NAME(load_some)(l->mix_scale + task % G * size + k, size - k);
      NAME(store_some)(x + k, NAME(round)(scaled, type), size - k);
    }
  }
  meet(s->team);
}

/* A gated delta rule or a state space, from the products to `attended`. */
INLINE void NAME(mix_heads)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const decoder *d = s->d;
  const int64_t N = d->nodes, H = l->num_value_heads, V = l->value_size, C = l->channels, type = d->type;
  const int64_t blocks = ceil_div(C, CHANNELS), columns = ceil_div(V, 2 * LANES);
  for (int64_t task = take(next + ATTEND_PHASE); task < d->batch * blocks; task = take(next + ATTEND_PHASE)) {
    const int64_t b = task / blocks, first = task % blocks * CHANNELS, last = min64(C, first + CHANNELS);
    const int64_t logged = cache_row(d, b) * N;
    float *const mixed = l->mixed + logged * C;
    NAME(convolve)(s, l, b, first, last, mixed, C);
    for (int64_t n = 0; n < N; n++) {
      for (int64_t c = first; c < last; c += LANES) {
        const VEC v = NAME(load_some)(mixed + n * C + c, last - c);
        NAME(store_some)(mixed + n * C + c, NAME(round)(v * NAME(sigmoid)(v), type), last - c);
      }
      if (!first)
        NAME(rates)(l, s->qkv + (b * N + n) * d->mixer_width + C + H * V, l->rates + 2 * (logged + n) * H, type);
    }
  }
  meet(s->team);
  for (int64_t task = take(next + READ_PHASE); task < d->batch * H * columns; task = take(next + READ_PHASE))
    NAME(read_nodes)(s, l, task / columns / H, task / columns % H, task % columns * 2 * LANES, own);
  meet(s->team);
  if (l->skip)
    NAME(gate_groups)(s, l, next + GATE_HEADS_PHASE);
  else
    NAME(gate_heads)(s, l, next + GATE_HEADS_PHASE);
}

/* A layer's convolution and what follows, with its projections, from `x` to `x`. */
INLINE void NAME(mixer)(const decoding *s, const decoder_layer *l, float *own, int64_t *next) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size, N = d->nodes, C = l->channels, H = l->num_value_heads;
  const int64_t V = H * l->value_size, blocks = ceil_div(C, CHANNELS);
  const int type = (int)d->type;
  float *const z = s->qkv + C;
  const part in[] = {{&l->q, l->q_bias, s->qkv, l->q.rows}, {&l->z, NULL, z, V}, {&l->write, NULL, z + V, l->write.rows},
                     {&l->decay, NULL, z + V + l->write.rows, H}};
  NAME(pack_rows)(d, &l->q, s->x, R, l->input_norm, own + normed_at(d), own);
  NAME(multiply_parts)(&(rows){own, R, D, d->mixer_width, 0, type, 0}, in, l->z.data ? 4 : 1, next + QKV_PHASE);
  meet(s->team);
  if (l->z.data) {
    NAME(mix_heads)(s, l, own, next);
  } else {
    for (int64_t task = take(next + ATTEND_PHASE); task < d->batch * blocks; task = take(next + ATTEND_PHASE)) {
      const int64_t b = task / blocks, first = task % blocks * CHANNELS, last = min64(C, first + CHANNELS);
      NAME(convolve)(s, l, b, first, last, s->attended + b * N * C, C);
      for (int64_t r = b * N; r < (b + 1) * N; r++)
        for (int64_t c = first; c < last; c++)
          s->attended[r * C + c] = round1(s->attended[r * C + c] * s->qkv[r * d->mixer_width + C + c], type);
    }
    meet(s->team);
  }
  NAME(project_out)(s, l, own, next);
}
