// SPDX-License-Identifier: Apache-2.0
//
// Runs the routed experts of one layer on seeded tokens, in plain C:
//   one_layer CHECKPOINT [LAYER]
#include <espalier/espalier_c.h>
#include <stdio.h>
#include <stdlib.h>

// Ends the program with the library's sentence.
static void check(int32_t status) {
  if (status == ESPALIER_OK) return;
  fprintf(stderr, "%s: %s\n", espalier_status_name(status), espalier_last_error());
  exit(status);
}

static uint64_t next_random(uint64_t* state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 33;
}

int main(int argc, char** argv) {
  if (argc < 2 || espalier_abi_version() != ESPALIER_C_ABI) return ESPALIER_USAGE;
  espalier_checkpoint* checkpoint = NULL;
  check(espalier_checkpoint_open(argv[1], &checkpoint));
  uint64_t layer = 0;
  if (argc > 2) check(espalier_checkpoint_find_layer(checkpoint, argv[2], &layer));
  espalier_layer_info shape = {.size = sizeof(shape)};
  check(espalier_checkpoint_get_layer(checkpoint, layer, &shape));
  printf("layer %s: %d experts of %d x %d\n", shape.label, (int)shape.experts, (int)shape.hidden_channels,
         (int)shape.intermediate_channels);

  // Weights, then a plan for up to 8 tokens with 2 experts each. The checkpoint is not needed any more.
  espalier_experts* experts = NULL;
  check(espalier_experts_load(checkpoint, layer, NULL, &experts));
  check(espalier_checkpoint_free(checkpoint));
  enum { kTokens = 3, kTopK = 2 };
  espalier_plan_options options = {.size = sizeof(options), .max_tokens = 8, .top_k = kTopK};
  options.mode = ESPALIER_MODE_EXACT;
  espalier_moe_plan* plan = NULL;
  check(espalier_moe_plan_create(experts, &options, &plan));
  espalier_plan_info info = {.size = sizeof(info)};
  check(espalier_moe_plan_get_info(plan, &info));
  printf("%s executor on the %s\n", info.executor, info.device.type == ESPALIER_DEVICE_CPU ? "host" : "GPU");

  // The caller owns all memory of a call. aligned_alloc wants a multiple of the alignment.
  const uint64_t hidden = info.in_channels;
  float* x = malloc(kTokens * hidden * sizeof(float));
  float* y = malloc(kTokens * hidden * sizeof(float));
  void* workspace = aligned_alloc(64, (info.workspace_bytes + 64) / 64 * 64);
  if (x == NULL || y == NULL || workspace == NULL) return ESPALIER_CAPACITY;
  uint64_t seed = 1;
  for (uint64_t i = 0; i < kTokens * hidden; ++i) x[i] = (float)next_random(&seed) / 1073741824.0f - 1.0f;
  int32_t ids[kTokens * kTopK];
  float weights[kTokens * kTopK];
  for (int i = 0; i < kTokens * kTopK; ++i) {
    ids[i] = (int32_t)(next_random(&seed) % shape.experts);
    weights[i] = 0.5f;
  }

  espalier_moe_args args = {.size = sizeof(args), .num_tokens = kTokens};
  args.x = x;
  args.x_row_stride = hidden;
  args.topk_ids = ids;
  args.topk_ids_row_stride = kTopK;
  args.topk_weights = weights;
  args.topk_weights_row_stride = kTopK;
  args.y = y;
  args.y_row_stride = hidden;
  args.workspace = workspace;
  args.workspace_bytes = info.workspace_bytes;
  check(espalier_moe_run(plan, experts, &args));

  double sum = 0;
  for (uint64_t i = 0; i < kTokens * hidden; ++i) sum += y[i];
  printf("sum of y %.4f, first values %.4f %.4f\n", sum, y[0], y[1]);

  free(workspace);
  free(y);
  free(x);
  check(espalier_moe_plan_free(plan));
  check(espalier_experts_free(experts));
  return 0;
}
