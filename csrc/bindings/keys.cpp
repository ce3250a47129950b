// Operations on keys.
#include "bindings.h"

namespace nestpipe {

void bind_keys(py::module_& module) { static_cast<void>(module); }

}  // namespace nestpipe
