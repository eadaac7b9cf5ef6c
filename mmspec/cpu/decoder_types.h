/* A stack of decoder layers, described by its traits, and one forward of it over the nodes of a tree in every row.

   With weights of 16 bits every number that the modules of transformers round to 16 bits is rounded here too: the outputs
   of products, norms, rotations, attention, activations and sums. Between them all is float32. */

enum { SILU, GELU_TANH, RELU_SQUARED }; /* `GATE_ACTIVATIONS` of layers.py */
enum { EACH_HEAD, ALL_HEADS, ROTATED_HEADS }; /* `HEAD_NORMS` of layers.py */

/* A vector of weights that is read as float32 numbers plus an offset: it is copied at the start of each forward. */
typedef struct {
  const void *from; /* [n] of the decoder's type */
  float *to;
  int64_t n;
  double offset;
} vector;

/* Weights of one layer, [out, in]; NULL where there is none (`gate`: no feed-forward; `up`: no gate; `k`: keys and values
   are those of an earlier layer; `conv`: attention). All of q, k, v and `head_gate` are quantised or none is, and so with
   gate and up, and with q, z, `write` and `decay`. */
typedef struct {
  const float *input_norm;
  weights q, k, v, head_gate; /* `head_gate`: [num_heads, D] of what the output of each head is multiplied by */
  const float *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;
  weights o;
  const float *o_bias, *post_norm;
  weights gate, up;
  const float *gate_bias, *up_bias;
  weights down;
  const float *down_bias;
  const float *attention_out_norm, *mlp_out_norm; /* of what the two parts add to the residual; NULL for none */
  weights router; /* of experts [num_experts, hidden_size]; then there is no `up`, and the experts' matrices lie behind each
                     other: gate and up of each in `gate`, and `down`; without biases, of a float type */
  const float *router_bias;                    /* [num_experts] added to probabilities to choose by; NULL for none */
  weights shared_gate, shared_up, shared_down; /* of a feed-forward beside the experts that all nodes have */
  weights shared_router;                       /* [1, hidden_size] of the gate of what that returns */
  void *keys, *values; /* [rows, num_kv_heads, capacity, head_dim]; the nodes are written behind each row's length */
  int64_t num_kv_heads, head_dim, rotary_size; /* of this layer; `head_dim` 0: those of the decoder */
  weights per_layer_gate, per_layer_out; /* of per-layer inputs, [per_layer_size, hidden_size] and its transpose */
  const float *per_layer_norm;           /* of what they add */
  int64_t number;                        /* of the layer, in the per-layer inputs */
  const float *output_scale;             /* [1] factor of the layer's output */
  /* A layer with a convolution (mixers.h) in place of attention; q gives what is convolved, o takes the result. */
  const float *conv, *conv_bias; /* [channels, conv_size], [channels] */
  int64_t channels, conv_size;   /* conv_size: at most MOST_TAPS */
  const void *conv_state; /* [rows, channels, conv_size] of the decoder's type: the last inputs of each channel */
  void *conv_window;      /* [rows, channels, conv_size + nodes] the same and the inputs of the nodes */
  /* One with a gated delta rule behind its convolution, whose channels are queries, keys and values; or, with `skip`, a
     state space (Mamba-2), whose channels are x (values), B (keys) and C (queries), and which has no `write`. */
  weights z, write, decay; /* of the gate [num_value_heads * value_size, D]; [num_value_heads, D] of the two rates */
  const float *decay_log, *decay_bias, *mix_scale; /* [num_value_heads] twice; [value_size], of a state space all heads' */
  const float *skip; /* [num_value_heads] factor of x in the output (D); NULL: a delta rule */
  int64_t num_key_heads, num_value_heads, key_size, value_size;
  const float *state;    /* [rows, num_value_heads, key_size, value_size]; the last two swapped of a state space */
  float *next_state;     /* the same behind the last node of each row */
  float *mixed, *rates;  /* [rows * nodes, channels]; [rows * nodes, 2, num_value_heads] logarithm of decay, write or step */
  int64_t state_type;    /* to which a state space rounds what it writes and reads: the decoder's */
  /* A layer of a block of positions whose two parts each stand between two mixtures of neighbours (dspark.h). */
  weights attention_changes, mlp_changes; /* [2 * num_taps * groups, D]: of a normalised input, what is added to the taps */
  const float *attention_taps, *mlp_taps; /* [2, num_taps, D] */
  int64_t num_taps;                       /* 0 for none */
  const float *cos, *sin; /* [P, rotary_size] of this layer; NULL: those of the decoder */
  float *hidden;          /* [batch * nodes, hidden_size] output of the layer, or NULL */
  int64_t capacity;
  int64_t window; /* positions that a node sees, its own included; 0 for all */
} decoder_layer;

