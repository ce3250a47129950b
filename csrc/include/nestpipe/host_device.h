// For small functions that kernels use, too.
#pragma once

#if defined(__CUDACC__)
#define NESTPIPE_HOST_DEVICE __host__ __device__
#else
#define NESTPIPE_HOST_DEVICE
#endif
