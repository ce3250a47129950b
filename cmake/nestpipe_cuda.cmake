# The CUDA kernels as a static library. CPU builds need no CUDA compiler; nothing links the library yet, so it is built only
# where it is asked for by name.
if(NESTPIPE_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
endif()
if(NESTPIPE_CUDA STREQUAL "ON" OR (NESTPIPE_CUDA STREQUAL "AUTO" AND CMAKE_CUDA_COMPILER))
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80 90 100)
  endif()
  enable_language(CUDA)
  file(GLOB_RECURSE NESTPIPE_CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/*.cu)
  add_library(nestpipe_cuda STATIC EXCLUDE_FROM_ALL ${NESTPIPE_CUDA_SOURCES})
  target_include_directories(nestpipe_cuda PUBLIC ${CMAKE_SOURCE_DIR}/csrc/include)
  target_compile_features(nestpipe_cuda PUBLIC cuda_std_17)
  set_target_properties(nestpipe_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_EXTENSIONS OFF CUDA_RUNTIME_LIBRARY Static)
  # No contraction to fused multiply-add, as on the CPU: the same bits.
  target_compile_options(nestpipe_cuda PRIVATE -fmad=false -Xcompiler=-Wall,-Wextra -Xptxas=-v)
endif()
