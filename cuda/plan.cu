// kalos_plan_history: plan the histories of a batch of sessions, one thread a session.
//   sessions    kalos_plan_session [num_sessions]  device
//   ends        uint64 [total_turns]               device, tokens up to and including the turn, per
//   session unit_first  uint32 [total_turns]               device, per session; null: each turn a
//   unit trims       uint32 [total_turns]               device, or null: none roles       uint8
//   [total_turns]                device plans       kalos_history_plan [num_sessions]  device,
//   written once
// Turn t of a session is element `first + t`, and numbers in ends and unit_first count from the
// session's first turn. Token bytes are not at hand, so a partial cut may fall inside a multi-token
// character. Grid: any, strided. Block: KALOS_PLAN_BLOCK. Shared memory: none. Reference:
// kalos_plan.h on the host, the same code. Bound: latency of the search, tens of dependent loads.
#include "kalos_plan.h"

extern "C" __global__ void __launch_bounds__(KALOS_PLAN_BLOCK)
    kalos_plan_history(const kalos_plan_session* __restrict__ sessions, uint64_t num_sessions,
                       const uint64_t* __restrict__ ends, const uint32_t* __restrict__ unit_first,
                       const uint32_t* __restrict__ trims, const uint8_t* __restrict__ roles,
                       kalos_history_plan* __restrict__ plans) {
  const uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < num_sessions;
       i += stride) {
    const kalos_plan_session session = sessions[i];
    const kalos::flat_turns turns = {session.num_turns,
                                     session.max_unit_turns,
                                     ends + session.first,
                                     unit_first ? unit_first + session.first : nullptr,
                                     roles + session.first,
                                     trims ? trims + session.first : nullptr,
                                     nullptr};
    plans[i] = kalos::plan_history(turns, session.request, nullptr);
  }
}