/* Node n of row b has index r = b * nodes + n. */
typedef struct {
  int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size, num_embeddings;
  int64_t batch, nodes;
  int64_t span;            /* last positions to which `ancestors` applies; at least `nodes` */
  int64_t max_keys;        /* positions of the longest row, the nodes included */
  int64_t max_position;    /* largest cache position with a rotary position of its own; the following share it */
  int64_t num_angles;      /* P */
  int64_t padding_length;  /* columns of `padding` */
  int64_t type;            /* float type of weights, keys, values and logits, to which numbers are rounded */
  int64_t attention_type;  /* of the products of attention: `type`, or BFLOAT16_PAIRS */
  int64_t rotary_size;     /* first numbers of a head that are rotated */
  int64_t is_interleaved;  /* whether number 2 i is rotated with 2 i + 1, else i with i + rotary_size / 2 */
  int64_t activation;
  int64_t head_norms;      /* what `q_norm` and `k_norm` normalise */
  int64_t rounds_twice;    /* whether norms round before they multiply by the weight, and after */
  int64_t is_eager;        /* whether scores and normalised weights of attention are rounded, as its eager kernel does */
  int64_t num_vectors;
  int64_t num_experts, expert_size, experts_per_token; /* of all layers with a router */
  int64_t normalises_shares, rounds_shares; /* whether a node's shares add to 1; are rounded to `type` */
  int64_t is_sigmoid, rounds_routing; /* whether a router has a sigmoid, else a softmax; its logits are rounded to `type` */
  int64_t adds_in_type; /* whether what experts return is added in their order, each sum rounded */
  int64_t gates_attention;   /* whether q has behind each head a gate of its output */
  int64_t gates_heads;       /* whether layers with attention have `head_gate` */
  int64_t normalises_values; /* whether values are divided by their root mean square */
  int64_t is_parallel;       /* whether attention and feed-forward read the same input */
  int64_t is_centred;        /* whether norms subtract the mean first */
  int64_t hides_nodes;       /* whether nodes attend to committed positions alone, and have no keys */
  int64_t mixer_width, mixer_size; /* of layers with a convolution: most numbers of a node before it, and behind it */
  int64_t per_layer_size;          /* numbers of a node's input of one layer; 0 for none */
  const vector *vectors;
  const decoder_layer *layers;
  weights embeddings; /* [num_embeddings, hidden_size], of a float type */
  weights per_layer_embeddings, per_layer_in; /* [num_embeddings, N], [N, hidden_size], N = layers * per_layer_size */
  const float *per_layer_norm;                /* [per_layer_size] of the product with `per_layer_in` */
  const float *final_norm;
  weights lm_head;
  const float *lm_head_bias;
  const float *cos, *sin;          /* [P, rotary_size] */
  const int64_t *tokens, *depths;  /* [batch, nodes] */
  const int64_t *lengths;          /* [batch] committed positions */
  const int64_t *cache_rows;       /* [batch] where in keys and values a row is; NULL: row b is there row b */
  const int64_t *position_base;    /* [batch] rotary position of cache position 0, if all positions were text */
  const uint8_t *ancestors;        /* [batch, nodes, span]: whether a node attends to a position; NULL: to all */
  const uint8_t *padding;          /* [batch, padding_length]: 0 at committed positions that are masked; or NULL */
  float *embedded;                 /* [batch * nodes, hidden_size] input of the first layer, or NULL */
  float *normed;                   /* [batch * nodes, hidden_size] output of the final norm, or NULL */
  void *logits;                    /* [batch * nodes, vocab_size] of `type` */
  float *scratch;
  float eps, scaling; /* of all norms; of the scores */
  float embed_scale, attention_softcap; /* factor of embeddings; limit of scores, 0 for none */
  float residual_scale; /* factor of what is added to the residual */
  float share_scale;    /* factor of the shares of experts */
  float per_layer_embed_scale, per_layer_in_scale, per_layer_scale; /* of embeddings, product, and their sum */
} decoder;

