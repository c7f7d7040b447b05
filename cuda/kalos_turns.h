// kalos_turns.h: a session's turns as the planner reads them: token sums, units, search. Plain
// C++17 for the host (Cython) and the device (NVRTC). No allocation, no exception, no library.
//
// THE MODEL. A session's history is one run of tokens. `sum_before(t)` is where the run of turn t
// ends to begin: the tokens of the turns before t as they stand in a window. A turn that takes no
// tokens is an orphan (a result whose call is not stored); it keeps its place and never stands in a
// window. Units are the stretches between positions where no group is split. Each turn carries
// `unit_first`, the first turn of the unit that it closed when it was appended. The spans
// [unit_first(t), t] never overlap without one holding the other, and they depend on earlier turns
// alone: the units as of any n are read from the first n turns, and an append never rewrites a
// turn.
//
// THE ACCESSOR. Functions take a `Turns` with
//   uint64_t num_turns() const             turns in the history (n)
//   uint64_t sum_before(uint64_t t) const  t in [0, n]; never falls as t rises
//   uint32_t unit_first(uint64_t t) const  t in [0, n); t itself where groups are not kept
//   uint64_t max_unit_turns() const        no unit_first(t) is below t + 1 - max_unit_turns; >= 1
//   uint32_t trim(uint64_t t) const        tokens the turn before loses at its end where t follows
//   uint32_t role(uint64_t t) const        KALOS_ROLE_*
//   bool starts_character(uint64_t t, uint64_t offset) const   false inside a multi-token character
// A turn with trim > 0 is in one unit with the turn before, so that sums at unit boundaries are
// exact.
//
// ALTERNATION "merge" enters before planning: turns in a row of one role become one, so they form
// one unit, and the later one's prefix and the earlier one's suffix leave the sums. `merge_runs`
// writes such a history. Parallel results (roles tool and function) are separate turns by design
// and are never merged.
#ifndef KALOS_TURNS_H
#define KALOS_TURNS_H

#include "kalos_layout.h"

#ifdef __CUDACC__
#define KALOS_HD __host__ __device__
#else
#define KALOS_HD
#endif

#define KALOS_PLAN_NONE (~(uint64_t)0)

namespace kalos {

struct unit_span {
  uint64_t begin;
  uint64_t end;
};

// A history in flat arrays.
struct flat_turns {
  uint64_t count;
  uint64_t widest;                  // max_unit_turns
  const uint64_t* ends;             // [count] tokens up to and including the turn
  const uint32_t* firsts;           // [count] unit_first, or null: each turn a unit
  const uint8_t* roles;             // [count]
  const uint32_t* trims;            // [count], or null: none
  const uint8_t* character_starts;  // [tokens] by place in the history, or null: unknown

  KALOS_HD uint64_t num_turns() const { return count; }
  KALOS_HD uint64_t sum_before(uint64_t t) const { return t == 0 ? 0 : ends[t - 1]; }
  KALOS_HD uint32_t unit_first(uint64_t t) const { return firsts ? firsts[t] : (uint32_t)t; }
  KALOS_HD uint64_t max_unit_turns() const { return firsts ? widest : 1; }
  KALOS_HD uint32_t trim(uint64_t t) const { return trims ? trims[t] : 0; }
  KALOS_HD uint32_t role(uint64_t t) const { return roles[t]; }
  KALOS_HD bool starts_character(uint64_t t, uint64_t offset) const {
    return !character_starts || character_starts[sum_before(t) - trim(t) + offset] != 0;
  }
};

// The same with the framing of each turn, as merge_runs reads it.
struct framed_turns : flat_turns {
  const uint32_t* prefixes;  // [count]
  const uint32_t* suffixes;  // [count]

