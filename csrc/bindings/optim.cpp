// Row updates.
#include "bindings.h"

namespace nestpipe {

void bind_optim(py::module_& module) { static_cast<void>(module); }

}  // namespace nestpipe
