/* A test double of the CUDA driver, for tests on machines without a GPU: it records, and computes nothing by itself.
 *
 * `recording_driver_launcher` names a function that is called with every launch, and may compute. Device memory is memory of the host, so that sanitizers watch it. Each launch, copy and allocation is a line of the file
 * that RECORDING_DRIVER_LOG names; what is copied to the device is written to <log>.<number>. RECORDING_DRIVER_FAIL names a
 * function whose RECORDING_DRIVER_AT-th call (default: first) fails. RECORDING_DRIVER_ARCH is the compute capability (90). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *log_file;
static int copies, contexts, live_allocations, live_modules, live_streams, retained;

static FILE *out(void) {
    if (!log_file) {
        const char *path = getenv("RECORDING_DRIVER_LOG");
        log_file = fopen(path ? path : "/dev/null", "w");
        setvbuf(log_file, NULL, _IOLBF, 1 << 12);
    }
    return log_file;
}

static int fails(const char *name) {
    static int calls;
    const char *wanted = getenv("RECORDING_DRIVER_FAIL"), *at = getenv("RECORDING_DRIVER_AT");
    if (!wanted || strcmp(wanted, name)) return 0;
    return ++calls == (at ? atoi(at) : 1);
}

#define FAIL(name, code) if (fails(name)) return code

typedef struct { char name[64]; } function;

int cuInit(unsigned flags) { FAIL("cuInit", 100); return (int)flags; }
int cuGetErrorString(int code, const char **text) { *text = code == 2 ? "out of memory" : "a planted failure"; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const char *arch = getenv("RECORDING_DRIVER_ARCH");
    const int number = arch ? atoi(arch) : 90;
    *value = attribute == 75 ? number / 10 : number % 10;
    return device;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { FAIL("cuDevicePrimaryCtxRetain", 2); *context = &contexts; ++retained; return device; }
int cuDevicePrimaryCtxRelease_v2(int device) { --retained; fprintf(out(), "released %d %d %d %d %d %d\n", contexts, live_allocations, live_modules, live_streams, retained, copies); return device; }
int cuCtxPushCurrent_v2(void *context) { (void)context; ++contexts; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = &contexts; --contexts; return 0; }
int cuCtxSynchronize(void) { fprintf(out(), "synchronize\n"); return 0; }
int cuModuleLoadData(void **module, const void *image) {
    FAIL("cuModuleLoadData", 200);
    *module = malloc(1);
    ++live_modules;
    return memcmp(image, "\x7f" "ELF", 4) ? 200 : 0;
}
int cuModuleUnload(void *module) { free(module); --live_modules; return 0; }
static function *functions[4096];
static int known;
static void forget(void) { while (known) free(functions[--known]); if (log_file) fclose(log_file); }
int cuModuleGetFunction(void **found, void *module, const char *name) {
    FAIL("cuModuleGetFunction", 500);
    if (!known) atexit(forget);
    function *made = calloc(1, sizeof *made);
    strncpy(made->name, name, sizeof made->name - 1);
    functions[known++] = made;
    *found = made;
    return module ? 0 : 500;
}
int cuFuncSetAttribute(void *f, int attribute, int value) { FAIL("cuFuncSetAttribute", 1); fprintf(out(), "attribute %s %d %d\n", ((function *)f)->name, attribute, value); return 0; }
typedef void launcher(const char *name, const unsigned *sizes, const void *parameters, size_t bytes);
static launcher *launch;
void recording_driver_launcher(launcher *given) { launch = given; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **values, void **extra) {
    FAIL("cuLaunchKernel", 701);
    const unsigned char *buffer = extra[1];
    const size_t size = *(size_t *)extra[3];
    if (values || extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4]) return 1;
    fprintf(out(), "launch %s %u %u %u %u %u %u %u %p ", ((function *)f)->name, gx, gy, gz, bx, by, bz, shared, stream);
    for (size_t at = 0; at < size; ++at) fprintf(out(), "%02x", buffer[at]);
    fprintf(out(), "\n");
    const unsigned sizes[] = {gx, gy, gz, bx, by, bz, shared};
    if (launch) launch(((function *)f)->name, sizes, buffer, size);
    return 0;
}
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    FAIL("cuMemAlloc_v2", 2);
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    *address = (unsigned long long)memory;
    ++live_allocations;
    fprintf(out(), "allocate %llu %zu\n", *address, bytes);
    return 0;
}
int cuMemFree_v2(unsigned long long address) { free((void *)address); --live_allocations; return 0; }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes) {
    FAIL("cuMemcpyHtoD_v2", 1);
    char path[4096];
    const char *log = getenv("RECORDING_DRIVER_LOG");
    memcpy((void *)to, from, bytes);
    fprintf(out(), "copy %llu %zu\n", to, bytes);
    if (log) {
        snprintf(path, sizeof path, "%s.%d", log, copies);
        FILE *file = fopen(path, "wb");
        if (file) { fwrite(from, 1, bytes, file); fclose(file); }
    }
    ++copies;
    return 0;
}
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes) { FAIL("cuMemcpyDtoH_v2", 1); memset((void *)from, 1, bytes); memcpy(to, (void *)from, bytes); return 0; }
int cuStreamCreate(void **stream, unsigned flags) { FAIL("cuStreamCreate", 1); *stream = malloc(1); ++live_streams; return flags == 1 ? 0 : 1; }
int cuStreamDestroy_v2(void *stream) { free(stream); --live_streams; return 0; }
int cuStreamSynchronize(void *stream) { FAIL("cuStreamSynchronize", 700); (void)stream; return 0; }
