// df11: losslessly compressed BFloat16 weights. docs/c.md says how to use this.
//
// Functions return a code, and df11_last_error has the text. No handle is bound to a thread.
// Made from capi/src by `DF11_WRITE_HEADER=1 cargo test -p df11-capi --test header`.

#ifndef DF11_H
#define DF11_H

#include <stddef.h>
#include <stdint.h>

// Major version of this interface. Programs compiled for another major version are incompatible.
#define DF11_VERSION_MAJOR 0

// Minor version of this interface. While the major version is 0, other minor versions are
// incompatible too.
#define DF11_VERSION_MINOR 1

// For `df11_open`: read files on demand instead of mapping them into memory.
#define DF11_OPEN_WITHOUT_MAP 1

// For `df11_gpu_load`: transcode the matrix to the fast layout, in memory of the library.
#define DF11_GPU_FAST 1

// For `df11_decode` and `df11_gpu_decode`, as the number of rows: all from the first one on.
#define DF11_ALL_ROWS UINT64_MAX

// Return code of a function. Later versions may add values.
typedef enum df11_status {
  // Success.
  DF11_STATUS_OK = 0,
  // The operating system refused to read.
  DF11_STATUS_IO = 1,
  // The file needs something that this version does not know.
  DF11_STATUS_UNSUPPORTED = 2,
  // The file is damaged or truncated, or is not a container.
  DF11_STATUS_CORRUPT = 3,
  // A limit of the format is exceeded.
  DF11_STATUS_LIMIT = 4,
  // The caller asked for something impossible: a null pointer, a wrong size, rows that do not
  // exist.
  DF11_STATUS_PARAMETER = 5,
  // The GPU or its driver failed or is missing.
  DF11_STATUS_GPU = 6,
  // There is no tensor with this index or name.
  DF11_STATUS_NOT_FOUND = 7,
  // A bug in the library, which stays usable.
  DF11_STATUS_INTERNAL = 8,
} df11_status;

// An open GPU. Any number of threads may use it at once.
typedef struct df11_gpu df11_gpu;

// A tensor on a GPU. Any number of threads may use it at once, on any streams.
typedef struct df11_gpu_tensor df11_gpu_tensor;

// An open model. Any number of threads may use it at once.
typedef struct df11_model df11_model;

// A tensor of a model. Pointers live until the model is closed.
typedef struct df11_tensor {
  // `sizeof (df11_tensor)`, which the caller sets: later versions add fields at the end.
  size_t size;
  // Its index among all tensors, from 0 on.
  uint64_t index;
  // Its name.
  const char *name;
  // The name of its block, usually a transformer layer.
  const char *block;
  // The type of its elements as safetensors names it, such as BF16; empty if this version does
  // not know it.
  const char *dtype;
  // How it is stored: tile, gap, float, delta, raw, alias or unknown.
  const char *encoding;
  // Its dimensions, outermost first.
  const uint64_t *shape;
  // The number of its dimensions; 0 for a scalar.
  uint64_t rank;
  // The size of its first dimension; 1 for a scalar.
  uint64_t rows;
  // Its decoded size in bytes.
  uint64_t bytes;
  // Its size in the container in bytes; 0 for an alias.
  uint64_t stored_bytes;
  // The index of the tensor that has its bytes: its own, except for an alias (tied weights).
  uint64_t target;
  // Rows of the matrix, if the tensor stays compressed on a GPU and can be multiplied by; 0 if
  // it is decoded when it is loaded.
  uint64_t matrix_rows;
  // Columns of that matrix, or 0.
  uint64_t matrix_columns;
  // Bytes of device memory that it takes after `df11_gpu_load`.
  uint64_t gpu_bytes;
} df11_tensor;