/* What the threads of one forward share. */
typedef struct {
  const decoder *d;
  team *team;
  int64_t *next;      /* decoder_phases(): in each phase, the work that is taken; those of the layers are the last */
  int64_t *positions; /* [R] */
  const float *attention_inputs; /* [R, 2 D] of the attention, normalised (EAGLE-3); NULL: x, which the layer normalises */
  float *x, *qkv, *attended, *activated, *own;
  float *per_layer; /* [R, per_layer_in.rows] inputs of all layers */
  float *branch;  /* [R, D] what a part adds to the residual, before its norm; what experts read */
  float *partial; /* [batch, num_kv_heads, num_parts, heads, nodes] of attention: values, largest score, sum of weights */
  int64_t *done;  /* [batch, num_kv_heads] tasks of attention that are done */
  float *routing;  /* [R, num_experts + 1] logits of the router, and of the gate of `shared_router` */
  float *shares;   /* [R, experts_per_token] of each slot */
  float *returned; /* [R * experts_per_token + R, D] what experts return, in the order of `slots`, and the shared one */
  int64_t *chosen; /* [R, experts_per_token] the expert of each slot */
  int64_t *slots;  /* [R * experts_per_token] in the order of their experts */
  int64_t *places; /* [R, experts_per_token] where each slot is in `slots` */
  int64_t *starts; /* [num_experts + 1] where the slots of each expert begin in `slots` */
} decoding;

/* Consecutive positions of the cache of row b, to which the queries of key-value head h attend at once. */
typedef struct {
  int64_t b, h, number;   /* of the part */
  int64_t origin;         /* of the row's parts */
  int64_t begin, end;     /* committed positions; the nodes follow if these are the last */
  int64_t T;              /* positions, nodes included */
  int is_divided;         /* whether some nodes belong to another part */
} stretch;

#define MOST_QUERIES 6  /* that are multiplied at once */
#define MANY_QUERIES 64 /* whose scores are kept at once */
#define VALUES 32       /* positions whose values are weighed at once */
#ifdef TILES
#define KEPT_VALUES 128 /* rows of values, of one position or two, that are kept */
#else
#define KEPT_VALUES VALUES
#endif
#define MOST_LAYER_INPUTS 1024 /* `per_layer_size` */
#define MAX_LANES 16
#define MOST_TAPS 16  /* of a convolution */
#define MOST_KEYS 256 /* `key_size` */
#define MAX_NODES 128 /* `MAX_DECODER_ROWS` of decoder.py */
#ifndef PART
#define PART 256 /* positions that are attended to at once */
#endif

/* Phases of a forward besides those of its layers. */
enum { LOGITS_PHASE, LAYER_INPUTS_PHASE, COMBINE_INPUTS_PHASE, DECODER_PHASES };
/* Of one layer: attention or a mixer, feed-forward, what is added, inputs of a layer, taps of both halves. */
enum {
  QKV_PHASE, HEAD_NORMS_PHASE, ATTEND_PHASE, O_PHASE, READ_PHASE, GATE_HEADS_PHASE,
  GATE_PHASE, ACTIVATE_PHASE, DOWN_PHASE, ADD_ATTENTION_PHASE, ADD_MLP_PHASE,
  INPUT_GATE_PHASE, INPUT_PRODUCT_PHASE, INPUT_OUT_PHASE, ADD_INPUT_PHASE,
  TAP_NORM_PHASE, TAP_CHANGES_PHASE, MIX_BEFORE_PHASE, MIX_BEHIND_PHASE, TAP_PHASES_END,
  LAYER_PHASES = 2 * TAP_PHASES_END - TAP_NORM_PHASE
};
/* Of a layer with experts, besides two for each of them. */
enum {
  EXPERT_NORM_PHASE, ROUTER_PHASE, CHOOSE_PHASE, CHOSEN_PHASE, SHARED_GATE_PHASE, SHARED_DOWN_PHASE, ADD_EXPERTS_PHASE,
  EXPERT_PHASES
};

