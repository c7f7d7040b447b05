// simt.cpp: runs the threads of a block and lets them meet.
//
// A thread runs until it must wait. Waiting threads stand in their warp's groups or at the block's
// barrier; whoever completes a meeting works out what each member gets, makes the others ready and
// goes on itself. Threads that ended are missing at no meeting, as on the device. When no thread is
// ready and some have not ended, the block is stuck for good: the launch ends with an error.
#include "simt.h"

#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace kalos_simt {
namespace {

const unsigned kMaxThreads = 1024;
const int kStuckRounds = 1 << 20;  // rounds of pauses without anything else

enum class waiting : uint8_t { no, warp, block, paused, ended };

struct thread {
  fiber stack;
  uint3 index;
  unsigned number;  // within the block
  waiting state;
  uint64_t result;
};

// Lanes that wait for one another: the same call with the same mask.
struct group {
  meeting kind;
  unsigned mask;
  unsigned arrived;
};

struct warp {
  unsigned first;
  unsigned alive;
  unsigned waiting;  // lanes that stand in a group
  std::vector<group> groups;
  uint64_t values[KALOS_SIMT_WARP];
  unsigned from[KALOS_SIMT_WARP];
  const void* places[KALOS_SIMT_WARP];
};

struct launch {
  const kernel* one;
  const void* packed;
  fiber home;
  std::vector<thread> threads;
  std::vector<warp> warps;
  std::vector<unsigned> ready;  // a ring of thread numbers, as many places as threads
  unsigned ready_first, ready_count;
  unsigned alive, paused;
  int idle_rounds;
  // The block's barrier.
  barrier kind;
  unsigned at_barrier, predicates;
  int code;
  std::string why;
};

launch now;
thread* self;
kernel* kernels;
// Set by KALOS_FAKE_ORDER: forward (the default), reverse, or shuffled:SEED.
bool order_reverse, order_shuffled;
std::minstd_rand dice;

std::string name_of(const thread& t) {
  return "thread " + std::to_string(t.index.x) + "," + std::to_string(t.index.y) + "," +
         std::to_string(t.index.z);
}

// Who was released goes first, so that a warp's threads run near one another and find their stacks
// in the cache; who pauses goes last.
void make_ready(unsigned number, bool first) {
  const unsigned places = now.ready.size();
  if (first) {
    now.ready_first = now.ready_first == 0 ? places - 1 : now.ready_first - 1;
    now.ready[now.ready_first] = number;
  } else {
    now.ready[(now.ready_first + now.ready_count) % places] = number;
  }
  ++now.ready_count;
  if (order_shuffled) {
    const unsigned other = (now.ready_first + dice() % now.ready_count) % places;
    std::swap(now.ready[now.ready_first], now.ready[other]);
  }
}

unsigned next_ready() {
  const unsigned number = now.ready[now.ready_first];
  now.ready_first = now.ready_first + 1 == now.ready.size() ? 0 : now.ready_first + 1;
  --now.ready_count;
  return number;
}

// Goes to another thread, or home when there is none; comes back once this one is ready again.
void leave(bool last) {
  thread* const before = self;
  if (now.ready_count == 0) {
    fiber_switch(&before->stack, &now.home, last);
  } else {
    thread* const next = &now.threads[next_ready()];
    if (next == before) return;
    self = next;
    threadIdx = next->index;
    fiber_switch(&before->stack, &next->stack, last);
  }
}

[[noreturn]] void give_up(int code, const std::string& why) {
  now.code = code;
  now.why = why;
  fiber_switch(&self->stack, &now.home, true);
  abort();
}

void release(unsigned number, uint64_t result) {
  thread& t = now.threads[number];
  t.result = result;
  t.state = waiting::no;
  now.idle_rounds = 0;
  if (&t != self) make_ready(number, true);
}

// ---- Warps --------------------------------------------------------------------------------------
uint64_t reduced(const warp& w, const group& g) {
  uint64_t sum = 0;
  bool first = true;
  for (unsigned lane = 0; lane < KALOS_SIMT_WARP; ++lane) {
    if (!(g.arrived >> lane & 1)) continue;
    const uint32_t v = (uint32_t)w.values[lane];
    const uint32_t s = (uint32_t)sum;
    if (first) {
      sum = v;
      first = false;
    } else if (g.kind == meeting::add) {
      sum = s + v;
    } else if (g.kind == meeting::smallest) {
      sum = v < s ? v : s;
    } else if (g.kind == meeting::smallest_signed) {
      sum = (int32_t)v < (int32_t)s ? v : s;
    } else if (g.kind == meeting::largest) {
      sum = v > s ? v : s;
    } else if (g.kind == meeting::largest_signed) {
      sum = (int32_t)v > (int32_t)s ? v : s;
    } else if (g.kind == meeting::bits_and) {
      sum = s & v;
    } else if (g.kind == meeting::bits_or) {
      sum = s | v;
    } else {
      sum = s ^ v;
    }
  }
  return sum;
}

uint64_t ballot(const warp& w, const group& g) {
  uint64_t lanes = 0;
  for (unsigned lane = 0; lane < KALOS_SIMT_WARP; ++lane) {
    if (g.arrived >> lane & 1) lanes |= w.values[lane] << lane;
  }
  return lanes;
}

uint64_t result_of(const warp& w, const group& g, unsigned lane, uint64_t common) {
  if (g.kind == meeting::shuffle) {
    // A lane that takes no part has no value to give.
    if (w.from[lane] < KALOS_SIMT_WARP && g.arrived >> w.from[lane] & 1)
      return w.values[w.from[lane]];
    uint64_t poison;
    memset(&poison, KALOS_SIMT_POISON, sizeof(poison));
    return poison;
  }
  if (g.kind == meeting::match) {
    uint64_t equal = 0;
    for (unsigned other = 0; other < KALOS_SIMT_WARP; ++other) {
      if (g.arrived >> other & 1 && w.values[other] == w.values[lane]) equal |= 1u << other;
    }
    return equal;
  }
  return common;
}

// Ends the meeting of a group if nobody is missing.
bool settle(warp& w, size_t place) {
  const group g = w.groups[place];
  if (g.arrived != (g.mask & w.alive)) return false;
  w.groups[place] = w.groups.back();
  w.groups.pop_back();
  w.waiting &= ~g.arrived;
  uint64_t common = 0;
  if (g.kind == meeting::ballot) {
    common = ballot(w, g);
  } else if (g.kind >= meeting::add) {
    common = reduced(w, g);
  }
  for (unsigned i = 0; i < KALOS_SIMT_WARP; ++i) {
    const unsigned lane = order_reverse ? i : KALOS_SIMT_WARP - 1 - i;
    if (g.arrived >> lane & 1) release(w.first + lane, result_of(w, g, lane, common));
  }
  return true;
}

// ---- The block's barrier ------------------------------------------------------------------------
void settle_barrier() {
  if (now.at_barrier == 0 || now.at_barrier != now.alive) return;
  uint64_t result = now.predicates;
  if (now.kind == barrier::any) result = now.predicates != 0;
  if (now.kind == barrier::all) result = now.predicates == now.at_barrier;
  now.at_barrier = 0;
  const unsigned count = now.threads.size();
  for (unsigned i = 0; i < count; ++i) {
    const unsigned number = order_reverse ? i : count - 1 - i;
    if (now.threads[number].state == waiting::block) release(number, result);
  }
}

// ---- A thread's life ----------------------------------------------------------------------------
void thread_body() {
  fiber_entered();
  now.one->call(now.packed);
  warp& w = now.warps[self->number / KALOS_SIMT_WARP];
  w.alive &= ~(1u << self->number % KALOS_SIMT_WARP);
  self->state = waiting::ended;
  --now.alive;
  now.idle_rounds = 0;
  for (size_t place = w.groups.size(); place-- > 0;) settle(w, place);
  settle_barrier();
  leave(true);
  abort();
}

std::string stuck_text() {
  unsigned at_warp = 0;
  const thread* in_warp = nullptr;
  for (const thread& t : now.threads) {
    if (t.state != waiting::warp) continue;
    ++at_warp;
    if (!in_warp) in_warp = &t;
  }
  std::string text = std::to_string(now.at_barrier) + " threads wait at the block's barrier, " +
                     std::to_string(at_warp) + " for lanes of their warp, " +
                     std::to_string(now.threads.size() - now.alive) + " have ended";
  if (in_warp) {
    const warp& w = now.warps[in_warp->number / KALOS_SIMT_WARP];
    for (const group& g : w.groups) {
      char line[120];
      snprintf(line, sizeof(line), "; warp %u: kind %d with mask %08x, there are %08x",
               w.first / KALOS_SIMT_WARP, (int)g.kind, g.mask, g.arrived);
      text += line;
    }
  }
  return text;
}

void begin_block(unsigned count) {
  now.alive = count;
  now.paused = now.at_barrier = now.predicates = 0;
  now.ready_first = now.ready_count = 0;
  now.idle_rounds = 0;
  for (warp& w : now.warps) {
    const unsigned lanes = std::min(count - w.first, (unsigned)KALOS_SIMT_WARP);
    w.alive = lanes == 32 ? ~0u : (1u << lanes) - 1;
    w.waiting = 0;
    w.groups.clear();
  }
  for (unsigned i = 0; i < count; ++i) {
    const unsigned number = order_reverse ? count - 1 - i : i;
    now.threads[number].state = waiting::no;
    fiber_begin(&now.threads[number].stack, thread_body);
    make_ready(number, false);
  }
}

void run_block() {
  // Kept beside the others' stacks: fibers come back here when no thread is ready.
  self = &now.threads[next_ready()];
  threadIdx = self->index;
  fiber_switch(&now.home, &self->stack);
  if (now.code == 0 && now.alive != 0) {
    now.code = 702;
    now.why = stuck_text();
  }
}

// Not memset: AddressSanitizer would stop it at the zones that it puts between variables.
void poison(char* begin, size_t nbytes) {
  volatile uint64_t* words = (volatile uint64_t*)begin;
  uint64_t pattern;
  memset(&pattern, KALOS_SIMT_POISON, sizeof(pattern));
  size_t i = 0;
  for (; i < nbytes / 8; ++i) words[i] = pattern;
  for (i *= 8; i < nbytes; ++i) ((volatile char*)begin)[i] = (char)KALOS_SIMT_POISON;
}

void set_order() {
  const char* order = getenv("KALOS_FAKE_ORDER");
  order_reverse = order && !strcmp(order, "reverse");
  order_shuffled = order && !strncmp(order, "shuffled", 8);
  if (order_shuffled && order[8] == ':') dice.seed((unsigned)atoi(order + 9));
}

std::unique_ptr<char[]> dynamic_memory;
std::deque<fiber> stacks;  // made once, used by every launch

void set_threads(unsigned count, shape block) {
  now.threads.resize(count);
  for (unsigned i = 0; i < count; ++i) {
    now.threads[i].stack = stacks[i];
    now.threads[i].number = i;
    now.threads[i].index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
  }
  now.warps.resize((count + KALOS_SIMT_WARP - 1) / KALOS_SIMT_WARP);
  for (unsigned i = 0; i < now.warps.size(); ++i) now.warps[i].first = i * KALOS_SIMT_WARP;
}

}  // namespace

