// The memory of windows on the host: buffers with a reference count, and a pool of slots that lends
// them. Plain C and C++, no Python and no GIL. Who holds what:
//   - a slot that is free keeps its last buffer, so that the next window finds warm memory;
//   - a lease (one window) holds its slot and one reference to the slot's buffer;
//   - an export (DLPack, numpy view) holds one reference to the buffer and nothing else.
// When a lease ends while exports live, the slot goes back without the buffer: the next lease of
// the slot gets other memory, and the buffer dies with its last export. A pool lives until its
// owner and all leases are gone.
#ifndef KALOS_WINDOW_BUFFER_H
#define KALOS_WINDOW_BUFFER_H

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KALOS_WINDOW_ALIGN 64u               // bytes
#define KALOS_WINDOW_MIN_TOKENS 1024u        // smallest buffer; larger ones are powers of two ...
#define KALOS_WINDOW_STEP_TOKENS (1u << 20)  // ... and from here on multiples of this
#define KALOS_WINDOW_MAX_TOKENS ((uint64_t)1 << 31)

typedef struct kalos_buffer {
  int32_t* data;      // KALOS_WINDOW_ALIGN bytes aligned
  uint64_t capacity;  // tokens
  uint64_t dirty;   // tokens from the start that may have been written since the buffer was zeroed
  uint64_t tenant;  // who wrote them
  uint32_t refs;    // atomic
} kalos_buffer;

typedef struct kalos_pool {
  pthread_mutex_t lock;
  pthread_cond_t freed;
  kalos_buffer**
      buffers;  // the free slots' buffers, the warmest last; NULL: the slot has no memory yet
  uint32_t num_slots;
  uint32_t num_free;
  uint32_t num_waiting;
  uint32_t refs;  // atomic: the owner and the leases
} kalos_pool;

typedef struct kalos_lease {
  kalos_pool* pool;  // NULL: nothing is leased
  kalos_buffer* buffer;
} kalos_lease;

// ---- Buffers --------------------------------------------------------------------------------
static inline void kalos_buffer_ref(kalos_buffer* buffer) {
  __atomic_fetch_add(&buffer->refs, 1, __ATOMIC_RELAXED);
}

static inline void kalos_buffer_unref(kalos_buffer* buffer) {
  if (buffer && __atomic_sub_fetch(&buffer->refs, 1, __ATOMIC_ACQ_REL) == 0) {
    free(buffer->data);
    free(buffer);
  }
}

// Room for num_tokens, zeroed. NULL: no memory.
static kalos_buffer* kalos_buffer_new(uint64_t num_tokens) {
  uint64_t capacity = KALOS_WINDOW_MIN_TOKENS;
  while (capacity < num_tokens && capacity < KALOS_WINDOW_STEP_TOKENS) capacity *= 2;
  if (capacity < num_tokens)
    capacity = (num_tokens + KALOS_WINDOW_STEP_TOKENS - 1) / KALOS_WINDOW_STEP_TOKENS *
               KALOS_WINDOW_STEP_TOKENS;
  kalos_buffer* buffer = (kalos_buffer*)calloc(1, sizeof *buffer);
  void* data = NULL;
  if (!buffer || posix_memalign(&data, KALOS_WINDOW_ALIGN, capacity * sizeof(int32_t)) != 0) {
    free(buffer);
    return NULL;
  }
  memset(data, 0, capacity * sizeof(int32_t));
  buffer->data = (int32_t*)data;
  buffer->capacity = capacity;
  buffer->refs = 1;
  return buffer;
}

// ---- The pool -------------------------------------------------------------------------------
static kalos_pool* kalos_pool_new(uint32_t num_slots) {
  kalos_pool* pool = (kalos_pool*)calloc(1, sizeof *pool);
  kalos_buffer** buffers = (kalos_buffer**)calloc(num_slots, sizeof *buffers);
  pthread_condattr_t attributes;
  if (!pool || !buffers || pthread_condattr_init(&attributes) != 0) {
    free(pool);
    free(buffers);
    return NULL;
  }
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->freed, &attributes);
  pthread_condattr_destroy(&attributes);
  pool->buffers = buffers;
  pool->num_slots = pool->num_free = num_slots;
  pool->refs = 1;
  return pool;
}

