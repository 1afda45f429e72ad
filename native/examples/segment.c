/* Segment an image: PPM in, PGM of class numbers out.
 *
 *     segment unet.nvfp4.fp4 unet.nvfp4.sm90.kernels photo.ppm mask.pgm
 *
 * The image (binary PPM, 8 bits) must have a size that the kernel bundle has a plan for. */
#include <stdio.h>
#include <stdlib.h>

#include "fp4deploy.h"

static int failed(const char *what) {
    fprintf(stderr, "segment: %s: %s\n", what, fp4d_last_error());
    return 1;
}

static unsigned char *read_ppm(const char *path, int *height, int *width) {
    int most;
    unsigned char *pixels = NULL;
    FILE *file = fopen(path, "rb");
    if (file && fscanf(file, "P6 %d %d %d", width, height, &most) == 3 && most == 255 && fgetc(file) != EOF &&
        *width > 0 && *height > 0 && *width <= 16384 && *height <= 16384) {
        size_t bytes = (size_t)*width * (size_t)*height * 3;
        pixels = malloc(bytes);
        if (pixels && fread(pixels, 1, bytes, file) != bytes) {
            free(pixels);
            pixels = NULL;
        }
    }
    if (file) fclose(file);
    return pixels;
}

int main(int count, char **words) {
    fp4d_model *model = NULL;
    fp4d_network *network = NULL;
    fp4d_run *run = NULL;
    int height, width, status = 1;
    float mean[3], std[3];
    if (count != 5) {
        fprintf(stderr, "usage: segment MODEL.fp4 MODEL.kernels IMAGE.ppm MASK.pgm\n");
        return 2;
    }
    unsigned char *pixels = read_ppm(words[3], &height, &width);
    if (!pixels) {
        fprintf(stderr, "segment: %s cannot be read, or is no binary PPM of 8 bits\n", words[3]);
        return 2;
    }
    size_t area = (size_t)height * (size_t)width;
    float *image = malloc(3 * area * sizeof *image);
    unsigned char *mask = malloc(area);
    FILE *out = NULL;
    fp4d_shape shape = {4, {1, 3, height, width}}, logits;

    if (!image || !mask) goto end;
    if (fp4d_model_open(words[1], &model)) { failed(words[1]); goto end; }
    fp4d_model_normalisation(model, mean, std);
    for (size_t pixel = 0; pixel < area; ++pixel) /* to planes of normalised RGB */
        for (size_t colour = 0; colour < 3; ++colour)
            image[colour * area + pixel] = (pixels[3 * pixel + colour] / 255.0f - mean[colour]) / std[colour];

    if (fp4d_network_open(model, words[2], 0, &network)) { failed(words[2]); goto end; }
    if (fp4d_network_output_shape(network, &shape, 0, &logits)) { failed("this size"); goto end; }
    if (logits.rank != 4 || logits.size[2] != height || logits.size[3] != width) {
        fprintf(stderr, "segment: the network gives no class for each pixel\n");
        goto end;
    }
    if (fp4d_run_create(network, &shape, NULL, &run)) { failed("this size"); goto end; }
    if (fp4d_run_host(run, image, FP4D_CLASSES, mask)) { failed("the forward pass"); goto end; }

    out = fopen(words[4], "wb");
    if (!out || fprintf(out, "P5\n%d %d\n255\n", width, height) < 0 || fwrite(mask, 1, area, out) != area) {
        perror(words[4]);
        goto end;
    }
    for (int number = 0; number < fp4d_model_classes(model); ++number) {
        size_t found = 0;
        for (size_t pixel = 0; pixel < area; ++pixel) found += mask[pixel] == number;
        if (found) printf("%-20s %5.1f %%\n", fp4d_model_class_name(model, number), 100.0 * (double)found / (double)area);
    }
    status = 0;
end:
    if (out && fclose(out)) status = 1;
    fp4d_run_close(run);
    fp4d_network_close(network);
    fp4d_model_close(model);
    free(mask);
    free(image);
    free(pixels);
    return status;
}
