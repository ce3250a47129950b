// The store of embedding rows.
#include "bindings.h"

namespace nestpipe {

void bind_store(py::module_& module) { static_cast<void>(module); }

}  // namespace nestpipe
