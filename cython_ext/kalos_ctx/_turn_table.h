// _turn_table.h: the accessors that the planner reads a stored session through, and the spans that
// a window is made of. C++17 for the host.
//
// A plain session (no groups, trims, orphans, expiry or live forms) is planned where it lies, over
// the runs of its entries: O(log n). Every other one is planned over flat arrays (_session_view).
#ifndef KALOS_TURN_TABLE_H
#define KALOS_TURN_TABLE_H

#include <stdlib.h>
#include <string.h>

#include "_checks.h"
#include "kalos_channel.h"
#include "kalos_plan.h"

// One run of tokens in a window. The tiles of a report are spans, but for recalled passages, whose
// framing are spans of their own.
typedef struct kalos_span {
  uint64_t pos;     // position in the token segments; with KALOS_SPAN_MEMORY source << 32 | element
  uint64_t id;      // seq, passage ID, or the item of a head's list
  uint32_t start;   // first token in the window
  uint32_t length;  // tokens in the window
  uint32_t skip;    // tokens of the run that are left out before them
  uint32_t run;     // tokens of the whole run, over which the checksum goes
  uint32_t crc;
  uint8_t kind;   // KALOS_SPAN_* of kalos_channel.h
  uint8_t flags;  // KALOS_SPAN_MEMORY and so on
  uint16_t role;
} kalos_span;
KALOS_STATIC_ASSERT(sizeof(kalos_span) == 40, "kalos_span");

namespace kalos {

// EntryRun of _index.pxd.
struct entry_run {
  uint32_t first;
  uint32_t count;
  const kalos_entry* entries;
};

// Where tokens lie, for looking at single ones: what SegmentSet keeps.
struct token_places {
  char* const* bases;
  const size_t* sizes;
  uint32_t count;
  const uint8_t* starts;  // by ID: the token starts on a character's first byte; null: unknown
  uint32_t num_ids;

  bool starts_character(uint64_t pos) const {
    const uint32_t segment = KALOS_POSITION_SEGMENT(pos);
    const size_t off = (size_t)KALOS_POSITION_OFFSET(pos) * 4;
    if (segment >= count || !bases[segment] || off + 4 > sizes[segment]) return true;
    uint32_t id;
    memcpy(&id, bases[segment] + off, 4);
    return id >= num_ids || starts[id] != 0;
  }
};

// A plain session's turns in their runs of entries. An entry whose checksum does not hold sets
// `bad`; what is read of it then ends every loop of the planner, and the plan is thrown away.
struct table_turns {
  const entry_run* runs;
  uint32_t num_runs;
  uint64_t count;
  uint64_t total;
  token_places places;
  mutable uint64_t bad;

  const kalos_entry* find(uint64_t t) const {
    uint32_t lo = 0, hi = num_runs;
    if (hi == 0) return nullptr;
    const entry_run* run = &runs[hi - 1];
    if (t < run->first) {
      while (hi - lo > 1) {
        const uint32_t mid = (lo + hi) / 2;
        if (runs[mid].first <= t) {
          lo = mid;
        } else {
          hi = mid;
        }
      }
      run = &runs[lo];
    }
    return t - run->first < run->count ? run->entries + (t - run->first) : nullptr;
  }
  // The checked entry of a turn, or null.
  const kalos_entry* entry(uint64_t t) const {
    const kalos_entry* e = find(t);
    if (e && e->crc == kalos_crc32c(0, e, sizeof(kalos_entry) - 4) && e->seq == t) return e;
    bad = t;
    return nullptr;
  }

  uint64_t num_turns() const { return count; }
  uint64_t sum_before(uint64_t t) const {
    if (t == 0) return 0;
    if (t >= count) return total;
    const kalos_entry* e = entry(t - 1);
    return e && e->sum <= total ? e->sum : total;
  }
  uint32_t unit_first(uint64_t t) const { return (uint32_t)t; }
  uint64_t max_unit_turns() const { return 1; }
  uint32_t trim(uint64_t) const { return 0; }
  uint32_t role(uint64_t t) const {
    const kalos_entry* e = entry(t);
    return e ? e->role : (uint32_t)KALOS_ROLE_USER;
  }
  bool starts_character(uint64_t t, uint64_t offset) const {
    if (!places.starts) return true;
    const kalos_entry* e = entry(t);
    return !e || places.starts_character(e->tokens_pos + offset);
  }
};

// One turn or summary of a view: where its tokens lie and how it is named.
struct view_item {
  uint64_t pos;
  uint64_t id;  // seq of the turn, or of the first turn that a summary stands for
  uint32_t run;
  uint32_t crc;
  uint32_t kind;  // KALOS_SPAN_TURN or KALOS_SPAN_SUMMARY
  uint16_t prefix;
  uint16_t suffix;
};

// A session in flat arrays, with its tokens.
struct view_turns : flat_turns {
  const view_item* items;
  const uint32_t* skips;  // [count], or null: none
  token_places places;