// A product `y = x Wᵀ (+ bias)`: BF16, row-major, in GPU memory. A pitch is the number of elements
// from the start of one row to the start of the next.
typedef struct df11_product {
  // `sizeof (df11_product)`: later versions add fields at the end.
  size_t size;
  // Rows with one element for each column of W.
  const void *x;
  // Pitch of x.
  uint64_t x_pitch;
  // Rows of x and y.
  uint64_t rows;
  // Room for `rows` rows with one element for each row of W.
  void *y;
  // Pitch of y.
  uint64_t y_pitch;
  // One element for each row of W, added to each row of y; NULL for no bias.
  const void *bias;
  // Memory that was filled with zeros once, and since then was used only by products, one after
  // the other; its address is a multiple of 16. NULL if `df11_gpu_workspace` says 0.
  void *workspace;
  // Its size in bytes: at least what `df11_gpu_workspace` says.
  uint64_t workspace_bytes;
  // The number of splits of W's columns, which fixes the order of sums; `df11_gpu_keeps_order`
  // says which numbers are possible. 0 chooses the fastest order.
  uint64_t splits;
} df11_product;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the loaded library: `DF11_VERSION_MAJOR * 65536 + DF11_VERSION_MINOR`. Compare it
// with the header's before anything else.
uint32_t df11_version(void);

// The text of the calling thread's last error: one line of UTF-8 with the remedy, empty if there
// was no error. Valid until the next failing call of this thread.
const char *df11_last_error(void);

// Opens a model: a container, or a folder with all its shards. Reads and validates headers and
// directories; the cost grows with the number of tensors. Do not truncate mapped files while the
// model is open: that would end the process with SIGBUS. With `DF11_OPEN_WITHOUT_MAP` it is a read
// error instead.
//
// # Safety
// `path` is a text that ends with a zero byte; `model` has room for a pointer, which is NULL
// if the call fails.
enum df11_status df11_open(const char *path, uint32_t flags, struct df11_model **model);

// Closes a model and frees its names and shapes; tensors that were loaded onto a GPU stay. NULL
// does nothing.
//
// # Safety
// The model is from `df11_open` and is used no more, by any thread.
void df11_close(struct df11_model *model);

// Describes the tensor at an index. After the last one it returns `DF11_STATUS_NOT_FOUND`, which
// ends a loop over all.
//
// # Safety
// `model` is open. `tensor` is a `df11_tensor` whose `size` is set.
enum df11_status df11_tensor_at(const struct df11_model *model,
                                uint64_t index,
                                struct df11_tensor *tensor);

// Describes the tensor with a name, in constant time.
//
// # Safety
// Like `df11_tensor_at`, by name; `name` is a text that ends with a zero byte.
enum df11_status df11_tensor_named(const struct df11_model *model,
                                   const char *name,
                                   struct df11_tensor *tensor);

// Decodes rows of a tensor of any dtype on the CPU: little-endian, as in the original file. Uses
// all cores, also in a forked process; checksums are checked when bytes are read for the first
// time. `output_bytes` is the exact size of these rows; with `DF11_ALL_ROWS` from row 0 on, it is
// `bytes` of `df11_tensor`. After an error the contents of the output are undefined.
//
// # Safety
// `model` is open; `output` has `output_bytes`, which nobody else uses meanwhile.
enum df11_status df11_decode(const struct df11_model *model,
                             uint64_t index,
                             uint64_t first_row,
                             uint64_t row_count,
                             void *output,
                             uint64_t output_bytes);

// Opens a GPU by its number and loads the kernels; 0 is the first GPU that the driver reports.
// Uses the primary context, as the CUDA runtime does. Every function leaves the thread's current
// context as it was.
//
// # Safety
// `gpu` has room for a pointer, which is NULL if the call fails.
enum df11_status df11_gpu_open(uint32_t ordinal, struct df11_gpu **gpu);

// Closes a GPU; loaded tensors keep it open until they are freed. NULL does nothing.
//
// # Safety
// It is from `df11_gpu_open` and is used no more, by any thread.
void df11_gpu_close(struct df11_gpu *gpu);

