// What callers of CUDA operations need to know of CUDA, without its headers.
#pragma once

struct CUstream_st;

namespace nestpipe {
namespace cuda {

// A cudaStream_t; null: the default stream.
using Stream = CUstream_st*;

}  // namespace cuda
}  // namespace nestpipe
