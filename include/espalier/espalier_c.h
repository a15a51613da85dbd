// SPDX-License-Identifier: Apache-2.0
//
// The C interface: opaque handles, status codes, caller-owned memory. Complete example: docs/c.md.
//
// Status. Every function that can fail returns ESPALIER_OK or another espalier_status; espalier_last_error()
// then gives the sentence, which names what was found and what would have been legal. Outputs are written on
// success only. Nothing throws or prints. NULL for a handle, for a required argument or for an output is
// ESPALIER_USAGE.
//
// Handles are not addresses: one that was freed, or is of another kind, is refused with ESPALIER_USAGE for as
// long as the process lives. Objects do not need what they were made from: a checkpoint may be freed once its
// layers are prepared. All functions may be called from any thread at once, also on one handle; one that is
// freed while another thread uses it lives until that call returns. Strings and arrays that info structs
// point to belong to the handle and are gone when it is freed.
//
// Structs begin with their size, so that they can grow: set all of it to zero, then `size` to sizeof the
// struct. Zero in a field means its default. Fields that a newer header has and this library does not know
// are refused unless they are zero (ESPALIER_UNSUPPORTED); of an output, what the library does not know is
// left alone. Numbers of enums are never reused.
//
// Lists and texts. Where a function takes an array and a count, the count says how many the array holds and
// is set to how many there are; with NULL for the array only that happens. An array that is too short is
// ESPALIER_USAGE, and nothing is written but the count. The size of a text counts its final zero.
#ifndef ESPALIER_ESPALIER_C_H_
#define ESPALIER_ESPALIER_C_H_

#include <stdint.h>

#ifndef ESPALIER_C_API
#define ESPALIER_C_API __attribute__((visibility("default")))
#endif

// Changes when a program that was compiled before could go wrong; the number behind libespalier_c.so.
#define ESPALIER_C_ABI 1

