// Barriers and copies in bulk, which compute capability 9.0 has.
#pragma once
#include "linear_fast.cuh"

namespace df11::linear {
constexpr u32 MOST_STAGES = 16;

// What all launches before have written is there; nothing to wait for unless two run at once. Only
// then may the next launch begin: a kernel that waits for this one alone, as compilers make them,
// may so read what was written before it.
__device__ inline void wait_for_launch_before() {
    if constexpr (HOPPER) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
}

__device__ inline void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void arrive(u32 barrier) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(barrier) : "memory");
}
// Whether a phase of this parity, the last one or the one before, is complete.
__device__ inline u32 test_parity(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}
// Arrives when the copies that this thread has started before are there.
__device__ inline void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile(
        "{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}
// Waits until a phase of this parity, the last one or the one before, is complete.
__device__ inline void wait_for(u32 barrier, u32 parity) {
    if constexpr (HOPPER)
        asm volatile(
            "{ .reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra "
            "DONE;\nbra AGAIN;\nDONE: }" ::"r"(barrier),
            "r"(parity)
            : "memory");
    else
        while (!test_parity(barrier, parity)) {
        }
}
// Shows barriers to copies, after they have been made.
__device__ inline void show_barriers() {
    if constexpr (HOPPER) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// What is known to be written to shared memory is there for copies and products that come after.
__device__ inline void fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Copies of 16 bytes and multiples, aligned; `once`: nobody reads them again.
__device__ inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ inline u64 once_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}
__device__ inline void copy_bulk_once(u32 to, const void* from, u32 bytes, u32 barrier,
                                      u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ inline void arrive_at_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Keeps a value in a register: the compiler would make it again in each step.
__device__ inline u32 kept(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
}  // namespace df11::linear