// Copies a tensor to GPU memory. A matrix with `matrix_rows` stays as stored, to be decoded or
// multiplied by there; any other tensor is decoded on the way. Checks checksums and contents. The
// copy is complete when it returns.
//
// `pointer` is a multiple of 256 with `bytes` of memory, exactly `gpu_bytes` of `df11_tensor`; or
// NULL with 0 bytes, and then the library allocates the memory. With `DF11_GPU_FAST` the library
// always allocates it, and transcodes the matrix to the fast layout (about 12.1 bits per weight,
// the fastest to multiply by); a matrix with too many exceptions stays as stored.
//
// # Safety
// `gpu` and `model` are open; nobody else uses the memory until the tensor is freed; `tensor` has
// room for a pointer, which is NULL if the call fails.
enum df11_status df11_gpu_load(const struct df11_gpu *gpu,
                               const struct df11_model *model,
                               uint64_t index,
                               uint32_t flags,
                               void *pointer,
                               uint64_t bytes,
                               struct df11_gpu_tensor **tensor);

// Frees a tensor, and its memory if the library allocated it. NULL does nothing.
//
// # Safety
// It is from `df11_gpu_load`, what uses it on the GPU is done, and it is used no more.
void df11_gpu_free(struct df11_gpu_tensor *tensor);

// Puts the decoding of rows on a stream: dense, as by `df11_decode`. Neither allocates nor waits,
// and can be captured in a graph. `output` is a multiple of 16, and `output_bytes` is the exact
// size of these rows. Only `df11_gpu_check` reports a damaged bitstream.
//
// # Safety
// `stream` is a `CUstream` or `cudaStream_t` of the GPU's primary context. `output` has
// `output_bytes` of memory of the GPU, which nobody else uses until the work is done; until then
// the tensor is not freed.
enum df11_status df11_gpu_decode(const struct df11_gpu_tensor *tensor,
                                 uint64_t first_row,
                                 uint64_t row_count,
                                 void *output,
                                 uint64_t output_bytes,
                                 void *stream);

// The size in bytes of the workspace for a product with up to this many rows of x; it may be 0.
//
// # Safety
// `tensor` is loaded; `bytes` has room for a number.
enum df11_status df11_gpu_workspace(const struct df11_gpu_tensor *tensor,
                                    uint64_t rows,
                                    uint64_t *bytes);

// Whether a product of this many rows of x can add in the order of a BLAS library that cuts the
// columns of W into `splits`. Split i has the columns from i * U to before (i + 1) * U, with U =
// ceil(ceil(columns / 64) / splits) * 64; it is one chain of tensor-core products of 16 columns,
// first to last, from an F32 zero. Splits are added in order, then the bias; the sum is rounded
// once.
//
// # Safety
// `tensor` is loaded; `keeps` has room for an answer, 1 or 0.
enum df11_status df11_gpu_keeps_order(const struct df11_gpu_tensor *tensor,
                                      uint64_t rows,
                                      uint64_t splits,
                                      uint8_t *keeps);

// Puts the product of rows of x with a matrix on a stream, without decoding it to memory. Sums are
// F32, each is rounded once, and the bits are the same in every run. They are the bits of a BLAS
// that adds in the order of `splits`; `splits` are refused unless `df11_gpu_keeps_order` gives 1.
// Neither allocates nor waits, except that the first product with a tensor prepares it
// (`df11_gpu_workspace` does so too, before a capture).
//
// # Safety
// As for `df11_gpu_decode`, for all memory that `product` names; it may not overlap.
enum df11_status df11_gpu_multiply(const struct df11_gpu_tensor *tensor,
                                   const struct df11_product *product,
                                   void *stream);

// Waits for the work on the stream, and returns `DF11_STATUS_CORRUPT` if anything that was decoded
// or multiplied by on this GPU since the last call was damaged; its outputs are then undefined.
//
// # Safety
// `gpu` is open; `stream` as of `df11_gpu_decode`.
enum df11_status df11_gpu_check(const struct df11_gpu *gpu, void *stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DF11_H */