  KALOS_HD uint32_t prefix(uint64_t t) const { return prefixes[t]; }
  KALOS_HD uint32_t suffix(uint64_t t) const { return suffixes[t]; }
};

// ---- Units ----------------------------------------------------------------------------------

// Turns of these roles answer a call.
KALOS_HD inline bool is_result(uint32_t role) {
  return role == KALOS_ROLE_TOOL || role == KALOS_ROLE_FUNCTION;
}

// The turn whose unit a turn joins when it is appended: KALOS_PLAN_NONE where it begins its own
// unit. A result that joins nothing is an orphan.
//   last_of_group       newest turn of the same group that is no orphan, or KALOS_PLAN_NONE
//   group_has_assistant whether an assistant turn is among them
//   last_assistant      newest assistant turn of the session, or KALOS_PLAN_NONE
KALOS_HD inline uint64_t unit_anchor(uint32_t role, bool grouped, uint64_t last_of_group,
                                     bool group_has_assistant, uint64_t last_assistant) {
  if (!grouped) return is_result(role) ? last_assistant : KALOS_PLAN_NONE;
  if (is_result(role) && !group_has_assistant) return KALOS_PLAN_NONE;
  return last_of_group;
}

// unit_first of turn `t`, which joins the unit of the earlier turn `anchor`: all between becomes
// one unit. `firsts` need hold the turns before t only. Steps back unit by unit.
template <class Firsts>
KALOS_HD uint32_t unit_first_of(const Firsts& firsts, uint64_t t, uint64_t anchor) {
  uint64_t last = t - 1;
  while (firsts[last] > anchor) last = firsts[last] - 1;
  return (uint32_t)firsts[last];
}

// Keeps `starts` (the first turns of the units, `count` of them) while turns are counted in
// ascending order: a turn that reaches back takes the units it covers off the stack. Returns the
// new count.
KALOS_HD inline uint64_t push_unit(uint32_t* starts, uint64_t count, uint32_t unit_first) {
  while (count > 0 && starts[count - 1] >= unit_first) --count;
  starts[count] = unit_first;
  return count + 1;
}

// The unit that holds turn t. Of the spans around t the widest was closed last, at most
// max_unit_turns - 1 turns behind t.
template <class Turns>
KALOS_HD unit_span unit_of(const Turns& turns, uint64_t t) {
  uint64_t last = t;
  uint64_t first = turns.unit_first(t);
  uint64_t stop = t + turns.max_unit_turns();
  if (stop > turns.num_turns()) stop = turns.num_turns();
  for (uint64_t e = t + 1; e < stop; ++e) {
    const uint64_t reach = turns.unit_first(e);
    if (reach <= t) {
      last = e;
      first = reach;
    }
  }
  return unit_span{first, last + 1};
}

// The first unit boundary at or behind turn t.
template <class Turns>
KALOS_HD uint64_t boundary_from(const Turns& turns, uint64_t t) {
  if (t >= turns.num_turns()) return turns.num_turns();
  const unit_span unit = unit_of(turns, t);
  return unit.begin == t ? t : unit.end;
}

template <class Turns>
KALOS_HD bool is_absent(const Turns& turns, uint64_t t) {
  return turns.sum_before(t + 1) == turns.sum_before(t);
}

// Token position of a turn's first token in the history.
template <class Turns>
KALOS_HD uint64_t position_of(const Turns& turns, uint64_t t) {
  return turns.sum_before(t) - turns.trim(t);
}

// ---- Search ---------------------------------------------------------------------------------

// Smallest t in [lo, hi] with sum_before(t) >= target; sum_before(hi) >= target is the caller's
// duty. Gallops from a guess: a good one costs a few probes that lie close together.
template <class Turns>
KALOS_HD uint64_t first_at_least(const Turns& turns, uint64_t lo, uint64_t hi, uint64_t guess,
                                 uint64_t target) {
  if (guess < lo) guess = lo;
  if (guess > hi) guess = hi;
  uint64_t step = 8;
  if (turns.sum_before(guess) >= target) {
    hi = guess;
    while (lo < hi) {
      const uint64_t probe = hi - lo > step ? hi - step : lo;
      if (turns.sum_before(probe) < target) {
        lo = probe + 1;
        break;
      }
      hi = probe;
      step *= 2;
    }
  } else {
    lo = guess + 1;
    while (hi - lo > step) {
      const uint64_t probe = lo + step;
      if (turns.sum_before(probe) >= target) {
        hi = probe;
        break;
      }
      lo = probe + 1;
      step *= 2;
    }
  }
  while (lo < hi) {
    const uint64_t middle = lo + (hi - lo) / 2;
    if (turns.sum_before(middle) >= target) {
      hi = middle;
    } else {
      lo = middle + 1;
    }
  }
  return lo;
}

// The turn that holds the token at `position`, which lies before the end of the history.
template <class Turns>
KALOS_HD uint64_t turn_at(const Turns& turns, uint64_t position) {
  const uint64_t n = turns.num_turns();
  const uint64_t t = first_at_least(turns, 0, n, n, position + 1) - 1;
  uint64_t later = t + 1;
  while (later < n && is_absent(turns, later)) ++later;
  return later < n && position_of(turns, later) <= position ? later : t;
}

// ---- Alternation "merge" --------------------------------------------------------------------

// The history that merge_runs writes, [count] each; flat_turns takes the first three.
struct merged_arrays {
  uint64_t* ends;
  uint32_t* firsts;
  uint32_t* trims;
  uint32_t*
      skips;  // tokens a turn loses at its beginning: its prefix, where it joined the turn before
};

// Where merge_runs stands; all zero but `last_present` before the first turn.
struct merge_state {
  uint64_t count;         // turns written
  uint64_t last_present;  // newest turn that is no orphan, or KALOS_PLAN_NONE
  uint64_t widest;        // max_unit_turns so far
};

// Writes turns [state->count, until) of a history in which runs of one role are one turn each.
// `Source` is an accessor that also has uint32_t prefix(t) and suffix(t), the framing's lengths.
// The first turn of a run keeps its prefix and the last its suffix.
template <class Source>
KALOS_HD void merge_runs(const Source& source, uint64_t until, merged_arrays out,
                         merge_state* state) {
  for (uint64_t t = state->count; t < until; ++t) {
    const uint64_t last = state->last_present;
    const bool absent = is_absent(source, t);
    const bool joins = !absent && last != KALOS_PLAN_NONE && source.role(t) == source.role(last) &&
                       !is_result(source.role(t));
    uint64_t length = source.sum_before(t + 1) - source.sum_before(t);
    out.trims[t] = source.trim(t);
    out.skips[t] = 0;
    // A turn that shares the block of the one before (trim) has no framing of its own left to lose.
    if (joins && out.trims[t] == 0 && source.prefix(t) + source.suffix(last) < length) {
      out.trims[t] = source.suffix(last);
      out.skips[t] = source.prefix(t);
      length -= out.trims[t] + out.skips[t];
    }
    uint64_t anchor = source.unit_first(t);
    if (joins && last < anchor) anchor = last;
    out.firsts[t] = anchor == t ? (uint32_t)t : unit_first_of(out.firsts, t, anchor);
    out.ends[t] = (t ? out.ends[t - 1] : 0) + length;
    if (t + 1 - out.firsts[t] > state->widest) state->widest = t + 1 - out.firsts[t];
    if (!absent) state->last_present = t;
    state->count = t + 1;
  }
}

}  // namespace kalos

#endif  // KALOS_TURNS_H
