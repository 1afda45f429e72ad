// HALF, the type of numbers of 16 bits: __half, or __nv_bfloat16 where a network's rest is BF16.
#pragma once

#include "scalars.cuh"

#ifndef HALF
#define HALF __half
#endif