#ifdef __cplusplus
extern "C" {
#endif

// ---- Numbers -------------------------------------------------------------------------------------------

enum espalier_status {
  ESPALIER_OK = 0,
  ESPALIER_INTERNAL = 1,     // a fault of the library itself
  ESPALIER_USAGE = 2,        // the caller asked for something that has no meaning
  ESPALIER_IO = 3,           // a path is missing, or could not be read
  ESPALIER_FORMAT = 4,       // the bytes break a rule of their format
  ESPALIER_UNSUPPORTED = 5,  // well-formed, but a feature that this build lacks
  ESPALIER_GEOMETRY = 6,     // sizes that do not fit each other
  ESPALIER_CAPACITY = 7,     // more than a plan, a buffer or the memory holds
  ESPALIER_DEVICE = 8,       // a device is absent or failed
  ESPALIER_CANCELLED = 9     // the caller stopped it
};

// Names: espalier_list_names.
enum espalier_codebook { ESPALIER_CODEBOOK_3INST = 0, ESPALIER_CODEBOOK_MCG = 1, ESPALIER_CODEBOOK_MUL1 = 2 };

// Element types. Arrays of a call are F16, BF16 or F32, outputs of the reference executor F64 too.
enum espalier_dtype {
  ESPALIER_DTYPE_BOOL = 0,
  ESPALIER_DTYPE_U8 = 1,
  ESPALIER_DTYPE_I8 = 2,
  ESPALIER_DTYPE_I16 = 3,
  ESPALIER_DTYPE_U16 = 4,
  ESPALIER_DTYPE_F16 = 5,
  ESPALIER_DTYPE_BF16 = 6,
  ESPALIER_DTYPE_I32 = 7,
  ESPALIER_DTYPE_U32 = 8,
  ESPALIER_DTYPE_F32 = 9,
  ESPALIER_DTYPE_F64 = 10,
  ESPALIER_DTYPE_I64 = 11,
  ESPALIER_DTYPE_U64 = 12,
  ESPALIER_DTYPE_F8_E4M3 = 13,
  ESPALIER_DTYPE_F8_E5M2 = 14,
  ESPALIER_DTYPE_F8_E8M0 = 15,
  ESPALIER_DTYPE_F4 = 16,
  ESPALIER_DTYPE_F6_E2M3 = 17,
  ESPALIER_DTYPE_F6_E3M2 = 18,
  ESPALIER_DTYPE_C64 = 19,
  ESPALIER_DTYPE_F8_E4M3FNUZ = 20,
  ESPALIER_DTYPE_F8_E5M2FNUZ = 21
};

enum espalier_projection {
  ESPALIER_PROJECTION_GATE = 0,
  ESPALIER_PROJECTION_UP = 1,
  ESPALIER_PROJECTION_DOWN = 2
};

enum espalier_device_type { ESPALIER_DEVICE_CPU = 0, ESPALIER_DEVICE_CUDA = 1 };

enum espalier_id_type { ESPALIER_ID_INT32 = 0, ESPALIER_ID_INT64 = 1 };

// What the cpu executor multiplies with; others take the default only.
enum espalier_mode {
  ESPALIER_MODE_DEFAULT = 0,  // fast
  ESPALIER_MODE_EXACT = 1,    // fp32 throughout
  ESPALIER_MODE_FAST = 2,     // 16-bit operands
  ESPALIER_MODE_INT8 = 3      // 8-bit operands where a codebook has them
};

// Order of the codes in a package.
enum espalier_order {
  ESPALIER_ORDER_DEFAULT = 0,  // the one that the device's executor reads
  ESPALIER_ORDER_NATIVE = 1,   // as in files
  ESPALIER_ORDER_PANELS = 2    // host only
};

enum espalier_severity { ESPALIER_SEVERITY_WARNING = 0, ESPALIER_SEVERITY_ERROR = 1 };

enum espalier_names {
  ESPALIER_NAMES_BACKENDS = 0,  // executors of this build, best first
  ESPALIER_NAMES_CODEBOOKS = 1,
  ESPALIER_NAMES_DTYPES = 2,
  ESPALIER_NAMES_ACTIVATIONS = 3,
  ESPALIER_NAMES_CPU_KERNELS = 4  // that this machine can run, best first
};

// ---- Library -------------------------------------------------------------------------------------------

// "0.1.0". Never NULL, never freed.
ESPALIER_C_API const char* espalier_version(void);
// ESPALIER_C_ABI of the library: compare it with the header's.
ESPALIER_C_API int32_t espalier_abi_version(void);
// What the last call of this thread that failed said; "" before the first. Valid until the next failure.
ESPALIER_C_API const char* espalier_last_error(void);
// "ok", "usage", ...; "unknown" for other numbers. Never NULL, never freed.
ESPALIER_C_API const char* espalier_status_name(int32_t status);

typedef struct espalier_capabilities {
  uint64_t size;
  int32_t abi_version;
  int32_t min_bits;  // of a weight
  int32_t max_bits;
  int32_t has_cuda;              // whether the cuda executor is in this build
  int32_t cuda_runtime_version;  // 13020 for 13.2; 0 without
  int32_t num_gpus;              // usable ones of this machine
  uint64_t max_plan_tokens;
  uint64_t max_top_k;
  uint64_t workspace_alignment_bytes;
} espalier_capabilities;
ESPALIER_C_API int32_t espalier_get_capabilities(espalier_capabilities* capabilities);

// Names of the numbers of an enum, in their order; of an espalier_names. They are never freed.
ESPALIER_C_API int32_t espalier_list_names(int32_t which, const char** names, uint64_t* count);

typedef struct espalier_device {
  int32_t type;   // espalier_device_type
  int32_t index;  // of the GPU; 0 for the host
} espalier_device;

typedef struct espalier_gpu_info {
  uint64_t size;
  espalier_device device;
  const char* name;            // valid until this thread asks for another GPU
  int32_t compute_capability;  // 90 for 9.0
  int32_t num_sms;
  uint64_t memory_bytes;
  int32_t driver_version;  // 13020 for 13.2
  int32_t reserved;        // 0
} espalier_gpu_info;
// ESPALIER_DEVICE, with the reason, where there is none.
ESPALIER_C_API int32_t espalier_get_gpu(uint64_t index, espalier_gpu_info* info);

// Threads for plans on the host: any number of plans share a pool (espalier_plan_options.pool).
typedef struct espalier_thread_pool espalier_thread_pool;

// `num_threads` work on one run together, and its caller is one of them; 0 = as many as the calling thread
// may use cores. The others inherit its affinity. USAGE, CAPACITY.
ESPALIER_C_API int32_t espalier_thread_pool_create(int32_t num_threads, espalier_thread_pool** pool);
// The caller of a run included.
ESPALIER_C_API int32_t espalier_thread_pool_get_size(const espalier_thread_pool* pool, int32_t* num_threads);
// Plans that use the pool keep its threads.
ESPALIER_C_API int32_t espalier_thread_pool_free(espalier_thread_pool* pool);

// ---- Checkpoints ---------------------------------------------------------------------------------------

typedef struct espalier_checkpoint espalier_checkpoint;

// `path`: a directory or one .safetensors file. Reads headers only. IO, FORMAT, UNSUPPORTED.
ESPALIER_C_API int32_t espalier_checkpoint_open(const char* path, espalier_checkpoint** checkpoint);
// NULL is fine, as for every function that frees.
ESPALIER_C_API int32_t espalier_checkpoint_free(espalier_checkpoint* checkpoint);

typedef struct espalier_checkpoint_info {
  uint64_t size;
  const char* path;
  const char* layout;        // "stock", "rank-sliced", "r7", "exl3-v1"
  const char* architecture;  // "" where the config has none
  const char* activation;    // "silu", "situ:4,25", ...; "" where the config names none: SiLU is assumed
  uint64_t num_layers;
  uint64_t num_linears;
  uint64_t num_tensors;
  uint64_t num_problems;
  // What the config says; 0 = nothing.
  uint64_t experts;
  uint64_t hidden_channels;
  uint64_t intermediate_channels;
  uint64_t top_k;
  uint64_t attention_heads;
  uint64_t kv_heads;
  uint64_t head_dim;
  uint64_t dense_intermediate_channels;
  uint64_t shared_intermediate_channels;
} espalier_checkpoint_info;
ESPALIER_C_API int32_t espalier_checkpoint_get_info(const espalier_checkpoint* checkpoint,
                                                    espalier_checkpoint_info* info);
// Tensor-parallel sizes up to 24 at which every rank of every layer owns something.
ESPALIER_C_API int32_t espalier_checkpoint_legal_tp(const espalier_checkpoint* checkpoint, int32_t* sizes,
                                                    uint64_t* count);
// FORMAT with the first error that stops the layer of this label; "" = any.
ESPALIER_C_API int32_t espalier_checkpoint_check(const espalier_checkpoint* checkpoint, const char* label);

typedef struct espalier_problem {
  uint64_t size;
  int32_t severity;  // espalier_severity
  int32_t reserved;  // 0
  const char* file;  // this and the others may be ""
  const char* tensor;
  const char* message;
  const char* layer;  // label, "" = the whole checkpoint
} espalier_problem;
ESPALIER_C_API int32_t espalier_checkpoint_get_problem(const espalier_checkpoint* checkpoint, uint64_t index,
                                                       espalier_problem* problem);

// The routed experts of one layer.
typedef struct espalier_layer_info {
  uint64_t size;
  const char* label;
  const char* prefix;  // "model.layers"
  int64_t number;
  uint64_t experts;
  uint64_t slices;           // independently quantized slices of every expert
  uint64_t hidden_channels;  // as stored
  uint64_t intermediate_channels;
  uint64_t valid_hidden_channels;  // as the model sees them
  uint64_t valid_intermediate_channels;
  int32_t has_gate;
  int32_t reserved;  // 0
} espalier_layer_info;
// `layer` is a position from 0 here and below, not the number in names: espalier_checkpoint_find_layer.
ESPALIER_C_API int32_t espalier_checkpoint_get_layer(const espalier_checkpoint* checkpoint, uint64_t layer,
                                                     espalier_layer_info* info);
ESPALIER_C_API int32_t espalier_checkpoint_find_layer(const espalier_checkpoint* checkpoint,
                                                      const char* label, uint64_t* layer);

// One stored EXL3 matrix W [in][out], y = x W.
typedef struct espalier_matrix_info {
  uint64_t size;
  const char* name;  // of a dense matrix; NULL for one of an expert: espalier_checkpoint_matrix_name
  uint64_t in_channels;
  uint64_t out_channels;
  int32_t bits;
  int32_t codebook;  // espalier_codebook
  int32_t has_bias;
  int32_t reserved;  // 0
  uint64_t code_bytes;
} espalier_matrix_info;
// A dense one: attention projections, dense MLPs, shared experts, the head; ordered by name.
ESPALIER_C_API int32_t espalier_checkpoint_get_linear(const espalier_checkpoint* checkpoint, uint64_t index,
                                                      espalier_matrix_info* info);
// One of an expert; `projection` as in espalier_projection.
ESPALIER_C_API int32_t espalier_checkpoint_get_matrix(const espalier_checkpoint* checkpoint, uint64_t layer,
                                                      uint64_t expert, int32_t projection, uint64_t slice,
                                                      espalier_matrix_info* info);
ESPALIER_C_API int32_t espalier_checkpoint_matrix_name(const espalier_checkpoint* checkpoint, uint64_t layer,
                                                       uint64_t expert, int32_t projection, uint64_t slice,
                                                       char* name, uint64_t* name_bytes);

typedef struct espalier_tensor_info {
  uint64_t size;
  const char* name;
  const uint64_t* shape;  // num_dimensions numbers
  uint64_t num_dimensions;
  uint64_t size_bytes;
  int32_t dtype;     // espalier_dtype
  int32_t reserved;  // 0
} espalier_tensor_info;
ESPALIER_C_API int32_t espalier_checkpoint_get_tensor(const espalier_checkpoint* checkpoint, uint64_t index,
                                                      espalier_tensor_info* info);
ESPALIER_C_API int32_t espalier_checkpoint_find_tensor(const espalier_checkpoint* checkpoint,
                                                       const char* name, uint64_t* index);
// Its bytes; target_bytes must be its size_bytes.
ESPALIER_C_API int32_t espalier_checkpoint_read_tensor(const espalier_checkpoint* checkpoint, uint64_t index,
                                                       void* target, uint64_t target_bytes);

// ---- Who owns what -------------------------------------------------------------------------------------

typedef struct espalier_extents espalier_extents;

typedef struct espalier_extents_options {
  uint64_t size;
  int32_t tp;     // 0 = 1
  int32_t ep;     // 0 = 1
  int32_t equal;  // refuse unless every rank owns the same number of channels
  int32_t reserved;
} espalier_extents_options;
// GEOMETRY, with the legal sizes. Global rank = ep_rank * tp + tp_rank. NULL options: one rank.
ESPALIER_C_API int32_t espalier_extents_create(const espalier_checkpoint* checkpoint,
                                               const espalier_extents_options* options,
                                               espalier_extents** extents);
ESPALIER_C_API int32_t espalier_extents_free(espalier_extents* extents);

typedef struct espalier_extents_info {
  uint64_t size;
  int32_t tp;
  int32_t ep;
  uint64_t num_layers;
} espalier_extents_info;
ESPALIER_C_API int32_t espalier_extents_get_info(const espalier_extents* extents,
                                                 espalier_extents_info* info);
// Codes and vectors that a global rank reads over all layers.
ESPALIER_C_API int32_t espalier_extents_weight_bytes(const espalier_extents* extents, int32_t rank,
                                                     uint64_t* bytes);

// What a tp rank owns of every expert of one layer.
typedef struct espalier_rank_extent {
  uint64_t size;
  uint64_t first_channel;  // intermediate ones; 0 where it owns nothing
  uint64_t channels;
  uint64_t weight_bytes;
} espalier_rank_extent;
ESPALIER_C_API int32_t espalier_extents_get_rank(const espalier_extents* extents, uint64_t layer,
                                                 int32_t tp_rank, espalier_rank_extent* extent);
typedef struct espalier_slice_extent {
  uint64_t slice;
  uint64_t first_channel;  // inside the slice
  uint64_t channels;
} espalier_slice_extent;
ESPALIER_C_API int32_t espalier_extents_segments(const espalier_extents* extents, uint64_t layer,
                                                 int32_t tp_rank, espalier_slice_extent* segments,
                                                 uint64_t* count);
ESPALIER_C_API int32_t espalier_extents_experts(const espalier_extents* extents, uint64_t layer,
                                                int32_t ep_rank, uint64_t* first_expert, uint64_t* experts);
// Global to local ids, -1 = elsewhere: what espalier_moe_args.expert_map takes.
ESPALIER_C_API int32_t espalier_extents_expert_map(const espalier_extents* extents, uint64_t layer,
                                                   int32_t ep_rank, int32_t* map, uint64_t* count);

// ---- Prepared weights ----------------------------------------------------------------------------------

typedef struct espalier_experts espalier_experts;
typedef struct espalier_linear espalier_linear;

// Called from one thread at a time. Must return to its caller.
typedef void (*espalier_progress)(void* context, uint64_t bytes_done, uint64_t bytes_total);
// Asked after each call of that function, or where it would have been. Other than 0 stops the load.
typedef int32_t (*espalier_stop)(void* context);

typedef struct espalier_load_options {
  uint64_t size;
  const char* activation;  // "silu[:L]", "situ:BETA,LINEAR_BETA", ...; NULL = what the config says
  double output_scale;     // y is multiplied by it; 0 = 1
  uint32_t in_channels;    // widths of a linear, or of its part, as the model sees them; 0 = as stored
  uint32_t out_channels;
  espalier_device device;  // where the weights shall lie
  int32_t order;           // espalier_order
  int32_t hash;            // compute content_sha256 while reading
  int32_t num_threads;     // 0 = all cores
  int32_t reserved;
  uint64_t staging_bytes;  // host memory beside the package; 0 = 64 MiB
  espalier_progress progress;
  void* progress_context;
  int32_t io;          // type of x that the model has: espalier_dtype, 0 = any, or what the source says
  int32_t reserved_2;  // 0
  espalier_stop stop;  // gets progress_context; CANCELLED then
} espalier_load_options;

// Reads the experts of a layer, each byte once, into one slab. NULL options: all defaults. USAGE, IO, FORMAT,
// UNSUPPORTED, GEOMETRY, CAPACITY, DEVICE, CANCELLED; the call may be repeated.
ESPALIER_C_API int32_t espalier_experts_load(const espalier_checkpoint* checkpoint, uint64_t layer,
                                             const espalier_load_options* options,
                                             espalier_experts** experts);
// The same for what `extents` gives to a global rank; nothing else is read.
ESPALIER_C_API int32_t espalier_experts_load_rank(const espalier_checkpoint* checkpoint,
                                                  const espalier_extents* extents, uint64_t layer,
                                                  int32_t rank, const espalier_load_options* options,
                                                  espalier_experts** experts);

typedef struct espalier_load_sizes {
  uint64_t size;
  uint64_t slab_bytes;  // on the device
  uint64_t code_bytes;  // of it
  uint64_t descriptor_bytes;
  uint64_t read_bytes;     // of the files
  uint64_t staging_bytes;  // beside the slab, on this machine
} espalier_load_sizes;
// What espalier_experts_load_rank takes, before anything is read.
ESPALIER_C_API int32_t espalier_experts_load_sizes(const espalier_checkpoint* checkpoint,
                                                   const espalier_extents* extents, uint64_t layer,
                                                   int32_t rank, const espalier_load_options* options,
                                                   espalier_load_sizes* sizes);

// Weights in host memory, for frameworks with loaders of their own. bits = 0: no such matrix.
typedef struct espalier_matrix {
  uint32_t in_channels;  // multiples of 128
  uint32_t out_channels;
  int32_t bits;
  int32_t codebook;  // espalier_codebook
  uint64_t suh_key;  // equal keys other than 0: equal vectors, which are stored once
  uint64_t svh_key;
  const void* codes;     // u16 [in/16][out/16][16*bits]
  const uint16_t* suh;   // fp16 [in]
  const uint16_t* svh;   // fp16 [out]
  const uint16_t* bias;  // fp16 [out], or NULL
} espalier_matrix;
typedef struct espalier_segment {
  uint32_t expert;                       // local id, ascending over the segments
  uint32_t valid_intermediate_channels;  // 0 = all
  espalier_matrix matrices[3];           // by espalier_projection
} espalier_segment;
typedef struct espalier_experts_source {
  uint64_t size;
  const char* identity;  // for messages
  uint32_t experts;
  uint32_t hidden_channels;
  uint32_t stored_hidden_channels;  // 0 = hidden_channels
  int32_t io;                       // type of x that the model has, 0 = any
  int32_t rotation;                 // least exact type for rotated values: F16 (0) or F32
  int32_t tp;                       // whose share it is; 0 = 1
  int32_t ep;                       // 0 = 1
  int32_t rank;
  const espalier_segment* segments;
  uint64_t num_segments;
} espalier_experts_source;
// One allocation, one copy; the source may be freed afterwards. Activation and scale are those of the
// options.
ESPALIER_C_API int32_t espalier_experts_prepare(const espalier_experts_source* source,
                                                const espalier_load_options* options,
                                                espalier_experts** experts);
// Sizes of that, before; weights are not looked at, but for whether a bias is there. read_bytes and
// staging_bytes are 0.
ESPALIER_C_API int32_t espalier_experts_prepare_sizes(const espalier_experts_source* source,
                                                      const espalier_load_options* options,
                                                      espalier_load_sizes* sizes);

typedef struct espalier_experts_info {
  uint64_t size;
  const char* identity;
  const char* content_sha256;  // "" unless it was asked for
  const char* activation;
  uint64_t experts;  // local ones
  uint64_t hidden_channels;
  uint64_t stored_hidden_channels;
  uint64_t max_intermediate_channels;  // of a segment
  uint64_t num_segments;
  uint64_t slab_bytes;
  uint64_t code_bytes;
  double output_scale;
  espalier_device device;
  int32_t tp;
  int32_t ep;
  int32_t rank;
  int32_t reserved;       // 0
  uint64_t first_expert;  // global id of local expert 0
} espalier_experts_info;
ESPALIER_C_API int32_t espalier_experts_get_info(const espalier_experts* experts,
                                                 espalier_experts_info* info);
// A copy on another device, or on the same.
ESPALIER_C_API int32_t espalier_experts_to_device(const espalier_experts* experts, espalier_device device,
                                                  espalier_experts** copy);
ESPALIER_C_API int32_t espalier_experts_free(espalier_experts* experts);

// A part of a dense matrix: a tensor-parallel rank's share. Multiples of 128; 0 channels = to the end. Parts
// of the output axis stand side by side, parts of the input axis add up; the bias goes with first_in = 0.
typedef struct espalier_linear_extent {
  uint64_t size;
  uint64_t first_in;
  uint64_t in_channels;
  uint64_t first_out;
  uint64_t out_channels;
} espalier_linear_extent;
// By the name of espalier_checkpoint_get_linear, or of one matrix of an expert. NULL extent: all of it.
ESPALIER_C_API int32_t espalier_linear_load(const espalier_checkpoint* checkpoint, const char* name,
                                            const espalier_linear_extent* extent,
                                            const espalier_load_options* options, espalier_linear** linear);

typedef struct espalier_linear_info {
  uint64_t size;
  const char* identity;
  uint64_t in_channels;  // as the model sees them
  uint64_t out_channels;
  uint64_t stored_in_channels;
  uint64_t stored_out_channels;
  uint64_t slab_bytes;
  int32_t bits;
  int32_t codebook;
  int32_t has_bias;
  int32_t reserved;  // 0
  espalier_device device;
} espalier_linear_info;
ESPALIER_C_API int32_t espalier_linear_get_info(const espalier_linear* linear, espalier_linear_info* info);
ESPALIER_C_API int32_t espalier_linear_to_device(const espalier_linear* linear, espalier_device device,
                                                 espalier_linear** copy);
// W [in][out] of the stored size as fp32; `inner` leaves rotations and vectors off. Host only.
ESPALIER_C_API int32_t espalier_linear_decode(const espalier_linear* linear, int32_t inner, float* weights,
                                              uint64_t* count);
ESPALIER_C_API int32_t espalier_linear_free(espalier_linear* linear);

// ---- Running -------------------------------------------------------------------------------------------

typedef struct espalier_moe_plan espalier_moe_plan;
typedef struct espalier_linear_plan espalier_linear_plan;

// Plans run on the device of the package they are made from.
typedef struct espalier_plan_options {
  uint64_t size;
  uint64_t max_tokens;  // capacity; 0 = 4096
  uint32_t top_k;       // experts of a token; moe plans only, required
  int32_t id_type;      // espalier_id_type
  int32_t input;        // espalier_dtype of x: F16, BF16, F32; 0 = F32
  int32_t output;       // of y: F16, BF16, F32, with the reference F64; 0 = F32
  int32_t checked_ids;  // an id out of range fails with GEOMETRY before anything is written; host only
  int32_t mode;         // espalier_mode
  int32_t num_threads;  // 0 = all cores
  int32_t reserved;
  const char* executor;  // NULL = the best one of the device
  // Host only; NULL = the one that all plans without share. num_threads = 0 then means all of it.
  const espalier_thread_pool* pool;
} espalier_plan_options;

typedef struct espalier_plan_info {
  uint64_t size;
  uint64_t workspace_bytes;  // exact; aligned as espalier_capabilities says
  uint64_t max_tokens;
  uint64_t top_k;         // 0 for a linear
  uint64_t in_channels;   // of x
  uint64_t out_channels;  // of y
  const char* executor;
  espalier_device device;
  int32_t input;
  int32_t output;
} espalier_plan_info;

ESPALIER_C_API int32_t espalier_moe_plan_create(const espalier_experts* experts,
                                                const espalier_plan_options* options,
                                                espalier_moe_plan** plan);
ESPALIER_C_API int32_t espalier_moe_plan_get_info(const espalier_moe_plan* plan, espalier_plan_info* info);
ESPALIER_C_API int32_t espalier_moe_plan_free(espalier_moe_plan* plan);

// Arrays are memory of the plan's device and the caller's; strides are in elements from row to row. On a GPU
// they stay until the stream has come past the call. A workspace serves one call at a time.
typedef struct espalier_moe_args {
  uint64_t size;
  uint64_t num_tokens;
  const void* x;  // [num_tokens, hidden] of the plan's input type
  uint64_t x_row_stride;
  const void* topk_ids;  // [num_tokens, top_k]; -1 = no expert
  uint64_t topk_ids_row_stride;
  const float* topk_weights;  // [num_tokens, top_k]
  uint64_t topk_weights_row_stride;
  const int32_t* expert_map;  // global to local ids; NULL = ids are local
  uint64_t expert_map_size;
  void* y;  // [num_tokens, hidden] of the plan's output type
  uint64_t y_row_stride;
  void* workspace;
  uint64_t workspace_bytes;
  void* stream;        // cudaStream_t, NULL = the default stream; NULL on the host
  int32_t accumulate;  // y += instead of y =
  int32_t reserved;
} espalier_moe_args;
// y[t] = sum over j of topk_weights[t, j] * Expert_{topk_ids[t, j]}(x[t]). Never allocates device memory,
// never waits for the GPU. CAPACITY, GEOMETRY, USAGE, DEVICE.
ESPALIER_C_API int32_t espalier_moe_run(const espalier_moe_plan* plan, const espalier_experts* experts,
                                        const espalier_moe_args* args);

ESPALIER_C_API int32_t espalier_linear_plan_create(const espalier_linear* linear,
                                                   const espalier_plan_options* options,
                                                   espalier_linear_plan** plan);
ESPALIER_C_API int32_t espalier_linear_plan_get_info(const espalier_linear_plan* plan,
                                                     espalier_plan_info* info);
ESPALIER_C_API int32_t espalier_linear_plan_free(espalier_linear_plan* plan);

typedef struct espalier_linear_args {
  uint64_t size;
  uint64_t num_tokens;
  const void* x;  // [num_tokens, in]
  uint64_t x_row_stride;
  void* y;  // [num_tokens, out]
  uint64_t y_row_stride;
  void* workspace;
  uint64_t workspace_bytes;
  void* stream;  // as in espalier_moe_args
  int32_t accumulate;
  int32_t reserved;
} espalier_linear_args;
// y = x W (+ bias).
ESPALIER_C_API int32_t espalier_linear_run(const espalier_linear_plan* plan, const espalier_linear* linear,
                                           const espalier_linear_args* args);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // ESPALIER_ESPALIER_C_H_
