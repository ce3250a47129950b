# The pybind11 module. It links neither libtorch nor CUDA: one wheel serves every torch release.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG REQUIRED)

file(GLOB NESTPIPE_BINDINGS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/bindings/*.cpp)
# Without link-time optimisation: the bindings only hand pointers on, and it would triple the build time.
pybind11_add_module(_core MODULE NO_EXTRAS ${NESTPIPE_BINDINGS})
target_link_libraries(_core PRIVATE nestpipe_core)
install(TARGETS _core DESTINATION nestpipe_kernels)
