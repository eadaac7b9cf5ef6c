/* What the experts of a decoder (experts.h) need of memory and order; included by decoder_types.h. */

/* Matrix `number` of those of `rows` rows that lie behind each other in w, which is of a float type. */
static inline weights matrix_at(const weights *w, int64_t number, int64_t rows) {
  return (weights){
      .data = (const char *)w->data + bytes_of_rows(w->type, number * rows, w->cols),
      .rows = rows,
      .cols = w->cols,
      .type = w->type,
  };
}

/* Numbers of the arrays of `decoding` for experts. */
static int64_t expert_floats(const decoder *d) {
  const int64_t R = d->batch * d->nodes, slots = R * d->experts_per_token;
  if (!d->num_experts) return 0;
  return align16(R * (d->num_experts + 1)) + align16(slots) + align16((slots + R) * d->hidden_size) + 3 * align16(2 * slots) +
         align16(2 * (d->num_experts + 1));
}

static void take_expert_arrays(decoding *s, float **scratch) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, slots = R * d->experts_per_token;
  s->routing = take_floats(scratch, R * (d->num_experts + 1));
  s->shares = take_floats(scratch, slots);
  s->returned = take_floats(scratch, (slots + R) * d->hidden_size);
  s->chosen = (int64_t *)take_floats(scratch, 2 * slots);
  s->slots = (int64_t *)take_floats(scratch, 2 * slots);
  s->places = (int64_t *)take_floats(scratch, 2 * slots);
  s->starts = (int64_t *)take_floats(scratch, 2 * (d->num_experts + 1));
}

/* The slots of one node in the order of their experts. */
static void sort_slots_of_node(int64_t *chosen, float *shares, int64_t count) {
  for (int64_t i = 1; i < count; i++)
    for (int64_t j = i; j && chosen[j - 1] > chosen[j]; j--) {
      const int64_t expert = chosen[j];
      const float share = shares[j];
      chosen[j] = chosen[j - 1], shares[j] = shares[j - 1];
      chosen[j - 1] = expert, shares[j - 1] = share;
    }
}

/* `slots`, `places` and `starts` from `chosen`, by counting. */
static void sort_slots(const decoding *s) {
  const decoder *d = s->d;
  const int64_t count = d->batch * d->nodes * d->experts_per_token, E = d->num_experts;
  memset(s->starts, 0, (size_t)(E + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < count; i++) s->starts[s->chosen[i]]++;
  for (int64_t e = 1; e <= E; e++) s->starts[e] += s->starts[e - 1]; /* where each ends */
  for (int64_t i = count - 1; i >= 0; i--) {
    s->places[i] = --s->starts[s->chosen[i]];
    s->slots[s->places[i]] = i;
  }
}
