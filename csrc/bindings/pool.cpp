// Lookup and pooling.
#include "bindings.h"

namespace nestpipe {

void bind_pool(py::module_& module) { static_cast<void>(module); }

}  // namespace nestpipe
