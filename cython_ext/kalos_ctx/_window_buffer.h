// The memory of windows: buffers with a reference count, and a pool of slots that lends them.
// Plain C and C++, no Python and no GIL. A buffer on the host is memory from malloc; one of a GPU
// is device memory, and pinned host memory for the same tokens. Who holds what:
//   - a lease (one window) holds its slot and one reference to a buffer;
//   - an export (DLPack, numpy view) holds one reference to the buffer and nothing else;
//   - a buffer without references lies idle in the pool, so that the next window finds warm memory.
// A lease that ends gives its slot back at once. Where exports live on, the next lease gets other
// memory, and the buffer comes back with its last export. The pool's owner may end first: then what
// comes back is freed. The pool itself lives until its owner, all leases and all buffers are gone.
//
// Work on a GPU may still use a buffer when the host no longer holds it. `ready` is an event, and
// `pending` says that work up to it may be under way: the writer's, a zero fill's, or that of
// readers. `readers` says who got the device memory, or may copy from the pinned memory behind the
// host's back; until an event stands for them (kalos_buffer_fence, kalos_pool_fence) nobody may
// write:
//   - default streams: an event on the legacy stream, which waits for the others of them;
//   - one stream of the caller: an event on it, recorded when the caller next names that stream (it
//     may have been destroyed before, so it is not touched at any other time);
//   - several, or unknown: nothing short of waiting for the whole context.
#ifndef KALOS_WINDOW_BUFFER_H
#define KALOS_WINDOW_BUFFER_H

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "_gpu.h"

#define KALOS_WINDOW_ALIGN 64u               // bytes
#define KALOS_WINDOW_MIN_TOKENS 1024u        // smallest buffer; larger ones are powers of two ...
#define KALOS_WINDOW_STEP_TOKENS (1u << 20)  // ... and from here on multiples of this
#define KALOS_WINDOW_MAX_TOKENS ((uint64_t)1 << 31)
#define KALOS_WINDOW_SPARES 64u  // idle buffers of a GPU that work may still use, before any waits
#define KALOS_WINDOW_LOOKS 32u   // idle buffers that a lease looks at
#define KALOS_WINDOW_QUERIES 4u  // and those whose event it asks for

enum { KALOS_READERS_NONE, KALOS_READERS_DEFAULT, KALOS_READERS_STREAM, KALOS_READERS_UNKNOWN };

struct kalos_pool;

typedef struct kalos_buffer {
  int32_t* data;             // host memory, KALOS_WINDOW_ALIGN bytes aligned; NULL: device alone
  kalos_cu_ptr device_data;  // 0 on the host
  kalos_cu_ptr mapped;       // the pinned memory's address on the device
  uint64_t capacity;         // tokens
  uint64_t dirty;   // tokens from the start that may have been written since the buffer was zeroed
  uint64_t tenant;  // who wrote them
  kalos_gpu* gpu;   // a reference; NULL: the host
  struct kalos_pool* home;  // a reference while the buffer is not idle; NULL: freed at the end
  struct kalos_buffer* next;
  kalos_cu_handle ready;
  kalos_cu_handle reader;  // the stream of KALOS_READERS_STREAM; a name, not to be used
  uint32_t readers;        // KALOS_READERS_*
  uint32_t pending;        // atomic
  uint32_t zeroing;        // what is pending is a zero fill of the device memory alone
  uint32_t refs;           // atomic
} kalos_buffer;

typedef struct kalos_pool {
  pthread_mutex_t lock;
  pthread_cond_t freed;
  kalos_buffer** idle;    // the warmest last
  kalos_gpu* gpu;         // NULL: buffers on the host; a reference
  uint32_t device_alone;  // buffers have no pinned memory
  uint32_t num_slots;
  uint32_t num_free;
  uint32_t num_waiting;
  uint32_t num_idle;
  uint32_t num_lent;  // atomic: idle buffers with readers on one stream
  uint32_t max_idle;
  uint32_t spares;  // idle buffers from which on a lease waits for one rather than add memory
  uint32_t closed;  // the owner is gone
  uint32_t refs;    // atomic: the owner, the leases, buffers that are not idle
} kalos_pool;

typedef struct kalos_lease {
  kalos_pool* pool;  // NULL: nothing is leased
  kalos_buffer* buffer;
} kalos_lease;

