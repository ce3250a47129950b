# The kernels as a static library without Python: the extension and the native tests link it.
find_package(Threads REQUIRED)

file(GLOB NESTPIPE_SOURCES CONFIGURE_DEPENDS
  ${CMAKE_SOURCE_DIR}/csrc/store/*.cpp ${CMAKE_SOURCE_DIR}/csrc/keys/*.cpp
  ${CMAKE_SOURCE_DIR}/csrc/buffers/*.cpp ${CMAKE_SOURCE_DIR}/csrc/optim/*.cpp
  ${CMAKE_SOURCE_DIR}/csrc/pool/*.cpp)
add_library(nestpipe_core STATIC ${NESTPIPE_SOURCES})
target_include_directories(nestpipe_core PUBLIC ${CMAKE_SOURCE_DIR}/csrc/include)
target_compile_features(nestpipe_core PUBLIC cxx_std_17)
set_target_properties(nestpipe_core PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF
  CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
# No contraction to fused multiply-add: results must not depend on the instruction set. Neither errno nor floating-point traps are
# used, and without them sqrt and selections vectorize; both leave every bit of a result as it is.
target_compile_options(nestpipe_core PUBLIC -ffp-contract=off -fno-math-errno -fno-trapping-math
  -ffunction-sections -fdata-sections -Wall -Wextra -Werror)
target_link_libraries(nestpipe_core PUBLIC Threads::Threads)
if(NESTPIPE_SANITIZE)
  target_compile_options(nestpipe_core PUBLIC -fsanitize=${NESTPIPE_SANITIZE} -fno-omit-frame-pointer -g)
  target_link_options(nestpipe_core PUBLIC -fsanitize=${NESTPIPE_SANITIZE})
endif()
