// Number of threads of bulk calls.
#include "bindings.h"
#include "nestpipe/parallel.h"

namespace nestpipe {

void bind_threads(py::module_& module) {
  module.def("set_num_threads", &set_num_threads, py::arg("num_threads"));
  module.def("num_threads", &num_threads);
}

}  // namespace nestpipe
