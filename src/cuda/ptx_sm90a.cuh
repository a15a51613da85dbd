// SPDX-License-Identifier: Apache-2.0
//
// Instructions of sm_90a alone: products of a warpgroup (four warps) that run beside its other work, copies
// of whole blocks, and the barriers in shared memory that both report to. For code that stands behind
// kAsyncProducts.
#ifndef ESPALIER_SRC_CUDA_PTX_SM90A_CUH_
#define ESPALIER_SRC_CUDA_PTX_SM90A_CUH_

#include <cstdint>

namespace espalier::cuda {

// Whether the code being compiled may use what is below.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kAsyncProducts = true;
#else
inline constexpr bool kAsyncProducts = false;
#endif

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Registers written before are seen by the products that follow.
__device__ __forceinline__ void FenceProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending groups of products are on their way.
template <int kPending>
__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Shared memory written by ordinary stores is seen by the products that follow.
__device__ __forceinline__ void FenceShared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of this warp from here on; all warps of a group of four do the same.
template <int kRegisters>
__device__ __forceinline__ void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void ShrinkRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A barrier in shared memory: a phase ends with its last arrival, and when all bytes that it was told to
// expect have come. `phase`: 0 and 1 by turns.
__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Barriers made before are seen by copies.
__device__ __forceinline__ void FenceBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void ArriveAndExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// `bytes` (a multiple of 16) from global to shared memory, on their own; `barrier` gets them.
__device__ __forceinline__ void CopyBlock(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
// The same to every block of the cluster that has its bit in `ranks`: there too the place is `shared`, and
// the barrier `barrier`.
__device__ __forceinline__ void CopyBlockToCluster(uint32_t shared, const void* global, uint32_t bytes,
                                                   uint32_t barrier, uint32_t ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(ranks))
      : "memory");
}
// From shared to global memory. REQUIRES: FenceShared by the writers before.
__device__ __forceinline__ void StoreBlock(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
// Until all blocks stored by this thread have arrived.
__device__ __forceinline__ void WaitForStores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

// Blocks of a cluster: which one this is, a barrier of all their threads, and an arrival in the shared memory
// of another one. The arrival says that memory was read: what it would take to publish writes to the whole
// cluster is a fence over the device, hundreds of cycles a stage.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// The whole warp: at the same barrier of all blocks.
template <uint32_t kBlocks>
__device__ __forceinline__ void ArriveAtAll(uint32_t barrier) {
  const uint32_t lane = threadIdx.x & 31;
  if (lane < kBlocks) ArriveAt(barrier, lane);
}

__device__ __forceinline__ void StoreShared128(uint32_t shared, uint32_t x, uint32_t y, uint32_t z,
                                               uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// An operand in shared memory: lines of 64 inputs, 128 bytes each, their 16-byte pieces swizzled: piece p of
// line r at p ^ (r % 8). `shared`: a multiple of 1024, plus 32 for each step of 16 inputs.
__device__ __forceinline__ uint64_t SharedOperand(uint32_t shared) {
  constexpr uint64_t kEightLines = uint64_t{1024 >> 4} << 32, kSwizzle128 = uint64_t{1} << 62;
  return uint64_t{(shared & 0x3FFFF) >> 4} | uint64_t{1} << 16 | kEightLines | kSwizzle128;
}

// d = a * b (+ d if `add`) for a warpgroup: a is 64 x 16, b 16 x (8 * kGroups), both in shared memory; d is
// laid out as the sums of kGroups mma.m16n8k16, each warp 16 rows.
template <int kGroups>
__device__ void MultiplyAsync(float (&d)[kGroups][4], uint64_t a, uint64_t b, bool add);

// An instruction names all of its registers: lists of four for each group, one longer than the other.
#define ESPALIER_REGISTERS_1 "%0, %1, %2, %3"
#define ESPALIER_REGISTERS_2 ESPALIER_REGISTERS_1 ", %4, %5, %6, %7"
#define ESPALIER_REGISTERS_3 ESPALIER_REGISTERS_2 ", %8, %9, %10, %11"
#define ESPALIER_REGISTERS_4 ESPALIER_REGISTERS_3 ", %12, %13, %14, %15"
#define ESPALIER_REGISTERS_5 ESPALIER_REGISTERS_4 ", %16, %17, %18, %19"
#define ESPALIER_REGISTERS_6 ESPALIER_REGISTERS_5 ", %20, %21, %22, %23"
#define ESPALIER_REGISTERS_7 ESPALIER_REGISTERS_6 ", %24, %25, %26, %27"
#define ESPALIER_REGISTERS_8 ESPALIER_REGISTERS_7 ", %28, %29, %30, %31"
#define ESPALIER_REGISTERS_9 ESPALIER_REGISTERS_8 ", %32, %33, %34, %35"
#define ESPALIER_REGISTERS_10 ESPALIER_REGISTERS_9 ", %36, %37, %38, %39"
#define ESPALIER_REGISTERS_11 ESPALIER_REGISTERS_10 ", %40, %41, %42, %43"
#define ESPALIER_REGISTERS_12 ESPALIER_REGISTERS_11 ", %44, %45, %46, %47"
#define ESPALIER_REGISTERS_13 ESPALIER_REGISTERS_12 ", %48, %49, %50, %51"
#define ESPALIER_REGISTERS_14 ESPALIER_REGISTERS_13 ", %52, %53, %54, %55"
#define ESPALIER_REGISTERS_15 ESPALIER_REGISTERS_14 ", %56, %57, %58, %59"
#define ESPALIER_REGISTERS_16 ESPALIER_REGISTERS_15 ", %60, %61, %62, %63"
#define ESPALIER_REGISTERS_32                                                                    \
  ESPALIER_REGISTERS_16                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ESPALIER_GROUP(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define ESPALIER_GROUPS_1 ESPALIER_GROUP(0)
#define ESPALIER_GROUPS_2 ESPALIER_GROUPS_1, ESPALIER_GROUP(1)
#define ESPALIER_GROUPS_3 ESPALIER_GROUPS_2, ESPALIER_GROUP(2)
#define ESPALIER_GROUPS_4 ESPALIER_GROUPS_3, ESPALIER_GROUP(3)
#define ESPALIER_GROUPS_5 ESPALIER_GROUPS_4, ESPALIER_GROUP(4)
#define ESPALIER_GROUPS_6 ESPALIER_GROUPS_5, ESPALIER_GROUP(5)
#define ESPALIER_GROUPS_7 ESPALIER_GROUPS_6, ESPALIER_GROUP(6)
#define ESPALIER_GROUPS_8 ESPALIER_GROUPS_7, ESPALIER_GROUP(7)
#define ESPALIER_GROUPS_9 ESPALIER_GROUPS_8, ESPALIER_GROUP(8)
#define ESPALIER_GROUPS_10 ESPALIER_GROUPS_9, ESPALIER_GROUP(9)
#define ESPALIER_GROUPS_11 ESPALIER_GROUPS_10, ESPALIER_GROUP(10)
#define ESPALIER_GROUPS_12 ESPALIER_GROUPS_11, ESPALIER_GROUP(11)
#define ESPALIER_GROUPS_13 ESPALIER_GROUPS_12, ESPALIER_GROUP(12)
#define ESPALIER_GROUPS_14 ESPALIER_GROUPS_13, ESPALIER_GROUP(13)
#define ESPALIER_GROUPS_15 ESPALIER_GROUPS_14, ESPALIER_GROUP(14)
#define ESPALIER_GROUPS_16 ESPALIER_GROUPS_15, ESPALIER_GROUP(15)
#define ESPALIER_GROUPS_32                                                                                \
  ESPALIER_GROUPS_16, ESPALIER_GROUP(16), ESPALIER_GROUP(17), ESPALIER_GROUP(18), ESPALIER_GROUP(19),     \
      ESPALIER_GROUP(20), ESPALIER_GROUP(21), ESPALIER_GROUP(22), ESPALIER_GROUP(23), ESPALIER_GROUP(24), \
      ESPALIER_GROUP(25), ESPALIER_GROUP(26), ESPALIER_GROUP(27), ESPALIER_GROUP(28), ESPALIER_GROUP(29), \
      ESPALIER_GROUP(30), ESPALIER_GROUP(31)
// The places of a, b and add among the operands follow the 4 * groups of d.
#define ESPALIER_MULTIPLY(groups, columns, at_a, at_b, at_add)                                        \
  template <>                                                                                         \
  __device__ __forceinline__ void MultiplyAsync<groups>(float(&d)[groups][4], uint64_t a, uint64_t b, \
                                                        bool add) {                                   \
    asm volatile(                                                                                     \
        "{\n"                                                                                         \
        ".reg .pred add;\n"                                                                           \
        "setp.ne.b32 add, %" #at_add                                                                  \
        ", 0;\n"                                                                                      \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 {" ESPALIER_REGISTERS_##groups  \
        "}, %" #at_a ", %" #at_b                                                                      \
        ", add, 1, 1, 0, 0;\n"                                                                        \
        "}\n"                                                                                         \
        : ESPALIER_GROUPS_##groups                                                                    \
        : "l"(a), "l"(b), "r"(static_cast<uint32_t>(add)));                                           \
  }
ESPALIER_MULTIPLY(2, 16, 8, 9, 10)
ESPALIER_MULTIPLY(3, 24, 12, 13, 14)
ESPALIER_MULTIPLY(4, 32, 16, 17, 18)
ESPALIER_MULTIPLY(5, 40, 20, 21, 22)
ESPALIER_MULTIPLY(6, 48, 24, 25, 26)
ESPALIER_MULTIPLY(7, 56, 28, 29, 30)
ESPALIER_MULTIPLY(8, 64, 32, 33, 34)
ESPALIER_MULTIPLY(10, 80, 40, 41, 42)
ESPALIER_MULTIPLY(12, 96, 48, 49, 50)
ESPALIER_MULTIPLY(14, 112, 56, 57, 58)
ESPALIER_MULTIPLY(16, 128, 64, 65, 66)
ESPALIER_MULTIPLY(32, 256, 128, 129, 130)

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_PTX_SM90A_CUH_