// A status is 0, an errno, or a driver's code with its sign turned.
static inline int kalos_status(kalos_cu_result code) { return code ? -code : 0; }

// ---- Buffers ----------------------------------------------------------------------------------
static inline void kalos_buffer_ref(kalos_buffer* buffer) {
  __atomic_fetch_add(&buffer->refs, 1, __ATOMIC_RELAXED);
}

static inline int kalos_buffer_pending(const kalos_buffer* buffer) {
  return __atomic_load_n(&buffer->pending, __ATOMIC_ACQUIRE) != 0;
}

static inline void kalos_buffer_done(kalos_buffer* buffer) {
  __atomic_store_n(&buffer->pending, 0, __ATOMIC_RELEASE);
}

// Work on the memory is under way until `stream` has done what it holds now. Context entered.
static inline kalos_cu_result kalos_buffer_mark(kalos_buffer* buffer, kalos_cu_handle stream) {
  kalos_cu_result code = buffer->gpu->driver->event_record(buffer->ready, stream);
  buffer->zeroing = 0;
  if (code == 0) __atomic_store_n(&buffer->pending, 1, __ATOMIC_RELEASE);
  return code;
}

// What `stream` gets from now on waits for work that is under way. Context entered.
static inline kalos_cu_result kalos_buffer_order(kalos_buffer* buffer, kalos_cu_handle stream) {
  if (!kalos_buffer_pending(buffer)) return 0;
  return buffer->gpu->driver->stream_wait(stream, buffer->ready, 0);
}

// Wait until no work is under way. Enters the context.
static inline kalos_cu_result kalos_buffer_settle(kalos_buffer* buffer) {
  if (!kalos_buffer_pending(buffer)) return 0;
  kalos_cu_result code = kalos_gpu_enter(buffer->gpu);
  if (code) return code;
  code = buffer->gpu->driver->event_synchronize(buffer->ready);
  kalos_gpu_leave(buffer->gpu);
  if (code == 0) kalos_buffer_done(buffer);
  return code;
}

// The same for the pinned memory, which a zero fill on the device does not concern.
static inline kalos_cu_result kalos_buffer_settle_host(kalos_buffer* buffer) {
  return buffer->zeroing ? 0 : kalos_buffer_settle(buffer);
}

// Somebody got the memory, to read it on `stream`; NULL: nobody knows where. With the GIL.
static inline void kalos_buffer_lend(kalos_buffer* buffer, kalos_cu_handle stream) {
  uint32_t readers = KALOS_READERS_STREAM;
  if (!buffer->gpu) return;
  if (!stream) {
    readers = KALOS_READERS_UNKNOWN;
  } else if (stream == KALOS_CU_STREAM_LEGACY || stream == KALOS_CU_STREAM_PER_THREAD) {
    readers = KALOS_READERS_DEFAULT;
  }
  if (buffer->readers == KALOS_READERS_NONE) {
    buffer->reader = stream;
    buffer->readers = readers;
  } else if (buffer->readers != readers ||
             (readers == KALOS_READERS_STREAM && buffer->reader != stream)) {
    buffer->readers = KALOS_READERS_UNKNOWN;
  }
}

// Let an event stand for readers on default streams, once no reference is left.
static inline void kalos_buffer_fence(kalos_buffer* buffer) {
  if (buffer->readers != KALOS_READERS_DEFAULT) return;
  kalos_cu_result code = kalos_gpu_enter(buffer->gpu);
  if (code == 0) {
    code = kalos_buffer_mark(buffer, KALOS_CU_STREAM_LEGACY);
    kalos_gpu_leave(buffer->gpu);
  }
  buffer->readers = code ? KALOS_READERS_UNKNOWN : KALOS_READERS_NONE;
}

static void kalos_buffer_free(kalos_buffer* buffer) {
  kalos_gpu* gpu = buffer->gpu;
  if (!gpu) {
    free(buffer->data);
  } else if (kalos_gpu_enter(gpu) == 0) {
    if (buffer->readers != KALOS_READERS_NONE) {
      gpu->driver->ctx_synchronize();
    } else if (kalos_buffer_pending(buffer)) {
      gpu->driver->event_synchronize(buffer->ready);
    }
    if (buffer->ready) gpu->driver->event_destroy(buffer->ready);
    kalos_gpu_free_pinned(gpu, buffer->data, buffer->capacity * sizeof(int32_t));
    kalos_gpu_free(gpu, buffer->device_data, buffer->capacity * sizeof(int32_t));
    kalos_gpu_leave(gpu);
  }
  kalos_gpu_unref(gpu);
  free(buffer);
}

