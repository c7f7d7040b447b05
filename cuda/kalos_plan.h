// kalos_plan.h: which turns and passages go into a window. Plain C++17 for the host (Cython) and
// the device (NVRTC), so that both plan alike by construction. No allocation, no exception, no
// library. kalos_turns.h says how a history is read.
//
// WHAT IS KEPT is CONTRACT.md's "How the history is cut". Decided here beyond its words:
// - Adjustments to a partial cut (characters, groups) apply to the final cut. The walk goes on from
// the cut
//   without them, so that they never add up.
// - A call is an assistant turn that a later turn of its unit answers. A cut inside the unit keeps
// the call
//   nearest before the cut, whole, and takes from its results as much more. If nothing of the
//   results would be left, the call goes with them. Other turns of the unit before the cut go.
// - start_on looks at the first turn that is kept, whole or cut; end_on at the last.
// - Orphans are no units: they are skipped at both ends.
#ifndef KALOS_PLAN_H
#define KALOS_PLAN_H

#include "kalos_turns.h"

#define KALOS_PLAN_STABLE 0x1u   // stable_prefix, else sliding
#define KALOS_PLAN_PARTIAL 0x2u  // allow_partial
#define KALOS_PLAN_GROUPS 0x4u   // keep_groups: the accessor's units are groups, else each turn
#define KALOS_PLAN_MERGED 0x8u   // the accessor is a history written by merge_runs

#define KALOS_PLAN_OK 0u
#define KALOS_PLAN_EMPTY 1u  // nothing to keep: no budget, or no turn that could stand in a window
#define KALOS_PLAN_OVERFLOW 2u  // the newest unit does not fit: BudgetExceeded, or no history

#define KALOS_FATE_KEPT 0u
#define KALOS_FATE_CUT 1u       // stands in the window without its beginning
#define KALOS_FATE_BUDGET 2u    // older than what fits
#define KALOS_FATE_GROUP 3u     // fits by itself, and went because its unit does not
#define KALOS_FATE_ABSENT 4u    // takes no tokens: a result without an earlier call
#define KALOS_FATE_START_ON 5u  // removed until the window begins with an allowed role
#define KALOS_FATE_END_ON 6u    // removed until the window ends with an allowed role
#define KALOS_FATE_OVERFLOW 7u  // of the newest unit, which does not fit

#define KALOS_PASSAGE_TAKEN 0u
#define KALOS_PASSAGE_BUDGET 1u
#define KALOS_PASSAGE_DUPLICATE 2u

#define KALOS_PLAN_BLOCK 128  // threads a block of kalos_plan_history

typedef struct kalos_plan_request {
  uint64_t budget;   // H, tokens the history may take
  uint64_t low;      // kalos::low_mark(H, low_water); unused when sliding
  uint64_t settled;  // turns before it have their final length; a resume never remembers later ones
  uint32_t flags;    // KALOS_PLAN_*
  uint32_t start_on;  // bit per role, 0 for any
  uint32_t end_on;    // bit per role, 0 for any
  uint32_t reserved;
} kalos_plan_request;
KALOS_STATIC_ASSERT(sizeof(kalos_plan_request) == 40, "kalos_plan_request");

// The window's history is: turn `call` whole where there is one, then the turns [begin, end) in a
// row, the first of them without its first `offset` tokens.
typedef struct kalos_history_plan {
  uint64_t begin;
  uint64_t end;
  uint64_t offset;     // counted from the turn's first token that stands in the history
  uint64_t call;       // KALOS_PLAN_NONE, or a call whose results lost their beginning
  uint64_t fit_begin;  // first turn before start_on and end_on removed any
  uint64_t tokens;     // length of all of it
  uint32_t code;       // KALOS_PLAN_OK, _EMPTY or _OVERFLOW
  uint32_t reserved;
} kalos_history_plan;
KALOS_STATIC_ASSERT(sizeof(kalos_history_plan) == 56, "kalos_history_plan");

