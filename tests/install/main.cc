// SPDX-License-Identifier: Apache-2.0
#include <espalier/espalier.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

// The value, or the end of the program with the library's sentence.
template <typename T>
T Value(espalier::Result<T> result) {
  if (result) return *std::move(result);
  std::fprintf(stderr, "%s\n", result.error().message().c_str());
  std::exit(espalier::ExitCode(result.error().code()));
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
  espalier::MoeArgs args;
  args.num_tokens = 1;
  args.x = x.data();
  args.x_row_stride = hidden;
  args.topk_ids = ids;
  args.topk_ids_row_stride = 2;
  args.topk_weights = weights;
  args.topk_weights_row_stride = 2;
  args.y = y.data();
  args.y_row_stride = hidden;
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size_bytes();
  const espalier::Result<void> ran = espalier::RunMoe(plan, experts, args);
  if (!ran) return espalier::ExitCode(ran.error().code());
  std::printf("layer %s on %s: y[0] = %g\n", checkpoint.layers()[0].label.c_str(),
              plan.backend().name().data(), static_cast<double>(y[0]));
}
