// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_TESTS_SUPPORT_FIXTURE_CALL_H_
#define ESPALIER_TESTS_SUPPORT_FIXTURE_CALL_H_

#include <string>
#include <vector>

#include "support/random_experts.h"
#include "support/tensor_file.h"

namespace espalier::test {

// The call that an input of tests/data/fixtures stands for, with 2 threads and checked ids.
inline MoeCall ReadFixtureCall(const std::string& path) {
  const TensorFile file(path);
  MoeCall call;
  call.num_tokens = file.Info("x").shape[0];
  call.top_k = static_cast<uint32_t>(file.Info("topk_ids").shape[1]);
  call.input = file.Info("x").dtype;
  if (call.input == Dtype::kF32) {
    for (const float value : file.Read<float>("x")) call.x.push_back(value);
  } else {
    for (const uint16_t bits : file.Read<uint16_t>("x"))
      call.x.push_back(call.input == Dtype::kF16 ? Fp16ToFloat(bits) : Bf16ToFloat(bits));
  }
  call.weights = file.Read<float>("topk_weights");
  call.num_threads = 2;
  call.checked_ids = true;
  if (file.Info("topk_ids").dtype == Dtype::kI64) {
    call.ids = file.Read<int64_t>("topk_ids");
  } else {
    call.id_type = IdType::kInt32;
    for (const int32_t id : file.Read<int32_t>("topk_ids")) call.ids.push_back(id);
  }
  return call;
}

}  // namespace espalier::test

#endif  // ESPALIER_TESTS_SUPPORT_FIXTURE_CALL_H_
