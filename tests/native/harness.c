/* What tests run under sanitizers and valgrind.
 *
 *     harness check < LIST           one file a line; prints the status of each, a tab and the cause
 *     harness bundle MODEL < LIST    the same for kernel bundles of a model
 *     harness run MODEL KERNELS      every function of the interface, on the driver that is found */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp4deploy.h"

static char line[4096];

static int check(const char *model_path) {
    fp4d_model *whole = NULL;
    if (model_path && fp4d_model_open(model_path, &whole)) return 1;
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        fp4d_model *model = NULL;
        fp4d_network *network = NULL;
        const fp4d_status status = whole ? fp4d_network_open(whole, line, 0, &network) : fp4d_model_open(line, &model);
        printf("%d\t%s\n", status, fp4d_last_error());
        if ((status != FP4D_OK) != (model == NULL && network == NULL)) return 1;
        fp4d_network_close(network);
        fp4d_model_close(model);
    }
    fp4d_model_close(whole);
    return 0;
}

static size_t elements(const fp4d_shape *shape) {
    size_t count = 1;
    for (int axis = 0; axis < shape->rank; ++axis) count *= (size_t)shape->size[axis];
    return count;
}

static int run(const char *model_path, const char *kernels) {
    fp4d_model *model;
    fp4d_network *network;
    fp4d_run *one;
    fp4d_shape shape, out, wrong = {4, {1, 3, 7, 7}};
    uint32_t axes;
    size_t bytes;
    int32_t height, width;
    float mean[3], std[3];
    if (fp4d_model_open(model_path, &model)) return 1;
    printf("%s %s %d %d '%s' '%s'\n", fp4d_version(), fp4d_status_name(FP4D_NO_GPU), fp4d_model_inputs(model),
           fp4d_model_outputs(model), fp4d_model_input_name(model, 0), fp4d_model_output_name(model, 0));
    if (fp4d_model_input_name(model, 1) || fp4d_model_output_name(model, -1) || fp4d_model_class_name(model, 999)) return 2;
    fp4d_model_image_size(model, &height, &width);
    fp4d_model_normalisation(model, mean, std);
    printf("%d classes, last %s, %d x %d, mean %g, std %g\n", fp4d_model_classes(model),
           fp4d_model_class_name(model, fp4d_model_classes(model) - 1), height, width, mean[0], std[2]);
    printf("%s %zu %zu\n", fp4d_model_metadata(model, "version"), strlen(fp4d_model_metadata(model, "sha256")),
           strlen(fp4d_model_metadata(model, "card")));
    if (fp4d_model_metadata(model, "other") || fp4d_model_metadata(model, NULL)) return 3;
    if (fp4d_model_input_shape(model, 0, &shape, &axes) || fp4d_model_input_shape(model, 9, &out, NULL) != FP4D_INVALID_ARGUMENT) return 4;
    printf("example %lld %lld %lld, free %u\n", (long long)shape.size[1], (long long)shape.size[2], (long long)shape.size[3], axes);
    if (fp4d_network_open(model, kernels, 0, &network)) {
        printf("%s\n", fp4d_last_error());
        fp4d_model_close(model);
        return 6;
    }
    for (int32_t number = 0; number < fp4d_network_shapes(network); ++number) {
        if (fp4d_network_shape(network, number, 0, &shape) || fp4d_network_workspace_bytes(network, &shape, &bytes)) return 7;
        if (fp4d_network_output_shape(network, &shape, 0, &out)) return 8;
        const size_t count = elements(&out), images = elements(&shape);
        float *image = calloc(images, sizeof *image), *logits = calloc(count, sizeof *logits);
        void *workspace = aligned_alloc(256, (bytes + 255) / 256 * 256), *outputs[] = {logits};
        const void *inputs[] = {image}, *nothing[] = {NULL}, *odd[] = {(char *)image + 1};
        const fp4d_status created = fp4d_run_create(network, &shape, number ? workspace : NULL, &one);
        if (created) printf("%s\n", fp4d_last_error());
        fp4d_status done = FP4D_OK;
        for (int type = FP4D_FLOAT32; !created && !done && type <= FP4D_CLASSES; ++type) {
            done = fp4d_run_host(one, image, type, logits);
            if (!done) done = fp4d_run_enqueue(one, FP4D_FLOAT16, inputs, type, outputs, NULL);
        }
        if (done) printf("%s\n", fp4d_last_error());
        if (!created && fp4d_run_enqueue(one, FP4D_FLOAT16, nothing, FP4D_FLOAT16, outputs, NULL) != FP4D_INVALID_ARGUMENT) return 9;
        if (!created && fp4d_run_enqueue(one, 7, inputs, FP4D_FLOAT16, outputs, NULL) != FP4D_INVALID_ARGUMENT) return 10;
        if (!created && fp4d_run_enqueue(one, FP4D_FLOAT32, odd, FP4D_FLOAT16, outputs, NULL) != FP4D_INVALID_ARGUMENT) return 11;
        printf("weights %zu, workspace %zu\n", fp4d_network_weight_bytes(network), bytes);
        fp4d_run_close(created ? NULL : one);
        free(workspace);
        free(logits);
        free(image);
    }
    if (fp4d_network_output_shape(network, &wrong, 0, &out) != FP4D_INVALID_ARGUMENT) return 5;
    if (fp4d_network_shape(network, 0, 1, &out) != FP4D_INVALID_ARGUMENT) return 14;
    if (fp4d_run_create(network, &wrong, NULL, &one) != FP4D_INVALID_ARGUMENT || one) return 12;
    if (fp4d_run_create(NULL, &shape, NULL, &one) != FP4D_INVALID_ARGUMENT) return 13;
    fp4d_network_close(network);
    fp4d_model_close(model);
    return 0;
}

int main(int count, char **words) {
    if (count == 2 && !strcmp(words[1], "check")) return check(NULL);
    if (count == 3 && !strcmp(words[1], "bundle")) return check(words[2]);
    return count == 4 && !strcmp(words[1], "run") ? run(words[2], words[3]) : 64;
}