// ---- What kernels call --------------------------------------------------------------------------
unsigned lane() { return self->number % KALOS_SIMT_WARP; }

const void** lane_places() { return now.warps[self->number / KALOS_SIMT_WARP].places; }

uint64_t meet_warp(meeting kind, unsigned mask, uint64_t value, unsigned from) {
  const unsigned number = self->number;
  const unsigned lane = number % KALOS_SIMT_WARP;
  warp& w = now.warps[number / KALOS_SIMT_WARP];
  if (!(mask >> lane & 1)) {
    give_up(719, name_of(*self) + " meets lanes of a mask that it is not in");
  }
  w.values[lane] = value;
  w.from[lane] = from;
  w.waiting |= 1u << lane;
  size_t place = 0;
  while (place < w.groups.size() &&
         (w.groups[place].kind != kind || w.groups[place].mask != mask)) {
    ++place;
  }
  if (place == w.groups.size()) w.groups.push_back({kind, mask, 0});
  w.groups[place].arrived |= 1u << lane;
  self->state = waiting::warp;
  if (!settle(w, place)) leave(false);
  return self->result;
}

int meet_block(barrier kind, int predicate) {
  if (now.at_barrier == 0) {
    now.kind = kind;
    now.predicates = 0;
  } else if (now.kind != kind) {
    give_up(719, name_of(*self) + " is at another kind of barrier than the threads that wait");
  }
  ++now.at_barrier;
  now.predicates += predicate != 0;
  self->state = waiting::block;
  settle_barrier();
  if (self->state == waiting::block) leave(false);
  return (int)self->result;
}