// Zero device memory in the order of the GPU's own stream. Nothing is pending, context entered.
static kalos_cu_result kalos_buffer_zero(kalos_buffer* buffer, size_t nbytes) {
  kalos_cu_handle stream = buffer->gpu->stream;
  kalos_cu_result code = buffer->gpu->driver->fill_bytes(buffer->device_data, 0, nbytes, stream);
  if (code == 0) code = kalos_buffer_mark(buffer, stream);
  buffer->zeroing = code == 0;
  return code;
}

static inline uint64_t kalos_buffer_capacity(uint64_t num_tokens) {
  uint64_t capacity = KALOS_WINDOW_MIN_TOKENS;
  while (capacity < num_tokens && capacity < KALOS_WINDOW_STEP_TOKENS) capacity *= 2;
  if (capacity < num_tokens)
    capacity = (num_tokens + KALOS_WINDOW_STEP_TOKENS - 1) / KALOS_WINDOW_STEP_TOKENS *
               KALOS_WINDOW_STEP_TOKENS;
  return capacity;
}

// The memory of a GPU's buffer, zeroed: the device's in the order of the GPU's own stream.
static kalos_cu_result kalos_buffer_on_gpu(kalos_buffer* buffer, int device_alone) {
  kalos_gpu* gpu = buffer->gpu;
  size_t nbytes = buffer->capacity * sizeof(int32_t);
  kalos_cu_result code = kalos_gpu_enter(gpu);
  if (code) return code;
  code = gpu->driver->event_create(&buffer->ready, KALOS_CU_EVENT_DISABLE_TIMING);
  if (code) buffer->ready = NULL;
  if (code == 0) code = kalos_gpu_alloc(gpu, &buffer->device_data, nbytes);
  if (code == 0) code = kalos_buffer_zero(buffer, nbytes);
  if (code == 0 && !device_alone) {
    void* data = NULL;
    code = kalos_gpu_pin(gpu, &data, &buffer->mapped, nbytes);
    buffer->data = (int32_t*)data;
    if (code == 0) memset(data, 0, nbytes);
  }
  kalos_gpu_leave(gpu);
  if (code) kalos_buffer_lend(buffer, NULL);  // the fill may be under way
  return code;
}

// Room for num_tokens, zeroed, with one reference, in the memory of `gpu` (NULL: the host). A
// status.
static int kalos_buffer_new(kalos_gpu* gpu, int device_alone, uint64_t num_tokens,
                            kalos_buffer** made) {
  kalos_buffer* buffer = (kalos_buffer*)calloc(1, sizeof *buffer);
  if (!buffer) return ENOMEM;
  buffer->capacity = kalos_buffer_capacity(num_tokens);
  buffer->refs = 1;
  int status = 0;
  if (gpu) {
    buffer->gpu = gpu;
    kalos_gpu_ref(gpu);
    status = kalos_status(kalos_buffer_on_gpu(buffer, device_alone));
  } else {
    void* data = NULL;
    size_t nbytes = buffer->capacity * sizeof(int32_t);
    status = posix_memalign(&data, KALOS_WINDOW_ALIGN, nbytes);
    if (status == 0) memset(data, 0, nbytes);
    buffer->data = status == 0 ? (int32_t*)data : NULL;
  }
  if (status) {
    kalos_buffer_free(buffer);
    return status;
  }
  *made = buffer;
  return 0;
}

// ---- The pool ---------------------------------------------------------------------------------
// Buffers on the host, or on a GPU; `device_alone`: without pinned memory. NULL: no memory.
static kalos_pool* kalos_pool_new(uint32_t num_slots, kalos_gpu* gpu, int device_alone,
                                  uint32_t max_idle, uint32_t spares) {
  kalos_pool* pool = (kalos_pool*)calloc(1, sizeof *pool);
  kalos_buffer** idle = (kalos_buffer**)calloc(max_idle, sizeof *idle);
  pthread_condattr_t attributes;
  if (!pool || !idle || pthread_condattr_init(&attributes) != 0) {
    free(pool);
    free(idle);
    return NULL;
  }
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->freed, &attributes);
  pthread_condattr_destroy(&attributes);
  pool->idle = idle;
  pool->gpu = gpu;
  if (gpu) kalos_gpu_ref(gpu);
  pool->device_alone = (uint32_t)device_alone;
  pool->num_slots = pool->num_free = num_slots;
  pool->max_idle = max_idle;
  pool->spares = spares;
  pool->refs = 1;
  return pool;
}

