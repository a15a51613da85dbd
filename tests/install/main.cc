// SPDX-License-Identifier: Apache-2.0
#include <espalier/espalier.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// The value, or the end of the program with the library's sentence.
template <typename T>
T Value(espalier::Result<T> result) {
  if (!result) std::fprintf(stderr, "%s\n", result.error().message().c_str());
  if (!result) std::exit(espalier::ExitCode(result.error().code()));
  if constexpr (!std::is_void_v<T>) return *std::move(result);
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const espalier::Checkpoint checkpoint = Value(espalier::Checkpoint::Open(argv[1]));
  const espalier::PreparedExperts experts = Value(espalier::LoadExperts(checkpoint, 0));
  const espalier::MoePlan plan = Value(espalier::MoePlan::Create(experts, {.max_tokens = 1, .top_k = 2}));
  espalier::HostBuffer workspace = Value(espalier::HostBuffer::Create(plan.workspace_bytes()));

  const uint64_t hidden = plan.geometry().hidden_channels;
  const std::vector<float> x(hidden, 0.5f);  // one token
  const int32_t ids[] = {0, 3};              // its experts, as the router chose them
  const float weights[] = {0.75f, 0.25f};    // and their weights
  std::vector<float> y(hidden);
  Value(espalier::RunMoe(plan, experts,
                         {.num_tokens = 1,
                          .x = x.data(),
                          .x_row_stride = hidden,
                          .topk_ids = ids,
                          .topk_ids_row_stride = 2,
                          .topk_weights = weights,
                          .topk_weights_row_stride = 2,
                          .y = y.data(),
                          .y_row_stride = hidden,
                          .workspace = workspace.data(),
                          .workspace_bytes = workspace.size_bytes()}));
  std::printf("layer %s on %s: y[0] = %g\n", checkpoint.layers()[0].label.c_str(),
              std::string(plan.backend().name()).c_str(), static_cast<double>(y[0]));
}
