# The CUDA kernels as a static library. CPU builds need no CUDA compiler.
if(NESTPIPE_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
endif()
if(NESTPIPE_CUDA STREQUAL "ON" OR (NESTPIPE_CUDA STREQUAL "AUTO" AND CMAKE_CUDA_COMPILER))
  # Code for each of these, or for those of CUDAARCHS; later minor versions run it, too. Without PTX, which would make wheels
  # 140 kB larger.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND "$ENV{CUDAARCHS}" STREQUAL "")
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  file(GLOB_RECURSE NESTPIPE_CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/*.cu)
  # One source of them all, since each is compressed alone: a fifth smaller. UNITY_BUILD does it from CMake 3.31 on.
  foreach(source ${NESTPIPE_CUDA_SOURCES})
    string(APPEND NESTPIPE_CUDA_INCLUDES "#include \"${source}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT kernels.cu CONTENT "${NESTPIPE_CUDA_INCLUDES}" @ONLY)
  add_library(nestpipe_cuda STATIC ${CMAKE_CURRENT_BINARY_DIR}/kernels.cu)
  target_include_directories(nestpipe_cuda PUBLIC ${CMAKE_SOURCE_DIR}/csrc/include)
  target_compile_features(nestpipe_cuda PUBLIC cuda_std_17)
  set_target_properties(nestpipe_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_EXTENSIONS OFF CUDA_RUNTIME_LIBRARY Static)
  # No contraction to fused multiply-add, as on the CPU: the same bits.
  target_compile_options(nestpipe_cuda PRIVATE -fmad=false -compress-mode=size -Xcompiler=-Wall,-Wextra,-Os,-ffunction-sections)
  string(JOIN " " NESTPIPE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
  target_link_libraries(nestpipe_cuda PUBLIC CUDA::cudart_static)
endif()