static void kalos_pool_unref(kalos_pool* pool) {
  if (__atomic_sub_fetch(&pool->refs, 1, __ATOMIC_ACQ_REL) != 0) return;
  for (uint32_t i = 0; i < pool->num_idle; ++i) kalos_buffer_free(pool->idle[i]);
  pthread_cond_destroy(&pool->freed);
  pthread_mutex_destroy(&pool->lock);
  kalos_gpu_unref(pool->gpu);
  free(pool->idle);
  free(pool);
}

// Remove an idle buffer. Lock held.
static kalos_buffer* kalos_pool_remove(kalos_pool* pool, uint32_t place) {
  kalos_buffer* buffer = pool->idle[place];
  if (buffer->readers == KALOS_READERS_STREAM)
    __atomic_fetch_sub(&pool->num_lent, 1, __ATOMIC_RELAXED);
  --pool->num_idle;
  memmove(&pool->idle[place], &pool->idle[place + 1],
          (pool->num_idle - place) * sizeof *pool->idle);
  return buffer;
}

// The owner's end: nothing lies idle from now on.
static void kalos_pool_close(kalos_pool* pool) {
  if (!pool) return;
  for (;;) {
    pthread_mutex_lock(&pool->lock);
    pool->closed = 1;
    kalos_buffer* buffer = pool->num_idle ? kalos_pool_remove(pool, pool->num_idle - 1) : NULL;
    pthread_mutex_unlock(&pool->lock);
    if (!buffer) break;
    kalos_buffer_free(buffer);
  }
  kalos_pool_unref(pool);
}

static uint32_t kalos_pool_num_free(kalos_pool* pool) {
  pthread_mutex_lock(&pool->lock);
  uint32_t num_free = pool->num_free;
  pthread_mutex_unlock(&pool->lock);
  return num_free;
}

// A buffer without references comes back (NULL: none), and a slot, where it is one's end.
static void kalos_pool_put(kalos_pool* pool, kalos_buffer* buffer, uint32_t num_slots) {
  if (buffer) kalos_buffer_fence(buffer);
  kalos_buffer* unwanted = buffer;
  pthread_mutex_lock(&pool->lock);
  if (buffer && !pool->closed && pool->num_idle < pool->max_idle) {
    pool->idle[pool->num_idle++] = buffer;
    if (buffer->readers == KALOS_READERS_STREAM)
      __atomic_fetch_add(&pool->num_lent, 1, __ATOMIC_RELAXED);
    unwanted = NULL;
  }
  pool->num_free += num_slots;
  if (num_slots && pool->num_waiting > 0) pthread_cond_signal(&pool->freed);
  pthread_mutex_unlock(&pool->lock);
  if (unwanted) kalos_buffer_free(unwanted);
  if (buffer) kalos_pool_unref(pool);
}

static inline void kalos_buffer_unref(kalos_buffer* buffer) {
  if (!buffer || __atomic_sub_fetch(&buffer->refs, 1, __ATOMIC_ACQ_REL) != 0) return;
  if (buffer->home) {
    kalos_pool_put(buffer->home, buffer, 0);
  } else {
    kalos_buffer_free(buffer);
  }
}

// Take a free slot, waiting until `deadline` (CLOCK_MONOTONIC; NULL: do not wait). 0 or ETIMEDOUT.
static int kalos_pool_take(kalos_pool* pool, const struct timespec* deadline) {
  int status = 0;
  pthread_mutex_lock(&pool->lock);
  while (pool->num_free == 0 && deadline && status == 0) {
    ++pool->num_waiting;
    status = pthread_cond_timedwait(&pool->freed, &pool->lock, deadline);
    --pool->num_waiting;
  }
  status = pool->num_free == 0 ? ETIMEDOUT : 0;
  if (status == 0) --pool->num_free;
  pthread_mutex_unlock(&pool->lock);
  return status;
}