static inline int64_t align16(int64_t n) { return (n + 15) / 16 * 16; }
static inline int64_t layer_phases(const decoder *d) {
  return LAYER_PHASES + (d->num_experts ? EXPERT_PHASES + 2 * d->num_experts : 0);
}
static inline int64_t decoder_phases(const decoder *d) { return DECODER_PHASES + layer_phases(d) * d->num_layers; }
static inline int64_t query_heads(const decoder *d) { return d->num_heads * (d->gates_attention ? 2 : 1); }
/* Numbers of a node before attention: queries, keys, values, and a gate of each head. */
static inline int64_t qkv_width(const decoder *d) {
  return (query_heads(d) + 2 * d->num_kv_heads) * d->head_dim + (d->gates_heads ? d->num_heads : 0);
}

/* The decoder with the sizes of one layer; without them it has the largest. */
static inline decoder sizes_of(const decoder *d, const decoder_layer *l) {
  decoder sizes = *d;
  if (l->head_dim) sizes.num_kv_heads = l->num_kv_heads, sizes.head_dim = l->head_dim, sizes.rotary_size = l->rotary_size;
  return sizes;
}

/* Attention takes the cache in parts and combines what it finds in each. They are counted in positions behind the row's
   left padding, of which a node has as many before it in any tree, so that the order of its sums is the same in each. Eager
   attention of 16 bits rounds weights that are normalised over all positions: there all are one part. */
static inline int64_t part_size(const decoder *d) { return d->is_eager && d->type != FLOAT32 ? INT64_MAX / 2 : PART; }
static inline int64_t num_parts(const decoder *d) { return (max64(d->max_keys, 1) - 1) / part_size(d) + 1; }

static inline int64_t cache_row(const decoder *d, int64_t b) { return d->cache_rows ? d->cache_rows[b] : b; }

/* The first position of row b that is not masked. */
static inline int64_t origin_of(const decoder *d, int64_t b) {
  const int64_t most = min64(d->padding_length, d->lengths[b]);
  int64_t n = 0;
  while (d->padding && n < most && !d->padding[b * d->padding_length + n]) n++;
  return n;
}

/* The part of node n of row b. */
static inline int64_t part_of_node(const decoder *d, int64_t b, int64_t origin, int64_t n) {
  const int64_t depth = d->depths ? d->depths[b * d->nodes + n] : 0;
  return min64((d->lengths[b] + depth - origin) / part_size(d), num_parts(d) - 1);
}

/* Numbers of a rotated query; of what was found in one part: values, largest score, sum of weights. */
static inline int64_t query_step(const decoder *d) { return ceil_div(d->head_dim, MAX_LANES) * MAX_LANES; }
static inline int64_t partial_floats(const decoder *d) { return query_step(d) + MAX_LANES; }

static int64_t all_partial_floats(const decoder *d, int64_t R) {
  return R * d->num_heads * num_parts(d) * partial_floats(d);
}

/* Of the queries of one key-value head [heads, nodes]. */
static inline float *partial_at(const decoding *s, int64_t b, int64_t h, int64_t number) {
  const decoder *d = s->d;
  const int64_t queries = d->num_heads / d->num_kv_heads * d->nodes;
  return s->partial + ((b * d->num_kv_heads + h) * num_parts(d) + number) * queries * partial_floats(d);
}

static float *take_floats(float **scratch, int64_t n) {
  float *const taken = *scratch;
  *scratch += align16(n);
  return taken;
}

#include "routing.h"

/* Numbers of the arrays of `decoding` that are in the scratch, int64 counted twice. */
static int64_t shared_floats(const decoder *d) {
  const int64_t R = d->batch * d->nodes;
  return expert_floats(d) + align16(2 * decoder_phases(d)) + align16(2 * R) + 2 * align16(R * d->hidden_size) +
         align16(R * max64(qkv_width(d), d->mixer_width)) + align16(R * max64(d->num_heads * d->head_dim, d->mixer_size)) +
         align16(R * d->intermediate_size) + align16(R * d->per_layer_in.rows) + align16(2 * d->batch * d->num_kv_heads) +
         align16(all_partial_floats(d, R));
}

/* Columns of the widest rows that are multiplied: those of a draft head's input are twice as wide. */
static inline int64_t widest_row(const decoder *d) {
  return max64(max64(2 * d->hidden_size, d->intermediate_size), max64(d->num_heads * d->head_dim, d->mixer_size));
}

/* Where a thread's arrays are in its scratch: packed rows, scores of MANY_QUERIES queries, queries of one key-value head,
   keys or values in float32, normalised or gathered rows. */