void pause() {
  if (now.ready_count == 0) {
    if (++now.idle_rounds > kStuckRounds) {
      give_up(702, name_of(*self) + " pauses without end; " + stuck_text());
    }
    return;
  }
  if (++now.idle_rounds > kStuckRounds) {
    give_up(702, "threads pause without end; " + stuck_text());
  }
  make_ready(self->number, false);
  leave(false);
}

void maybe_pause() {
  if (order_shuffled && now.ready_count && dice() % 4 == 0) {
    make_ready(self->number, false);
    leave(false);
  }
}

void trap(const char* text) { give_up(719, name_of(*self) + ": " + text); }

char* dynamic_shared() { return dynamic_memory.get(); }

long long clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// ---- What the driver calls ----------------------------------------------------------------------
void add_kernel(kernel* one) {
  one->next = kernels;
  kernels = one;
}

const kernel* find_kernel(const char* name) {
  for (const kernel* one = kernels; one; one = one->next) {
    if (!strcmp(one->name, name)) return one;
  }
  return nullptr;
}

int run(const kernel& one, shape grid, shape block, size_t dynamic_nbytes, const void* packed,
        const char** text) {
  const unsigned count = block.x * block.y * block.z;
  set_order();
  while (stacks.size() < count) {
    stacks.emplace_back();
    fiber_make(&stacks.back());
  }
  now.one = &one;
  now.packed = packed;
  now.code = 0;
  fiber_adopt(&now.home);
  now.ready.resize(count);
  set_threads(count, block);
  dynamic_memory.reset(new char[dynamic_nbytes]);
  blockDim = {block.x, block.y, block.z};
  gridDim = {grid.x, grid.y, grid.z};
  const uint64_t num_blocks = (uint64_t)grid.x * grid.y * grid.z;
  for (uint64_t i = 0; i < num_blocks && now.code == 0; ++i) {
    const uint64_t number = order_reverse ? num_blocks - 1 - i : i;
    blockIdx = {(unsigned)(number % grid.x), (unsigned)(number / grid.x % grid.y),
                (unsigned)(number / grid.x / grid.y)};
    poison(one.shared_begin, one.shared_end - one.shared_begin);
    poison(dynamic_memory.get(), dynamic_nbytes);
    begin_block(count);
    run_block();
  }
  if (now.code) {
    now.why = std::string(one.name) + ", block " + std::to_string(blockIdx.x) + "," +
              std::to_string(blockIdx.y) + "," + std::to_string(blockIdx.z) + ": " + now.why;
    *text = now.why.c_str();
  }
  return now.code;
}

}  // namespace kalos_simt