// Place of the idle buffer to use: one with room that nothing uses, the same tenant's if there is
// one, the warmest. num_idle: none. Lock held.
static uint32_t kalos_pool_warmest(const kalos_pool* pool, uint64_t num_tokens, uint64_t tenant) {
  uint32_t found = pool->num_idle;
  uint32_t looks = pool->num_idle < KALOS_WINDOW_LOOKS ? pool->num_idle : KALOS_WINDOW_LOOKS;
  for (uint32_t i = 1; i <= looks; ++i) {
    const kalos_buffer* buffer = pool->idle[pool->num_idle - i];
    if (buffer->capacity < num_tokens || buffer->readers || kalos_buffer_pending(buffer)) continue;
    if (buffer->tenant == tenant) return pool->num_idle - i;
    if (found == pool->num_idle) found = pool->num_idle - i;
  }
  return found;
}

// Place of the longest idle buffer with room that an event stands for; where `done`, one whose work
// is done. num_idle: none. Lock held, context entered.
static uint32_t kalos_pool_oldest(kalos_pool* pool, uint64_t num_tokens, int done) {
  uint32_t queries = 0;
  for (uint32_t i = 0; i < pool->num_idle && queries < KALOS_WINDOW_QUERIES; ++i) {
    kalos_buffer* buffer = pool->idle[i];
    if (buffer->capacity < num_tokens || buffer->readers) continue;
    if (done && kalos_buffer_pending(buffer)) {
      ++queries;
      if (pool->gpu->driver->event_query(buffer->ready) != 0) continue;
      kalos_buffer_done(buffer);
    }
    return i;
  }
  return pool->num_idle;
}

// Whether an idle buffer has room, and readers that no event stands for. Lock held.
static int kalos_pool_has_lent(const kalos_pool* pool, uint64_t num_tokens) {
  for (uint32_t i = 0; i < pool->num_idle; ++i)
    if (pool->idle[i]->readers && pool->idle[i]->capacity >= num_tokens) return 1;
  return 0;
}

// Wait for the whole context on behalf of idle buffers whose readers nobody knows. A status.
static int kalos_pool_cool(kalos_pool* pool) {
  kalos_buffer* chain = NULL;
  pthread_mutex_lock(&pool->lock);
  for (uint32_t i = pool->num_idle; i-- > 0;) {
    if (pool->idle[i]->readers == KALOS_READERS_NONE) continue;
    kalos_buffer* buffer = kalos_pool_remove(pool, i);
    buffer->next = chain;
    chain = buffer;
  }
  pthread_mutex_unlock(&pool->lock);
  kalos_cu_result code = kalos_gpu_enter(pool->gpu);
  if (code == 0) {
    code = pool->gpu->driver->ctx_synchronize();
    kalos_gpu_leave(pool->gpu);
  }
  while (chain) {
    kalos_buffer* buffer = chain;
    chain = buffer->next;
    if (code == 0) {
      buffer->readers = KALOS_READERS_NONE;
      kalos_buffer_done(buffer);
    }
    __atomic_fetch_add(&pool->refs, 1, __ATOMIC_RELAXED);  // as for one that was lent
    kalos_pool_put(pool, buffer, 0);
  }
  return kalos_status(code);
}

// A GPU's idle buffer for a lease: one that nothing uses; else NULL, for new memory; but where many
// lie idle, one whose work an event stands for, or the coldest, which is too small. Lock held,
// context entered. 0, or EAGAIN where kalos_pool_cool would give one with room.
static int kalos_pool_pick_on_gpu(kalos_pool* pool, uint64_t num_tokens, uint64_t tenant,
                                  kalos_buffer** picked) {
  uint32_t place = kalos_pool_warmest(pool, num_tokens, tenant);
  if (place == pool->num_idle) place = kalos_pool_oldest(pool, num_tokens, 1);
  if (place == pool->num_idle && pool->num_idle >= pool->spares) {
    place = kalos_pool_oldest(pool, num_tokens, 0);
    if (place == pool->num_idle && kalos_pool_has_lent(pool, num_tokens)) return EAGAIN;
    if (place == pool->num_idle) place = 0;
  }
  *picked = place < pool->num_idle ? kalos_pool_remove(pool, place) : NULL;
  return 0;
}

