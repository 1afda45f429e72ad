// Concatenation of two channels_last images along the channels, quantised while it is written; and its backward.
//
// The copy that a concatenation makes anyway does the quantisation on its way. No block of 16 crosses from one image to
// the other, because both have a multiple of 16 channels. The backward separates the gradients again, zero where an
// element saturated: `inside` has a bit for each, a byte for eight channels. With `tracked`, the tracked amax of a static
// scale, the concatenation moves it as well, by the largest finite |b| and by *other, the amax of a; *amax is then the one
// before. cell and counter are scratch, zero before and after.
//
// Launch: block 256, grid (chunks, 1). a: DTYPE [pixels, CA]; b: DTYPE [pixels, CB]; out: DTYPE [pixels, CA + CB];
// inside: uint8 [pixels, (CA + CB) / 8].
#include "channels.cuh"

using channels::VECTOR;
using channels::Walk;

extern "C" __global__ void __launch_bounds__(256) concat(
    const DTYPE* a, const DTYPE* b, const float* amax, DTYPE* out, unsigned char* inside, const float* other,
    float* tracked, int* cell, unsigned* counter, float decay, long long pixels, int CA, int CB, long long per_chunk) {
    int C = CA + CB;
    Walk walk(pixels, C, per_chunk);
    bool first = walk.channel < CA;
    const DTYPE* source = first ? a + walk.channel : b + walk.channel - CA;
    int width = first ? CA : CB;
#if QUANTIZE
    const fp4::GlobalScale scale = fp4::global_scale(*amax);
    const bool measures = tracked && !first;
    float largest = 0.f;
#endif
#pragma unroll 4
    for (int trip = 0; trip < walk.trips; ++trip) {
        bool has = walk.has(trip);
        float v[VECTOR] = {};
        if (has) channels::load(source + walk.pixel(trip) * width, v);
#if QUANTIZE
        if (measures) {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) largest = fmaxf(largest, fabsf(v[i]) < INFINITY ? fabsf(v[i]) : 0.f);
        }
        fp4::BlockScale block = fp4::block_scale(channels::block_amax(v), scale);
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            bits |= (fabsf(v[i]) * block.encode <= 6.f ? 1u : 0u) << i;
            v[i] = fp4::fake_quantize(v[i], block);
        }
        if (has && inside) inside[(walk.pixel(trip) * C + walk.channel) / VECTOR] = (unsigned char)bits;
#endif
        if (has) channels::store(out + walk.pixel(trip) * C + walk.channel, v);
    }
#if QUANTIZE
    if (!tracked) return;
    fp4::raise_to(cell, largest);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(counter, gridDim.x - 1) == gridDim.x - 1)
            fp4::track_amax(cell, other, tracked, nullptr, decay, true);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(256) separate(
    const DTYPE* gradient, const unsigned char* inside, DTYPE* da, DTYPE* db, long long pixels, int CA, int CB,
    long long per_chunk) {
    int C = CA + CB;
    Walk walk(pixels, C, per_chunk);
    bool first = walk.channel < CA;
    DTYPE* target = first ? da + walk.channel : db + walk.channel - CA;
    int width = first ? CA : CB;
#pragma unroll 4
    for (int trip = 0; trip < walk.trips; ++trip) {
        if (!walk.has(trip)) continue;
        float g[VECTOR];
        channels::load(gradient + walk.pixel(trip) * C + walk.channel, g);
        if (inside) {
            unsigned bits = inside[(walk.pixel(trip) * C + walk.channel) / VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                if (!(bits >> i & 1)) g[i] = 0.f;
        }
        channels::store(target + walk.pixel(trip) * width, g);
    }
}