// Where the walk of the stable boundary stood after its last two moves. All zero is a valid start.
// The caller keeps it per session and clears it when turns are rolled back. It holds no state that
// the result depends on: with it and without it the boundary is the same.
typedef struct kalos_plan_resume {
  uint64_t budget;
  uint64_t low;
  uint64_t turns;  // turns that the walk had seen
  uint64_t mark;   // boundary after the last move: a turn, or a token position where partial
  uint64_t next;   // first turn that the walk had not counted then
  uint64_t mark_before;
  uint64_t next_before;
  uint32_t flags;  // which walk it is: KALOS_PLAN_PARTIAL, _GROUPS, _MERGED
  uint32_t reserved;
} kalos_plan_resume;
KALOS_STATIC_ASSERT(sizeof(kalos_plan_resume) == 64, "kalos_plan_resume");

// One session of a batch: its turns stand in flat arrays from `first` on.
typedef struct kalos_plan_session {
  uint64_t first;
  uint64_t num_turns;
  uint64_t max_unit_turns;
  kalos_plan_request request;
} kalos_plan_session;
KALOS_STATIC_ASSERT(sizeof(kalos_plan_session) == 64, "kalos_plan_session");

namespace kalos {

// ---- The boundary ---------------------------------------------------------------------------

// low_water * H, defined here once: the product in double, rounded down. A whole sum is at most the
// product if and only if it is at most this.
KALOS_HD inline uint64_t low_mark(uint64_t budget, double low_water) {
  return (uint64_t)((double)budget * low_water);
}

// Lowest turn below `next` that the unit of a turn in [from, n) reaches back to; `next` where none
// does.
template <class Turns>
KALOS_HD uint64_t reached_back(const Turns& turns, uint64_t from, uint64_t next) {
  uint64_t lowest = next;
  uint64_t stop = next + turns.max_unit_turns();
  if (stop > turns.num_turns()) stop = turns.num_turns();
  for (uint64_t t = from; t < stop; ++t) {
    if (turns.unit_first(t) < lowest) lowest = turns.unit_first(t);
  }
  return lowest;
}

// Whether a remembered move can be of these turns at all: what it kept ends at its next turn and is
// within the budget. Keeps a state of other turns, which its owner did not clear, from leading
// astray.
template <class Turns>
KALOS_HD bool can_go_on(const Turns& turns, const kalos_plan_request& request,
                        const kalos_plan_resume& resume) {
  if (resume.turns > turns.num_turns() || resume.next > resume.turns) return false;
  const uint64_t counted = turns.sum_before(resume.next);
  if (!(request.flags & KALOS_PLAN_PARTIAL)) {
    return resume.mark <= resume.next && counted - turns.sum_before(resume.mark) <= request.budget;
  }
  return resume.mark <= counted && counted - resume.mark <= request.budget;
}

// Makes `resume` a state from which the walk over these turns may go on. The walk depends on the
// units it counted, so a move is undone when a later turn has since joined one of them.
template <class Turns>
KALOS_HD void rewind_walk(const Turns& turns, const kalos_plan_request& request,
                          kalos_plan_resume* resume) {
  const uint32_t walk = request.flags & ~KALOS_PLAN_STABLE;
  const uint64_t n = turns.num_turns();
  const kalos_plan_resume fresh = {request.budget, request.low, n, 0, 0, 0, 0, walk, 0};
  const uint64_t seen = resume->turns;
  if (resume->budget != request.budget || resume->low != request.low || resume->flags != walk ||
      !can_go_on(turns, request, *resume)) {
    *resume = fresh;
    return;
  }
  resume->turns = n;
  const uint64_t lowest = reached_back(turns, seen, resume->next);
  if (resume->next <= lowest) return;
  const uint64_t mark = resume->mark_before;
  const uint64_t next = resume->next_before;
  *resume = fresh;
  if (next > lowest) return;
  resume->mark = mark;
  resume->next = next;
  if (!can_go_on(turns, request, *resume)) *resume = fresh;
}

// One move of the walk at unit i, with which more than H tokens would be kept: the new mark.
template <class Turns>
KALOS_HD uint64_t moved_mark(const Turns& turns, const kalos_plan_request& request, unit_span unit,
                             uint64_t guess) {
  const uint64_t stop = turns.sum_before(unit.end);
  const uint64_t length = stop - turns.sum_before(unit.begin);
  if (request.flags & KALOS_PLAN_PARTIAL) {
    const uint64_t own = length < request.budget ? length : request.budget;
    return stop - (own > request.low ? own : request.low);
  }
  if (length > request.low) return length <= request.budget ? unit.begin : unit.end;
  return boundary_from(turns, first_at_least(turns, 0, unit.begin, guess, stop - request.low));
}

// CONTRACT.md's walk, move by move: between two moves nothing happens, so the unit of the next move
// is searched for in the sums. Returns the boundary: a turn, or a token position where partial.
template <class Turns>
KALOS_HD uint64_t walk_boundary(const Turns& turns, const kalos_plan_request& request,
                                kalos_plan_resume* resume) {
  const bool partial = (request.flags & KALOS_PLAN_PARTIAL) != 0;
  const uint64_t n = turns.num_turns();
  const uint64_t total = turns.sum_before(n);
  kalos_plan_resume scratch = {};
  if (!resume) resume = &scratch;
  rewind_walk(turns, request, resume);
  uint64_t mark = resume->mark;
  uint64_t next = resume->next;
  uint64_t start = partial ? mark : turns.sum_before(mark);
  if (total - start <= request.budget) return mark;
  const double turns_per_token = (double)n / (double)total;
  const uint64_t low_turns = (uint64_t)((double)request.low * turns_per_token);
  while (total - start > request.budget) {
    // start + budget does not overflow: it is below the total here.
    const uint64_t target = start + request.budget + 1;
    const uint64_t missing = target - turns.sum_before(next);
    const uint64_t guess = next + (uint64_t)((double)missing * turns_per_token);
    const unit_span unit = unit_of(turns, first_at_least(turns, next + 1, n, guess, target) - 1);
    mark = moved_mark(turns, request, unit, unit.end > low_turns ? unit.end - low_turns : 0);
    next = unit.end;
    start = partial ? mark : turns.sum_before(mark);
    if (next <= request.settled) {
      resume->mark_before = resume->mark;
      resume->next_before = resume->next;
      resume->mark = mark;
      resume->next = next;
    }
  }
  return mark;
}

// ---- Partial cuts ---------------------------------------------------------------------------

// The results of call `call` within its unit: from `call` + 1 to behind the last result before
// another assistant turn. Returns that end; `call` + 1 where nothing answers it.
template <class Turns>
KALOS_HD uint64_t results_end(const Turns& turns, uint64_t call, uint64_t unit_end) {
  uint64_t end = call + 1;
  for (uint64_t t = call + 1; t < unit_end; ++t) {
    if (is_absent(turns, t)) continue;
    if (turns.role(t) == KALOS_ROLE_ASSISTANT) break;
    if (is_result(turns.role(t))) end = t + 1;
  }
  return end;
}

// Puts the plan's beginning at `position`, or at the next token that starts a character: fewer
// tokens, never more. A turn always starts one.
template <class Turns>
KALOS_HD void begin_at(const Turns& turns, uint64_t position, kalos_history_plan* plan) {
  const uint64_t n = turns.num_turns();
  plan->begin = n;
  plan->offset = 0;
  if (position >= turns.sum_before(n)) return;
  uint64_t t = turn_at(turns, position);
  uint64_t offset = position - position_of(turns, t);
  while (offset > 0 && !turns.starts_character(t, offset)) {
    ++offset;
    ++position;
    if (position >= turns.sum_before(n)) return;
    const uint64_t reached = turn_at(turns, position);
    if (reached != t) {
      t = reached;
      offset = 0;
    }
  }
  plan->begin = t;
  plan->offset = offset;
}

// Cuts the history at a token position. Inside a group the call that the cut results answer stays
// whole and its results lose as much more: the kept length is the same. Where nothing of the
// results would be left, the call goes with them and what follows them in the unit stays.
template <class Turns>
KALOS_HD void cut_at(const Turns& turns, uint64_t position, kalos_history_plan* plan) {
  const uint64_t n = turns.num_turns();
  begin_at(turns, position, plan);
  if (position >= turns.sum_before(n)) return;
  const uint64_t hit = turn_at(turns, position);
  const unit_span unit = unit_of(turns, hit);
  uint64_t call = hit;
  while (call > unit.begin &&
         (is_absent(turns, call) || turns.role(call) != KALOS_ROLE_ASSISTANT)) {
    --call;
  }
  const uint64_t call_start = position_of(turns, call);
  if (turns.role(call) != KALOS_ROLE_ASSISTANT || position <= call_start) return;
  const uint64_t answered = results_end(turns, call, unit.end);
  if (answered == call + 1) return;
  const uint64_t call_stop = position_of(turns, call + 1);
  const uint64_t results_stop =
      answered < unit.end ? position_of(turns, answered) : turns.sum_before(answered);
  if (position >= results_stop) return;
  const uint64_t lost = (position < call_stop ? position : call_stop) - call_start;
  const uint64_t resumed = (position < call_stop ? call_stop : position) + lost;
  if (resumed < results_stop) {
    begin_at(turns, resumed, plan);
    if (plan->begin < answered) {
      plan->call = call;
      return;
    }
  }
  begin_at(turns, results_stop, plan);
}

// ---- The history of a window ----------------------------------------------------------------

template <class Turns>
KALOS_HD void skip_absent(const Turns& turns, kalos_history_plan* plan) {
  while (plan->begin < plan->end && is_absent(turns, plan->begin)) ++plan->begin;
  while (plan->end > plan->begin && is_absent(turns, plan->end - 1)) --plan->end;
}

// start_on and end_on: whole units go until the first and the last turn have an allowed role.
template <class Turns>
KALOS_HD void trim_roles(const Turns& turns, const kalos_plan_request& request,
                         kalos_history_plan* plan) {
  while (request.start_on && plan->begin < plan->end) {
    const uint64_t first = plan->call != KALOS_PLAN_NONE ? plan->call : plan->begin;
    if (request.start_on >> turns.role(first) & 1u) break;
    plan->begin = unit_of(turns, plan->begin).end;
    plan->offset = 0;
    plan->call = KALOS_PLAN_NONE;
    skip_absent(turns, plan);
  }
  while (request.end_on && plan->end > plan->begin) {
    if (request.end_on >> turns.role(plan->end - 1) & 1u) break;
    const uint64_t end = unit_of(turns, plan->end - 1).begin;
    plan->end = end > plan->begin ? end : plan->begin;
    skip_absent(turns, plan);
  }
}

// Length of a plan's history; a plan that keeps no turn is reduced to nothing.
template <class Turns>
KALOS_HD void count_tokens(const Turns& turns, kalos_history_plan* plan) {
  plan->tokens = 0;
  if (plan->begin >= plan->end) {
    plan->end = plan->begin;
    plan->offset = 0;
    plan->call = KALOS_PLAN_NONE;
    return;
  }
  plan->tokens = turns.sum_before(plan->end) - position_of(turns, plan->begin) - plan->offset;
  if (plan->call != KALOS_PLAN_NONE) {
    plan->tokens += position_of(turns, plan->call + 1) - position_of(turns, plan->call);
  }
}

// Plans the history. `resume` may be null; it is for stable plans of the session as it stands, and
// must not be shared between threads. Never more than request.budget tokens.
template <class Turns>
KALOS_HD kalos_history_plan plan_history(const Turns& turns, const kalos_plan_request& request,
                                         kalos_plan_resume* resume) {
  const uint64_t n = turns.num_turns();
  const uint64_t total = turns.sum_before(n);
  kalos_history_plan plan = {n, n, 0, KALOS_PLAN_NONE, n, 0, KALOS_PLAN_EMPTY, 0};
  if (request.budget == 0 || total == 0) return plan;
  const bool partial = (request.flags & KALOS_PLAN_PARTIAL) != 0;
  if (request.flags & KALOS_PLAN_STABLE) {
    const uint64_t mark = walk_boundary(turns, request, resume);
    if (partial) {
      cut_at(turns, mark, &plan);
    } else {
      plan.begin = mark;
    }
  } else if (total <= request.budget) {
    plan.begin = 0;
  } else if (partial) {
    cut_at(turns, total - request.budget, &plan);
  } else {
    const uint64_t guess = n - (uint64_t)((double)request.budget * ((double)n / (double)total));
    plan.begin = boundary_from(turns, first_at_least(turns, 0, n, guess, total - request.budget));
  }
  skip_absent(turns, &plan);
  plan.fit_begin = plan.call != KALOS_PLAN_NONE ? plan.call : plan.begin;
  if (plan.begin == plan.end) {
    plan.code = KALOS_PLAN_OVERFLOW;
    return plan;
  }
  trim_roles(turns, request, &plan);
  count_tokens(turns, &plan);
  plan.code = plan.tokens > 0 ? KALOS_PLAN_OK : KALOS_PLAN_EMPTY;
  return plan;
}

// What becomes of turn t in a plan of these turns, and why.
template <class Turns>
KALOS_HD uint32_t fate_of(const Turns& turns, const kalos_plan_request& request,
                          const kalos_history_plan& plan, uint64_t t) {
  if (is_absent(turns, t)) return KALOS_FATE_ABSENT;
  if (t == plan.call) return KALOS_FATE_KEPT;
  if (t >= plan.begin && t < plan.end) {
    return t == plan.begin && plan.offset > 0 ? KALOS_FATE_CUT : KALOS_FATE_KEPT;
  }
  if (request.budget == 0) return KALOS_FATE_BUDGET;
  if (t >= plan.fit_begin && plan.call == KALOS_PLAN_NONE) {
    return t >= plan.end ? KALOS_FATE_END_ON : KALOS_FATE_START_ON;
  }
  if (t >= plan.end) return KALOS_FATE_END_ON;
  if (plan.call != KALOS_PLAN_NONE && t > plan.call) return KALOS_FATE_BUDGET;
  const uint64_t n = turns.num_turns();
  const unit_span unit = unit_of(turns, t);
  if (plan.code == KALOS_PLAN_OVERFLOW) {
    // The newest unit is the last that takes tokens; orphans may stand behind it.
    if (turns.sum_before(unit.end) == turns.sum_before(n)) return KALOS_FATE_OVERFLOW;
  }
  const bool fits = turns.sum_before(n) - turns.sum_before(t) <= request.budget;
  return fits && unit.end - unit.begin > 1 ? KALOS_FATE_GROUP : KALOS_FATE_BUDGET;
}

// The first turn of [begin, end) that has the role of the turn before it, orphans aside
// (alternation "strict"), or KALOS_PLAN_NONE; `before` is then that earlier turn. Results may
// follow one another.
template <class Turns>
KALOS_HD uint64_t repeated_role(const Turns& turns, uint64_t begin, uint64_t end,
                                uint64_t* before) {
  uint64_t last = KALOS_PLAN_NONE;
  for (uint64_t t = begin; t < end; ++t) {
    if (is_absent(turns, t)) continue;
    if (last != KALOS_PLAN_NONE && turns.role(t) == turns.role(last) && !is_result(turns.role(t))) {
      *before = last;
      return t;
    }
    last = t;
  }
  return KALOS_PLAN_NONE;
}

// ---- Recalled passages ----------------------------------------------------------------------

// Tokens that the framing of recalled passages takes: prefix p1 separator p2 ... suffix. Nothing
// where no passage is taken.
struct recall_frame {
  uint64_t prefix;
  uint64_t separator;
  uint64_t suffix;
};

// Takes passages in order of score while they fit, whole; one that does not fit is passed over.
// `in_history` says which stand in the history already; `same_as` gives the first passage with the
// same token IDs (itself where there is none). Writes KALOS_PASSAGE_* and returns the tokens used,
// framing included.
KALOS_HD inline uint64_t select_passages(const uint64_t* lengths, const uint8_t* in_history,
                                         const uint32_t* same_as, uint64_t count,
                                         recall_frame frame, uint64_t budget, uint8_t* verdicts) {
  uint64_t used = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (in_history[i] || (same_as[i] != i && verdicts[same_as[i]] == KALOS_PASSAGE_TAKEN)) {
      verdicts[i] = KALOS_PASSAGE_DUPLICATE;
      continue;
    }
    const uint64_t cost = lengths[i] + (used == 0 ? frame.prefix + frame.suffix : frame.separator);
    verdicts[i] = used + cost <= budget ? KALOS_PASSAGE_TAKEN : KALOS_PASSAGE_BUDGET;
    if (verdicts[i] == KALOS_PASSAGE_TAKEN) used += cost;
  }
  return used;
}

}  // namespace kalos

#endif  // KALOS_PLAN_H