static inline int64_t scores_at(const decoder *d) {
  return align16(packed_rows(d->batch * d->nodes) * (widest_row(d) + MAX_LANES));
}
static inline int64_t queries_at(const decoder *d) {
  return scores_at(d) + MANY_QUERIES * align16(min64(d->max_keys, part_size(d) + d->nodes) + 2 * MAX_LANES);
}
static inline int64_t tile_at(const decoder *d) {
  return queries_at(d) + d->num_heads / d->num_kv_heads * d->nodes * query_step(d);
}
static inline int64_t normed_at(const decoder *d) {
  return tile_at(d) + query_step(d) * KEPT_VALUES;
}

/* Numbers that one thread needs. */
static int64_t thread_floats(const decoder *d) {
  const int is_normed = d->type != FLOAT32 || d->num_experts || d->is_centred;
  int64_t most = normed_at(d), blocks = 0; /* those of a delta rule's state, before anything else is there */
  for (int64_t i = 0; i < d->num_layers; i++) {
    const decoder sizes = sizes_of(d, d->layers + i);
    most = max64(most, normed_at(&sizes));
    blocks = max64(blocks, d->layers[i].key_size * 2 * MAX_LANES * d->nodes);
  }
  return max64(blocks, most + (is_normed ? align16(d->batch * d->nodes * d->hidden_size) : 0));
}

/* Bytes of the weights of the first layer. */
static inline int64_t layer_bytes(const decoder *d) {
  const decoder_layer *const l = d->layers;
  if (!d->num_layers) return 0;
  return weight_bytes(&l->q) + weight_bytes(&l->k) + weight_bytes(&l->v) + weight_bytes(&l->o) + weight_bytes(&l->gate) +
         weight_bytes(&l->up) + weight_bytes(&l->down);
}

/* Vectors that a forward reads as float32 numbers. */
static void copy_vectors(const decoder *d) {
  for (const vector *v = d->vectors; v < d->vectors + d->num_vectors; v++) {
    widen(v->from, d->type, v->n, v->to);
    for (int64_t i = 0; v->offset && i < v->n; i++) v->to[i] += (float)v->offset;
  }
}

/* Divide the scratch, copy vectors, look up the embeddings; 0 if a token or a position is out of range. */
__attribute__((target("avx2,fma,f16c"))) static int begin_decoding(decoding *s) {
  const decoder *d = s->d;
  const int64_t R = d->batch * d->nodes, D = d->hidden_size;
  float *scratch = d->scratch;
  s->next = (int64_t *)take_floats(&scratch, 2 * decoder_phases(d));
  s->positions = (int64_t *)take_floats(&scratch, 2 * R);
  s->x = take_floats(&scratch, R * D);
  s->branch = take_floats(&scratch, R * D);
  s->qkv = take_floats(&scratch, R * max64(qkv_width(d), d->mixer_width));
  s->attended = take_floats(&scratch, R * max64(d->num_heads * d->head_dim, d->mixer_size));
  s->activated = take_floats(&scratch, R * d->intermediate_size);
  s->per_layer = take_floats(&scratch, R * d->per_layer_in.rows);
  s->done = (int64_t *)take_floats(&scratch, 2 * d->batch * d->num_kv_heads);
  s->partial = take_floats(&scratch, all_partial_floats(d, R));
  if (d->num_experts) take_expert_arrays(s, &scratch);
  s->own = scratch;
  memset(s->done, 0, (size_t)(d->batch * d->num_kv_heads) * sizeof(int64_t));
  memset(s->next, 0, (size_t)decoder_phases(d) * sizeof(int64_t));
  for (int64_t r = 0; r < R; r++) {
    const int64_t b = r / d->nodes, token = d->tokens[r];
    const int64_t position = d->position_base[b] + min64(d->lengths[b] + d->depths[r], d->max_position);
    if (token < 0 || token >= d->num_embeddings || position < 0 || position >= d->num_angles) return 0;
    s->positions[r] = position;
    widen_row(&d->embeddings, token, s->x + r * D);
  }
  for (int64_t i = 0; d->embed_scale != 1 && i < R * D; i++) s->x[i] = round1(s->x[i] * d->embed_scale, d->type);
  copy_vectors(d);
  if (d->embedded) memcpy(d->embedded, s->x, (size_t)(R * D) * sizeof(float));
  return 1;
}
