/* libfp4deploy: packed NVFP4 networks (.fp4) on a GPU, without Python.
 *
 *     fp4d_model *model;        fp4d_model_open("unet.fp4", &model);
 *     fp4d_network *network;    fp4d_network_open(model, "unet.kernels", 0, &network);
 *     fp4d_run *run;            fp4d_run_create(network, shapes, NULL, &run);
 *     fp4d_run_enqueue(run, FP4D_FLOAT32, inputs, FP4D_FLOAT16, outputs, stream);
 *
 * shapes has the shape of each input, inputs and outputs a pointer for each.
 *
 * Errors. Functions that can fail return a status; FP4D_OK is 0. `fp4d_last_error` has the cause of the last failure of
 * the calling thread. No exception leaves the library, no function ends the process. After a failure nothing was written
 * to an out-parameter but a null pointer. Every pointer argument must be valid; where NULL is allowed, the function says so.
 *
 * Threads. A model is constant after it was opened: any number of threads may use it. A network is constant too; its runs
 * may be created and used by several threads at once. A run is one thread's at a time, and holds the memory of one forward
 * pass: launches of one run must not overlap on the GPU (use one stream, or one run a stream). Close a network after its
 * runs, and a model after its networks.
 *
 * GPU. The driver, libcuda.so.1, is loaded by `fp4d_network_open`; models are read and checked on machines without one. The
 * library works in the primary context of the device, the one that the CUDA runtime and torch use, and leaves the calling
 * thread's current context as it was.
 */
#ifndef FP4DEPLOY_H
#define FP4DEPLOY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(FP4D_BUILDING) && defined(__GNUC__)
#define FP4D_API __attribute__((visibility("default")))
#else
#define FP4D_API
#endif

typedef enum fp4d_status {
    FP4D_OK = 0,
    FP4D_INVALID_FILE = 1,     /* a file that cannot be read, is damaged, or does not pass the checks */
    FP4D_INVALID_ARGUMENT = 2, /* a shape, type or number that the network does not take */
    FP4D_UNSUPPORTED = 3,      /* no function returns it: a bundle has the kernels of any network */
    FP4D_NO_GPU = 4,           /* no driver, no such device, or one of another architecture */
    FP4D_CUDA_ERROR = 5,       /* the driver reports an error; it can be an earlier kernel's */
    FP4D_OUT_OF_MEMORY = 6     /* of the host or of the GPU */
} fp4d_status;

/* Types of inputs and outputs. Functions take them as int32_t, so that a wrong number is refused and not undefined. */
typedef enum fp4d_type { FP4D_FLOAT32 = 0, FP4D_FLOAT16 = 1, FP4D_CLASSES = 2 } fp4d_type;

typedef struct fp4d_shape {
    int32_t rank;
    int64_t size[8]; /* sizes beyond rank are 0 */
} fp4d_shape;

typedef struct fp4d_model fp4d_model;
typedef struct fp4d_network fp4d_network;
typedef struct fp4d_run fp4d_run;
typedef struct CUstream_st *fp4d_stream; /* CUstream or cudaStream_t; NULL: the default stream */

/* Version of the library, "0.2.0". */
FP4D_API const char *fp4d_version(void);
/* "invalid file" and so on. */
FP4D_API const char *fp4d_status_name(int32_t status);
/* Why the last call of this thread failed; "" if none did. Valid until the thread's next call. */
FP4D_API const char *fp4d_last_error(void);

/* Read and check a packed network; the file is not used any more afterwards. */
FP4D_API fp4d_status fp4d_model_open(const char *path, fp4d_model **model);
/* The same from memory, which is not used any more afterwards. */
FP4D_API fp4d_status fp4d_model_open_memory(const void *content, size_t bytes, fp4d_model **model);
FP4D_API void fp4d_model_close(fp4d_model *model); /* NULL is allowed */

