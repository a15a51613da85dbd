// SPDX-License-Identifier: Apache-2.0
//
// One thin function per PTX instruction. The only device code that asks for the architecture.
#ifndef ESPALIER_SRC_CUDA_PTX_CUH_
#define ESPALIER_SRC_CUDA_PTX_CUH_

#include <cstdint>

namespace espalier::cuda {

// d += a * b; a: 16 x 16 fp16 row-major, b: 16 x 8 fp16 column-major, fp32 sums.
__device__ __forceinline__ void Mma16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The low or high 16 bits of v. On the multiply pipe (IDP.2A), which has room where shifts and masks have
// none.
__device__ __forceinline__ uint32_t LowHalfByDot(uint32_t v) {
  uint32_t r;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(v), "r"(1u), "r"(0u));
  return r;
}
__device__ __forceinline__ uint32_t HighHalfByDot(uint32_t v) {
  uint32_t r;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(v), "r"(0x100u), "r"(0u));
  return r;
}

// (v & mask) ^ flips in one LOP3. `flips` must be a register: an instruction takes one immediate, and the
// compiler, seeing two constants, makes two instructions of it.
__device__ __forceinline__ uint32_t MaskAndFlip(uint32_t v, uint32_t mask, uint32_t flips) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(r) : "r"(v), "r"(mask), "r"(flips));
  return r;
}
// A constant that the compiler cannot see through.
__device__ __forceinline__ uint32_t OpaqueConstant(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// c + the sum of the four bytes of v.
__device__ __forceinline__ uint32_t AddBytes(uint32_t v, uint32_t c) {
  uint32_t r;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(v), "r"(0x01010101u), "r"(c));
  return r;
}

// Weights: read once, so they do not push activations out of the first-level cache. Volatile: they
// stay where they are written, ahead of the products of the step before.
__device__ __forceinline__ uint4 LoadStream128(const uint32_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 LoadStream64(const uint32_t* p) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t LoadStream32(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// The wall clock of the device; how fine it is depends on the driver (32 ns to 1 us).
__device__ __forceinline__ uint64_t GlobalNanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ __forceinline__ void PrefetchToL2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Activations: read by every warp of a block and by other blocks of the same rows. In global or shared
// memory.
__device__ __forceinline__ uint4 LoadInputs(const uint4* p) {
  uint4 v;
  asm volatile("ld.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Eight bytes from global to shared memory, on their own; CopiesDone waits for those of this thread.
__device__ __forceinline__ void CopyAsync8(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}
__device__ __forceinline__ void CopiesDone() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Programmatic dependent launch: wait for the kernels before this one and see what they wrote; let the next
// one start its prologue. Nothing below sm_90, where launches follow each other anyway.
__device__ __forceinline__ void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void AllowNextKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_PTX_CUH_
