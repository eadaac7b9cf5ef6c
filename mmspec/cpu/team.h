/* Where the threads of one call wait for one another and share what there is to do; included in few_rows.c.

   A barrier of OpenMP spins for milliseconds: where other processes want the processors too, a thread that waits keeps one
   from the thread that it waits for. This one sleeps soon, and then the system lets the other thread run there. */

#define SPIN_CYCLES (1 << 17) /* before a thread sleeps; to wake one takes about as long */

typedef int (*team_size_fn)(void); /* omp_get_num_threads */

typedef struct {
  team_size_fn size_of_region;      /* NULL where one thread works alone */
  int64_t ticket;                   /* threads that have started */
  int size, arrived, turn, sleepers;
} team;

#define MOST_CHUNKS 64 /* that a thread takes at once */

/* Work of the threads of one call. */
typedef struct {
  void (*worker)(void *);
  void *data;
  int64_t threads;
} region;

static __thread int64_t sharers = 1; /* threads of the region in which this one works */

/* Consecutive chunks that a thread has taken. */
typedef struct {
  int64_t at, end;
} run;

/* Chunks of `count` that no thread has taken; `at` is `end` if none is left. Memory is read faster in the order of its
   addresses, so they are many at first; they are few at last, when threads should be done together. */
static run take_run(int64_t *next, int64_t count) {
  run r = {__atomic_load_n(next, __ATOMIC_RELAXED), 0};
  do {
    if (r.at >= count) return (run){count, count};
    const int64_t share = (count - r.at) / (2 * sharers);
    r.end = sharers == 1 ? count : r.at + share;
    if (r.end > r.at + MOST_CHUNKS) r.end = r.at + MOST_CHUNKS;
    if (r.end == r.at) r.end++;
  } while (!__atomic_compare_exchange_n(next, &r.at, r.end, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return r;
}

/* The number of this thread. Called first by each. */
static int64_t join(team *t) {
  __atomic_store_n(&t->size, t->size_of_region ? t->size_of_region() : 1, __ATOMIC_RELAXED);
  return __atomic_fetch_add(&t->ticket, 1, __ATOMIC_RELAXED);
}

/* Wait until all threads have come here. */
static void meet(team *t) {
  const int turn = __atomic_load_n(&t->turn, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&t->arrived, 1, __ATOMIC_ACQ_REL) == __atomic_load_n(&t->size, __ATOMIC_RELAXED)) {
    t->arrived = 0;
    __atomic_store_n(&t->turn, turn + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&t->sleepers, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &t->turn, FUTEX_WAKE_PRIVATE, INT_MAX);
    return;
  }
  for (const uint64_t start = __rdtsc(); __rdtsc() - start < SPIN_CYCLES; _mm_pause())
    if (__atomic_load_n(&t->turn, __ATOMIC_ACQUIRE) != turn) return;
  __atomic_add_fetch(&t->sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&t->turn, __ATOMIC_ACQUIRE) == turn) syscall(SYS_futex, &t->turn, FUTEX_WAIT_PRIVATE, turn, NULL);
  __atomic_sub_fetch(&t->sleepers, 1, __ATOMIC_RELAXED);
}