// An idle buffer for a lease, or NULL where there is none to use. One that is too small is to be
// freed by the caller. A status.
static int kalos_pool_pick(kalos_pool* pool, uint64_t num_tokens, uint64_t tenant,
                           kalos_buffer** picked) {
  if (!pool->gpu) {
    pthread_mutex_lock(&pool->lock);
    uint32_t place = kalos_pool_warmest(pool, num_tokens, tenant);
    if (place == pool->num_idle && place) --place;
    *picked = pool->num_idle ? kalos_pool_remove(pool, place) : NULL;
    pthread_mutex_unlock(&pool->lock);
    return 0;
  }
  for (;;) {
    kalos_cu_result code = kalos_gpu_enter(pool->gpu);
    if (code) return kalos_status(code);
    pthread_mutex_lock(&pool->lock);
    int status = kalos_pool_pick_on_gpu(pool, num_tokens, tenant, picked);
    pthread_mutex_unlock(&pool->lock);
    kalos_gpu_leave(pool->gpu);
    if (status != EAGAIN) return 0;
    status = kalos_pool_cool(pool);
    if (status) return status;
  }
}

// The caller names a stream that exists: an event on it stands for readers of idle buffers on it.
static void kalos_pool_fence(kalos_pool* pool, kalos_cu_handle stream) {
  if (__atomic_load_n(&pool->num_lent, __ATOMIC_RELAXED) == 0 || kalos_gpu_enter(pool->gpu)) return;
  pthread_mutex_lock(&pool->lock);
  for (uint32_t i = 0; i < pool->num_idle; ++i) {
    kalos_buffer* buffer = pool->idle[i];
    if (buffer->readers != KALOS_READERS_STREAM || buffer->reader != stream) continue;
    if (kalos_buffer_mark(buffer, stream) != 0) continue;
    buffer->readers = KALOS_READERS_NONE;
    __atomic_fetch_sub(&pool->num_lent, 1, __ATOMIC_RELAXED);
  }
  pthread_mutex_unlock(&pool->lock);
  kalos_gpu_leave(pool->gpu);
}

// ---- Leases -----------------------------------------------------------------------------------
// Zero what another tenant may have written. A status.
static int kalos_buffer_hand_over(kalos_buffer* buffer, uint64_t tenant) {
  if (buffer->tenant == tenant) return 0;
  size_t nbytes = buffer->dirty * sizeof(int32_t);
  if (buffer->gpu && nbytes) {
    kalos_cu_result code = kalos_buffer_settle(buffer);
    if (code == 0) code = kalos_gpu_enter(buffer->gpu);
    if (code) return kalos_status(code);
    code = kalos_buffer_zero(buffer, nbytes);
    kalos_gpu_leave(buffer->gpu);
    if (code) {
      kalos_buffer_lend(buffer, NULL);  // the fill may be under way
      return kalos_status(code);
    }
  }
  if (buffer->data) memset(buffer->data, 0, nbytes);
  buffer->dirty = 0;
  buffer->tenant = tenant;
  return 0;
}

// Lease a slot with room for num_tokens. What another tenant left in the memory is zeroed first. A
// status; ETIMEDOUT: no slot is free.
static int kalos_lease_begin(kalos_lease* lease, kalos_pool* pool, uint64_t num_tokens,
                             uint64_t tenant, const struct timespec* deadline) {
  kalos_buffer* buffer = NULL;
  int status = kalos_pool_take(pool, deadline);
  if (status) return status;
  status = kalos_pool_pick(pool, num_tokens, tenant, &buffer);
  if (buffer && buffer->capacity < num_tokens) {
    kalos_buffer_free(buffer);
    buffer = NULL;
  }
  if (status == 0 && !buffer) {
    status = kalos_buffer_new(pool->gpu, (int)pool->device_alone, num_tokens, &buffer);
    if (status) buffer = NULL;
  }
  if (buffer) {
    __atomic_fetch_add(&pool->refs, 1, __ATOMIC_RELAXED);
    buffer->refs = 1;
    buffer->home = pool;
    status = kalos_buffer_hand_over(buffer, tenant);
  }
  if (status) {
    kalos_pool_put(pool, buffer, 1);
    return status;
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
  if (__atomic_sub_fetch(&buffer->refs, 1, __ATOMIC_ACQ_REL) != 0) buffer = NULL;
  kalos_pool_put(pool, buffer, 1);
  kalos_pool_unref(pool);
}

#endif  // KALOS_WINDOW_BUFFER_H