  bool starts_character(uint64_t t, uint64_t offset) const {
    if (!places.starts) return true;
    return places.starts_character(items[t].pos + (skips ? skips[t] : 0) + offset);
  }
};

// The spans of one window.
struct span_list {
  kalos_span* items;
  uint32_t count;
  uint32_t room;
  uint64_t tokens;
};

// Room for one more span at the end, zeroed but for `start`; null where there is no memory.
inline kalos_span* add_span(span_list* list, uint64_t length) {
  if (list->count == list->room) {
    const uint32_t room = list->room ? list->room * 2 : 64;
    void* grown = realloc(list->items, room * sizeof(kalos_span));
    if (!grown) return nullptr;
    list->items = (kalos_span*)grown;
    list->room = room;
  }
  kalos_span* span = &list->items[list->count++];
  memset(span, 0, sizeof(*span));
  span->start = (uint32_t)list->tokens;
  span->length = (uint32_t)length;
  span->run = (uint32_t)length;
  list->tokens += length;
  return span;
}

inline bool ensure_spans(span_list* list, uint64_t more) {
  if (list->room - list->count >= more) return true;
  const uint64_t room = list->count + more;
  void* grown = realloc(list->items, room * sizeof(kalos_span));
  if (!grown) return false;
  list->items = (kalos_span*)grown;
  list->room = (uint32_t)room;
  return true;
}

// Adds the turns [begin, end) of a plain session, the first without `offset` tokens. 0; the place
// of a wrong entry + 1 as a negative number; or 1 for no memory.
inline int64_t add_table_turns(const table_turns& turns, uint64_t begin, uint64_t end,
                               uint64_t offset, span_list* list) {
  if (begin >= end) return 0;
  if (!ensure_spans(list, end - begin)) return 1;
  kalos_span* span = list->items + list->count;
  uint64_t tokens = list->tokens;
  for (uint64_t t = begin; t < end;) {
    const kalos_entry* e = turns.find(t);
    if (!e) return -(int64_t)(t + 1);
    // Entries lie in runs, so the next ones need no search.
    uint64_t stop = end;
    for (uint32_t r = turns.num_runs; r-- > 0;) {
      if (turns.runs[r].first <= t) {
        const uint64_t run_end = (uint64_t)turns.runs[r].first + turns.runs[r].count;
        if (run_end < stop) stop = run_end;
        break;
      }
    }
    for (; t < stop; ++t, ++e, ++span) {
      if (e->crc != kalos_crc32c(0, e, sizeof(kalos_entry) - 4) || e->seq != t)
        return -(int64_t)(t + 1);
      span->pos = e->tokens_pos;
      span->id = t;
      span->start = (uint32_t)tokens;
      span->run = e->num_tokens;
      span->skip = 0;
      span->length = e->num_tokens;
      span->crc = e->token_crc;
      span->kind = KALOS_SPAN_TURN;
      span->flags = 0;
      span->role = e->role;
      if (t == begin && offset) {
        if (offset > e->num_tokens) return -(int64_t)(t + 1);
        span->skip = (uint32_t)offset;
        span->length = (uint32_t)(e->num_tokens - offset);
        span->flags = KALOS_SPAN_CUT;
      }
      tokens += span->length;
    }
  }
  list->count += (uint32_t)(end - begin);
  list->tokens = tokens;
  return 0;
}

// Adds item t of a view: tokens [offset, length) of what stands in the history.
inline kalos_span* add_view_item(const view_turns& turns, uint64_t t, uint64_t length,
                                 uint64_t offset, span_list* list) {
  kalos_span* span = add_span(list, length - offset);
  if (!span) return nullptr;
  const view_item& item = turns.items[t];
  span->pos = item.pos;
  span->id = item.id;
  span->run = item.run;
  span->crc = item.crc;
  span->skip = (uint32_t)(offset + (turns.skips ? turns.skips[t] : 0));
  span->kind = (uint8_t)item.kind;
  span->role = turns.roles[t];
  if (offset) span->flags |= KALOS_SPAN_CUT;
  return span;
}

// Length of item t where the history goes on to `end`: what follows may take tokens off its end.
inline uint64_t view_length(const view_turns& turns, uint64_t t, uint64_t end) {
  uint64_t next = t + 1;
  while (next < end && is_absent(turns, next)) ++next;
  const uint64_t stop = next < end ? position_of(turns, next) : turns.sum_before(end);
  return stop - position_of(turns, t);
}

// The last user turn of [begin, end) behind which nothing belongs to the same block; `end` for
// none.
template <class Turns>
uint64_t last_user_turn(const Turns& turns, uint64_t begin, uint64_t end) {
  for (uint64_t t = end; t > begin; --t) {
    if (turns.role(t - 1) != KALOS_ROLE_USER || is_absent(turns, t - 1)) continue;
    uint64_t at = t - 1;
    while (at > begin && turns.trim(at) > 0) --at;
    return at;
  }
  return end;
}

// A session as it is planned: where it lies, or through a view.
struct history {
  bool plain;
  table_turns table;
  view_turns view;
};

inline kalos_history_plan plan_any(const history& turns, const kalos_plan_request& request,
                                   kalos_plan_resume* resume) {
  return turns.plain ? plan_history(turns.table, request, resume)
                     : plan_history(turns.view, request, resume);
}

inline uint64_t repeated_any(const history& turns, const kalos_history_plan& plan,
                             uint64_t* before) {
  return turns.plain ? repeated_role(turns.table, plan.begin, plan.end, before)
                     : repeated_role(turns.view, plan.begin, plan.end, before);
}

inline uint64_t last_user_any(const history& turns, const kalos_history_plan& plan) {
  return turns.plain ? last_user_turn(turns.table, plan.begin, plan.end)
                     : last_user_turn(turns.view, plan.begin, plan.end);
}

// Tokens of the newest unit that takes any.
inline uint64_t newest_unit_any(const history& turns) {
  if (turns.plain) {
    const uint64_t n = turns.table.num_turns();
    return n ? turns.table.sum_before(n) - turns.table.sum_before(n - 1) : 0;
  }
  uint64_t n = turns.view.num_turns();
  while (n > 0 && is_absent(turns.view, n - 1)) --n;
  if (n == 0) return 0;
  const unit_span unit = unit_of(turns.view, n - 1);
  return turns.view.sum_before(unit.end) - turns.view.sum_before(unit.begin);
}

// Adds the call that stands before a plan's kept run, where there is one. 0, or 1 for no memory.
inline int64_t add_call_any(const history& turns, const kalos_history_plan& plan, span_list* list) {
  if (turns.plain || plan.call == KALOS_PLAN_NONE) return 0;
  const view_turns& view = turns.view;
  const uint64_t length = position_of(view, plan.call + 1) - position_of(view, plan.call);
  return add_view_item(view, plan.call, length, 0, list) ? 0 : 1;
}

// Adds the turns [from, to) of a plan, which lie in its kept run. Returns as add_table_turns.
inline int64_t add_turns_any(const history& turns, const kalos_history_plan& plan, uint64_t from,
                             uint64_t to, span_list* list) {
  if (from >= to) return 0;
  const uint64_t offset = from == plan.begin ? plan.offset : 0;
  if (turns.plain) return add_table_turns(turns.table, from, to, offset, list);
  const view_turns& view = turns.view;
  for (uint64_t t = from; t < to; ++t) {
    if (is_absent(view, t)) continue;
    if (!add_view_item(view, t, view_length(view, t, plan.end), t == from ? offset : 0, list))
      return 1;
  }
  return 0;
}

// Copies a run and returns the checksum of what was copied.
inline uint32_t copy_checked(int32_t* to, const void* from, uint64_t n) {
  memcpy(to, from, n * 4);
  return kalos_crc32c(0, to, n * 4);
}

// Whether `ids` stand in `history` as one run; no IDs count as standing there. The first ID is
// looked for sixteen places at a time, a loop without exits that compilers turn into vector
// compares: measured 2 us for 8,192 IDs where memmem takes 20.
inline bool stands_in(const int32_t* history, uint64_t num_tokens, const int32_t* ids, uint64_t n) {
  if (n == 0) return true;
  if (n > num_tokens) return false;
  const uint64_t places = num_tokens - n + 1;
  const int32_t first = ids[0];
  for (uint64_t block = 0; block < places; block += 16) {
    const uint64_t stop = places - block < 16 ? places - block : 16;
    uint32_t any = 0;
    if (stop == 16) {
      for (uint64_t i = 0; i < 16; ++i) any |= history[block + i] == first;
    } else {
      any = 1;
    }
    if (!any) continue;
    for (uint64_t i = 0; i < stop; ++i)
      if (history[block + i] == first && memcmp(history + block + i, ids, n * 4) == 0) return true;
  }
  return false;
}

inline uint64_t common_tokens(const int32_t* a, const int32_t* b, uint64_t n) {
  uint64_t i = 0;
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

}  // namespace kalos

#endif  // KALOS_TURN_TABLE_H
