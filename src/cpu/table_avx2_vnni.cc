// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"
#include "cpu/vector_avx2.h"

namespace espalier::cpu {
namespace {

struct VectorAvx2Vnni : VectorAvx2 {
  static ESPALIER_INLINE Int ByteSums(Int words) {
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), words, _mm256_set1_epi8(1));
  }
  static ESPALIER_INLINE Int DotInt16(Int sum, Int weights, Int input) {
    return _mm256_dpwssd_avx_epi32(sum, weights, input);
  }
};

}  // namespace

void FillAvx2VnniTable(KernelTable& table) { FillAvx2<VectorAvx2Vnni>(table); }

}  // namespace espalier::cpu