/* How many inputs and outputs there are. */
FP4D_API int32_t fp4d_model_inputs(const fp4d_model *model);
FP4D_API int32_t fp4d_model_outputs(const fp4d_model *model);
/* Names; the single output of most networks is called "". NULL: no such number. */
FP4D_API const char *fp4d_model_input_name(const fp4d_model *model, int32_t number);
FP4D_API const char *fp4d_model_output_name(const fp4d_model *model, int32_t number);
/* The example shape of an input, such as [1, channels, height, width], and which of its axes may have other sizes (bit 0: the batch). */
FP4D_API fp4d_status fp4d_model_input_shape(const fp4d_model *model, int32_t number, fp4d_shape *shape, uint32_t *free_axes);
/* What the model card says. Without a card: no classes, mean 0, std 1, and the size of the example. */
FP4D_API int32_t fp4d_model_classes(const fp4d_model *model);
FP4D_API const char *fp4d_model_class_name(const fp4d_model *model, int32_t number); /* NULL: no such number */
FP4D_API void fp4d_model_image_size(const fp4d_model *model, int32_t *height, int32_t *width);
FP4D_API void fp4d_model_normalisation(const fp4d_model *model, float mean[3], float std[3]); /* of RGB in [0, 1]; of volumes 0 and 1 */
/* Text by key: "card" and "graph" (JSON), "version" (that wrote the file), "sha256". NULL: no such key. */
FP4D_API const char *fp4d_model_metadata(const fp4d_model *model, const char *key);

/* Load a network with its kernel bundle on a CUDA device. */
FP4D_API fp4d_status fp4d_network_open(const fp4d_model *model, const char *kernels, int32_t device, fp4d_network **network);
FP4D_API fp4d_status fp4d_network_open_memory(
    const fp4d_model *model, const void *kernels, size_t bytes, int32_t device, fp4d_network **network);
FP4D_API void fp4d_network_close(fp4d_network *network); /* NULL is allowed */

/* How many plans the bundle has, and the shape of an input in one of them. */
FP4D_API int32_t fp4d_network_shapes(const fp4d_network *network);
FP4D_API fp4d_status fp4d_network_shape(const fp4d_network *network, int32_t number, int32_t input, fp4d_shape *shape);
/* The shape of an output. Here and below, inputs: an array with the shape of each input. */
FP4D_API fp4d_status fp4d_network_output_shape(const fp4d_network *network, const fp4d_shape *inputs, int32_t number, fp4d_shape *shape);
/* Bytes on the GPU: of weights (0: no shape needed) and of the workspace of a run with these shapes. */
FP4D_API size_t fp4d_network_weight_bytes(const fp4d_network *network);
FP4D_API fp4d_status fp4d_network_workspace_bytes(const fp4d_network *network, const fp4d_shape *inputs, size_t *bytes);

/* Prepare forward passes of one plan. workspace: device memory of at least `fp4d_network_workspace_bytes`, aligned to
 * 256 bytes, that the caller keeps until the run is closed; NULL: the run allocates it. */
FP4D_API fp4d_status fp4d_run_create(fp4d_network *network, const fp4d_shape *inputs, void *workspace, fp4d_run **run);
FP4D_API void fp4d_run_close(fp4d_run *run); /* waits for the device if it owns its workspace; NULL is allowed */

/* Put one forward pass on a stream, and return at once. Nothing is allocated and nothing synchronises, so that a stream
 * that is being captured takes it: a CUDA graph of the caller then holds the launches.
 *
 * inputs: device pointers, one for each input, contiguous: FP4D_FLOAT32 or FP4D_FLOAT16; whole numbers are int64, and
 * truth values bytes, whatever input_type says.
 * outputs: device pointers, one for each output, contiguous, of FP4D_FLOAT32 or FP4D_FLOAT16; with FP4D_CLASSES of the
 * first output only, uint8 [N, ...], the number of the largest of at most 256 channels (the first of equals). */
FP4D_API fp4d_status fp4d_run_enqueue(
    fp4d_run *run, int32_t input_type, const void *const *inputs, int32_t output_type, void *const *outputs, fp4d_stream stream);

/* The same with host memory, of a network of one image, and wait for the result: input float32; output of the first output,
 * of any type. Slower than `fp4d_run_enqueue`: it allocates and copies. */
FP4D_API fp4d_status fp4d_run_host(fp4d_run *run, const float *input, int32_t output_type, void *output);

#ifdef __cplusplus
}
#endif
#endif