static void kalos_pool_unref(kalos_pool* pool) {
  if (!pool || __atomic_sub_fetch(&pool->refs, 1, __ATOMIC_ACQ_REL) != 0) return;
  for (uint32_t i = 0; i < pool->num_free; ++i) kalos_buffer_unref(pool->buffers[i]);
  pthread_cond_destroy(&pool->freed);
  pthread_mutex_destroy(&pool->lock);
  free(pool->buffers);
  free(pool);
}

static uint32_t kalos_pool_num_free(kalos_pool* pool) {
  pthread_mutex_lock(&pool->lock);
  uint32_t num_free = pool->num_free;
  pthread_mutex_unlock(&pool->lock);
  return num_free;
}

static void kalos_pool_put(kalos_pool* pool, kalos_buffer* buffer) {
  pthread_mutex_lock(&pool->lock);
  pool->buffers[pool->num_free++] = buffer;
  if (pool->num_waiting > 0) pthread_cond_signal(&pool->freed);
  pthread_mutex_unlock(&pool->lock);
}

// Take a free slot, waiting until `deadline` (CLOCK_MONOTONIC; NULL: do not wait). 0 or ETIMEDOUT.
static int kalos_pool_take(kalos_pool* pool, const struct timespec* deadline,
                           kalos_buffer** buffer) {
  int status = 0;
  pthread_mutex_lock(&pool->lock);
  while (pool->num_free == 0 && deadline && status == 0) {
    ++pool->num_waiting;
    status = pthread_cond_timedwait(&pool->freed, &pool->lock, deadline);
    --pool->num_waiting;
  }
  status = pool->num_free == 0 ? ETIMEDOUT : 0;
  if (status == 0) *buffer = pool->buffers[--pool->num_free];
  pthread_mutex_unlock(&pool->lock);
  return status;
}

// ---- Leases
// ------------------------------------------------------------------------------------------- Lease
// a slot with room for num_tokens. What another tenant left in the memory is zeroed first. 0,
// ETIMEDOUT (no slot is free) or ENOMEM.
static int kalos_lease_begin(kalos_lease* lease, kalos_pool* pool, uint64_t num_tokens,
                             uint64_t tenant, const struct timespec* deadline) {
  kalos_buffer* buffer = NULL;
  if (kalos_pool_take(pool, deadline, &buffer) != 0) return ETIMEDOUT;
  if (buffer && buffer->capacity < num_tokens) {
    kalos_buffer_unref(buffer);
    buffer = NULL;
  }
  if (!buffer && !(buffer = kalos_buffer_new(num_tokens))) {
    kalos_pool_put(pool, NULL);
    return ENOMEM;
  }
  if (buffer->tenant != tenant) {
    memset(buffer->data, 0, buffer->dirty * sizeof(int32_t));
    buffer->dirty = 0;
    buffer->tenant = tenant;
  }
  if (buffer->dirty < num_tokens) buffer->dirty = num_tokens;
  __atomic_fetch_add(&pool->refs, 1, __ATOMIC_RELAXED);
  lease->pool = pool;
  lease->buffer = buffer;
  return 0;
}

// Give the slot back. Calling it twice is harmless.
static void kalos_lease_end(kalos_lease* lease) {
  kalos_pool* pool = lease->pool;
  kalos_buffer* buffer = lease->buffer;
  if (!pool) return;
  lease->pool = NULL;
  lease->buffer = NULL;
  // References are only ever added through the lease, so a count of one cannot grow again behind
  // our back.
  if (__atomic_load_n(&buffer->refs, __ATOMIC_ACQUIRE) != 1) {
    kalos_buffer_unref(buffer);
    buffer = NULL;
  }
  kalos_pool_put(pool, buffer);
  kalos_pool_unref(pool);
}

#endif  // KALOS_WINDOW_BUFFER_H
