/* Checks of draft trees and the walk along the sampled ids, as in engine/tree.py and engine/accept.py: B rows, N nodes. */

/* `tokens`, `parents`, `mask` [B, N] as drafted. Results: the same, checked; `ancestors` [B, N, N]; `depths` [B, N]. `valid`
   and `ended` [N] are scratch memory: whether a node is well formed; whether one of its ancestors ends the row. */
EXPORT void few_rows_sanitize(int64_t B, int64_t N, const int64_t *tokens, const int64_t *parents, const uint8_t *mask,
                              const int64_t *roots, const uint8_t *draftable, int64_t V, const int64_t *stop, int64_t E,
                              int64_t *out_tokens, int64_t *out_parents, uint8_t *out_mask, uint8_t *ancestors,
                              int64_t *depths, uint8_t *valid, uint8_t *ended) {
  memset(ancestors, 0, (size_t)(B * N * N));
  for (int64_t b = 0; b < B; b++) {
    const int64_t *const t = tokens + b * N, *const p = parents + b * N;
    for (int64_t i = 0; i < N; i++)
      valid[i] = mask[b * N + i] && t[i] >= 0 && t[i] < V && draftable[t[i]] && p[i] >= 0 && p[i] < i;
    for (int64_t i = N - 1; i >= 0; i--) { /* from the last on, so that those before are not dropped yet */
      int64_t token = valid[i] ? t[i] : 0, parent = valid[i] ? p[i] : 0;
      for (int64_t j = 0; valid[i] && j < i; j++)
        if (valid[j] && p[j] == p[i] && t[j] == t[i]) valid[i] = 0, token = parent = 0;
      if (!i) token = roots[b], parent = -1, valid[i] = 1;
      out_tokens[b * N + i] = token, out_parents[b * N + i] = parent;
    }
    for (int64_t i = 0; i < N; i++) {
      const int64_t parent = out_parents[b * N + i];
      uint8_t *const own = ancestors + (b * N + i) * N;
      if (i) memcpy(own, ancestors + (b * N + parent) * N, (size_t)N);
      own[i] = 1;
      depths[b * N + i] = i ? depths[b * N + parent] + 1 : 0;
      ended[i] = i && ended[parent];
      for (int64_t e = 0; parent > 0 && e < E; e++) ended[i] |= out_tokens[b * N + parent] == stop[e];
      valid[i] = valid[i] && (!i || valid[parent]);
      out_mask[b * N + i] = valid[i] && !ended[i];
    }
  }
}

/* Follow `sampled` [B, N] from node 0 of each row of sanitized trees. `finished` [B] or NULL. Results: `path` and `emitted`
   [B, N], 0 and the first sampled id behind their end; `counts` [B]. */
EXPORT void few_rows_accept(int64_t B, int64_t N, const int64_t *tokens, const int64_t *parents, const uint8_t *mask,
                            const int64_t *sampled, const int64_t *max_emit, const int64_t *stop, int64_t E,
                            const uint8_t *finished, int64_t *path, int64_t *counts, int64_t *emitted) {
  for (int64_t b = 0; b < B; b++) {
    const int64_t first = b * N;
    int64_t n = 1, node = 0;
    path[first] = 0;
    for (int64_t i = 1; i < N; i++)
      if (parents[first + i] == node && mask[first + i] && tokens[first + i] == sampled[first + node])
        path[first + n++] = node = i;
    for (int64_t i = n; i < N; i++) path[first + i] = 0;
    for (int64_t i = 0; i < N; i++) emitted[first + i] = sampled[first + path[first + i]];
    n = min64(n, max_emit[b]);
    for (int64_t i = 0; i < n && !(finished && finished[b]); i++)
      for (int64_t e = 0; e < E; e++)
        if (emitted[first + i] == stop[e]) n = i + 1;
    counts[b] = n;
  }
}
