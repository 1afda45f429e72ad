// Depthwise convolutions of feature maps in channels_last: every channel has a filter of its own.
//
//   y[n, oy, ox, c] = round(relu(bias[c] + sum over taps of x[n, oy SH + ky DH - top, ox SW + kx DW - left, c] w[c, ky, kx]))
//
// There is nothing for tensor cores: a result is KH KW multiplications in FP32, which a GPU has time for if an element
// that was loaded is used for several results. A thread computes ROWS x COLUMNS neighbouring pixels of two channels. It
// goes down the rows that they read: one row of SPAN pixels is in registers, the next one on its way from memory.
// Filters lie in shared memory in FP32, [KH KW][LANES pairs of channels]: what lanes read together are neighbours.
//
// The order of a sum: bias, then rows and columns of the filter, each a fused multiply-add. Pixels outside are zeros.
//
// Macros: DTYPE __half or __nv_bfloat16; C channels, even: with it as a constant the pixels of a row are at constant
// distances, where computing their addresses took longer than the multiplications; LANES pairs of channels of a block, at
// most 64; KH, KW taps; SH, SW strides; DH, DW dilations; ROWS, COLUMNS of a thread (ROWS 1 where DH is not 1).
// x, out: DTYPE [N, H, W, C], [N, OH, OW, C], contiguous, 4-byte aligned; w: DTYPE [KH KW, C]; bias: float32 [C] or null.
// Launch: block LANES x STRIPS, at most 128; grid (ceil(N down across / STRIPS), ceil(C / 2 / LANES)), where down and
// across count pieces of ROWS x COLUMNS pixels.
#include "channels.cuh"

#ifndef C
#define C 96
#define LANES 48
#endif
#ifndef KH
#define KH 7
#define KW 7
#define SH 1
#define SW 1
#define DH 1
#define DW 1
#define ROWS 2
#define COLUMNS 8
#endif

namespace {

using Two = channels::Pair<DTYPE>::type;

constexpr int TAPS = KH * KW, STRIPS = 128 / LANES;
constexpr int SPAN = (COLUMNS - 1) * SW + (KW - 1) * DW + 1;
constexpr int STEP = ROWS == 1 ? DH : 1;  // between rows that are read
constexpr int TRIPS = ROWS == 1 ? KH : (ROWS - 1) * SH + KH;

static_assert(ROWS == 1 || DH == 1, "ROWS");
static_assert(SPAN <= 32, "a bit for each pixel of a row");

}  // namespace

extern "C" __global__ void __launch_bounds__(128, ROWS * COLUMNS > 16 ? 3 : 4) depthwise_conv(
    const DTYPE* x, const DTYPE* w, const float* bias, DTYPE* out, int H, int W, int OH, int OW, int top, int left, int relu,
    int down, int across, int pieces) {
    __shared__ float2 filters[TAPS * LANES];
    begin_after_primary();
    const int strip = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int c = 2 * (LANES * int(blockIdx.y) + lane);
    Two held[(TAPS + STRIPS - 1) / STRIPS];  // all on their way at once: one after the other takes longer than the sums
#pragma unroll
    for (int i = 0; i * STRIPS < TAPS; ++i) {
        const int tap = i * STRIPS + strip;
        held[i] = Two{};
        if (tap < TAPS && c < C) held[i] = *reinterpret_cast<const Two*>(w + tap * C + c);
    }
#pragma unroll
    for (int i = 0; i * STRIPS < TAPS; ++i) {
        const int tap = i * STRIPS + strip;
        if (tap < TAPS && c < C) filters[tap * LANES + lane] = widen(held[i]);
    }
    __syncthreads();
    const long long piece = (long long)blockIdx.x * STRIPS + strip;
    if (piece >= pieces || c >= C) return;
    const int line = int(piece) / across, item = line / down;
    const int oy = (line - item * down) * ROWS, ox = (int(piece) - line * across) * COLUMNS;
    const int iy = oy * SH - top, ix = ox * SW - left;
    unsigned inside = 0;  // bit by bit the pixels of a row
#pragma unroll
    for (int j = 0; j < SPAN; ++j) inside |= unsigned(unsigned(ix + j) < unsigned(W)) << j;
    const long long step = (long long)W * C * STEP;
    const DTYPE* from = x + (((long long)item * H + iy) * W + ix) * C + c;
    const auto fetch = [&](int trip, unsigned (&raw)[SPAN]) {
        const unsigned mask = trip < TRIPS && unsigned(iy + trip * STEP) < unsigned(H) ? inside : 0;
#pragma unroll
        for (int j = 0; j < SPAN; ++j) {
            raw[j] = 0;
            if (mask & 1u << j) raw[j] = *reinterpret_cast<const unsigned*>(from + j * C);
        }
        from += step;
    };

    float2 sum[ROWS][COLUMNS];
    const float2 shift = bias ? make_float2(bias[c], bias[c + 1]) : make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; ++i) sum[i / COLUMNS][i % COLUMNS] = shift;
    unsigned raw[SPAN];
    fetch(0, raw);
#pragma unroll 1
    for (int trip = 0; trip < TRIPS; ++trip) {
        float2 value[SPAN];
#pragma unroll
        for (int j = 0; j < SPAN; ++j) value[j] = widen(*reinterpret_cast<const Two*>(raw + j));
        fetch(trip + 1, raw);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int ky = trip - r * SH;
            if (ky < 0 || ky >= KH) continue;
            const float2* const filter = filters + ky * KW * LANES + lane;
#pragma unroll
            for (int kx = 0; kx < KW; ++kx) {
                const float2 factor = filter[kx * LANES];
#pragma unroll
                for (int p = 0; p < COLUMNS; ++p) {
                    const float2 v = value[p * SW + kx * DW];
                    sum[r][p].x = __fmaf_rn(v.x, factor.x, sum[r][p].x);
                    sum[r][p].y = __fmaf_rn(v.y, factor.y, sum[r][p].y);
                }
            }
        }
    }
    DTYPE* to = out + (((long long)item * OH + oy) * OW + ox) * C + c;
#pragma unroll
    for (int r = 0; r < ROWS; ++r, to += (long long)OW * C) {
        if (oy + r >= OH) break;
#pragma unroll
        for (int p = 0; p < COLUMNS; ++p) {
            float2 y = sum[r][p];
            if (relu) y.x = y.x < 0.f ? 0.f : y.x, y.y = y.y < 0.f ? 0.f : y.y;
            if (ox + p < OW) narrow(y, *reinterpret_cast<Two*>(to + p * C));
        }
    }
}
