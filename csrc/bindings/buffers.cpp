// Row buffers.
#include "bindings.h"

namespace nestpipe {

void bind_buffers(py::module_& module) { static_cast<void>(module); }

}  // namespace nestpipe
