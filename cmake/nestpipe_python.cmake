# The pybind11 modules. They link neither libtorch nor a CUDA library that is not in them: one wheel serves every torch release.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG REQUIRED)

file(GLOB NESTPIPE_BINDINGS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/bindings/*.cpp)
# Without link-time optimisation: the bindings only hand pointers on, and it would triple the build time.
pybind11_add_module(_core MODULE NO_EXTRAS ${NESTPIPE_BINDINGS})
target_compile_options(_core PRIVATE -Os)
target_link_options(_core PRIVATE -Wl,--gc-sections)
# As one source: each would instantiate pybind11's templates again.
set_target_properties(_core PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
target_link_libraries(_core PRIVATE nestpipe_core)
install(TARGETS _core DESTINATION nestpipe_kernels)

if(TARGET nestpipe_cuda)
  file(GLOB NESTPIPE_CUDA_BINDINGS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/bindings/cuda/*.cpp)
  pybind11_add_module(_cuda MODULE NO_EXTRAS ${NESTPIPE_CUDA_BINDINGS})
  target_compile_definitions(_cuda PRIVATE NESTPIPE_CUDA_ARCHITECTURES="${NESTPIPE_CUDA_ARCHITECTURES}")
  target_link_libraries(_cuda PRIVATE nestpipe_cuda)
  target_link_options(_cuda PRIVATE -Wl,--gc-sections)
  target_compile_options(_cuda PRIVATE -Os)
  set_target_properties(_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  install(TARGETS _cuda DESTINATION nestpipe_kernels)
endif()
