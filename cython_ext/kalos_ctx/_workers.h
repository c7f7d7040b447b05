// A few threads that help with one piece of work at a time, and sleep in between (no processor
// time). The caller works too and never waits for a thread to wake: helpers join what is left to
// do. A caller that finds the helpers busy works alone. Threads never touch Python and take no
// signals. A forked child has no helpers; it starts its own when it needs them.
#ifndef KALOS_WORKERS_H
#define KALOS_WORKERS_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>

#define KALOS_MAX_WORKERS 63
#define KALOS_WORKER_STACK (256u << 10)

// work(context, thread): called once by each thread that takes part, with its own number from 0. It
// takes parts by an atomic counter in the context until none is left.
typedef void (*kalos_work_fn)(void* context, int thread);

static struct {
  pthread_mutex_t lock;
  pthread_cond_t wake;  // a job has come
  pthread_cond_t done;  // the last helper has left the job
  kalos_work_fn work;   // NULL: no job
  void* context;
  int wanted;       // helpers the job still takes
  int entered;      // helpers that joined the job, for their numbers
  int active;       // helpers inside the job
  int num_workers;  // threads started
  int busy;         // a caller owns the helpers
  int hooked;       // the fork handler is registered
} kalos_workers = {.lock = PTHREAD_MUTEX_INITIALIZER,
                   .wake = PTHREAD_COND_INITIALIZER,
                   .done = PTHREAD_COND_INITIALIZER};

static void* kalos_worker_main(void* unused) {
  (void)unused;
  pthread_mutex_lock(&kalos_workers.lock);
  for (;;) {
    while (!kalos_workers.work || kalos_workers.wanted == 0)
      pthread_cond_wait(&kalos_workers.wake, &kalos_workers.lock);
    kalos_work_fn work = kalos_workers.work;
    void* context = kalos_workers.context;
    int thread = ++kalos_workers.entered;
    --kalos_workers.wanted;
    ++kalos_workers.active;
    pthread_mutex_unlock(&kalos_workers.lock);
    work(context, thread);
    pthread_mutex_lock(&kalos_workers.lock);
    if (--kalos_workers.active == 0) pthread_cond_signal(&kalos_workers.done);
  }
  return NULL;
}

// In the child only the forking thread lives: the lock may be held by one that does not, so all
// starts anew.
static void kalos_workers_after_fork(void) {
  static const pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static const pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
  kalos_workers.lock = lock;
  kalos_workers.wake = kalos_workers.done = cond;
  kalos_workers.work = NULL;
  kalos_workers.wanted = kalos_workers.entered = kalos_workers.active = 0;
  kalos_workers.num_workers = kalos_workers.busy = 0;
}

// Call with the lock held. Fewer threads than asked for are no error.
static void kalos_workers_start(int count) {
  if (!kalos_workers.hooked) {
    if (pthread_atfork(NULL, NULL, kalos_workers_after_fork) != 0) return;
    kalos_workers.hooked = 1;
  }
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, KALOS_WORKER_STACK);
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  while (kalos_workers.num_workers < count && kalos_workers.num_workers < KALOS_MAX_WORKERS) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, kalos_worker_main, NULL) != 0) break;
    ++kalos_workers.num_workers;
  }
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  pthread_attr_destroy(&attributes);
}

// Run work on the calling thread and up to threads - 1 helpers; back when all of them have left it.
static void kalos_workers_run(kalos_work_fn work, void* context, int threads) {
  int mine = 0;
  if (threads > 1) {
    pthread_mutex_lock(&kalos_workers.lock);
    if (!kalos_workers.busy) {
      if (kalos_workers.num_workers < threads - 1) kalos_workers_start(threads - 1);
      mine = kalos_workers.busy = kalos_workers.num_workers > 0;
    }
    if (mine) {
      kalos_workers.work = work;
      kalos_workers.context = context;
      kalos_workers.entered = 0;
      kalos_workers.wanted = threads - 1;
      pthread_cond_broadcast(&kalos_workers.wake);
    }
    pthread_mutex_unlock(&kalos_workers.lock);
  }
  work(context, 0);
  if (!mine) return;
  pthread_mutex_lock(&kalos_workers.lock);
  kalos_workers.work = NULL;  // nobody joins any more
  while (kalos_workers.active > 0) pthread_cond_wait(&kalos_workers.done, &kalos_workers.lock);
  kalos_workers.busy = 0;
  pthread_mutex_unlock(&kalos_workers.lock);
}

// Processors this process may use.
static int kalos_num_processors(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  int count = CPU_COUNT(&set);
  return count < 1 ? 1 : count;
}

#endif  // KALOS_WORKERS_H
