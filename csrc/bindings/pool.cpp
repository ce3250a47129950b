// Lookup-and-pool for Python: addresses and sizes in, no logic.
#include "bindings.h"
#include "nestpipe/row_sums.h"
#include "pool_arguments.h"

namespace nestpipe {

void bind_pool(py::module_& module) {
  using Address = std::uintptr_t;
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.def(
      "lookup_pool_forward",
      [](const RowsTuple& rows, const BagsTuple& bags, const SegmentBags& segment_bags,
         const SegmentModes& segment_modes, const MatrixList& outs) {
        lookup_pool_forward(to_rows(rows), to_bags(bags, segment_bags, segment_modes),
                            to_matrices<SegmentOutput, float>(outs));
      },
      release);
  module.def(
      "lookup_pool_backward",
      [](const RowsTuple& rows, const BagsTuple& bags, const SegmentBags& segment_bags,
         const SegmentModes& segment_modes, const MatrixList& grads, Address accumulator) {
        lookup_pool_backward(to_rows(rows), to_bags(bags, segment_bags, segment_modes),
                             to_matrices<SegmentGradient, const float>(grads),
                             as_pointer<float>(accumulator));
      },
      release);
  module.def(
      "lookup_pool_gradient_bound",
      [](const BagsTuple& bags, const SegmentBags& segment_bags, const SegmentModes& segment_modes,
         const MatrixList& grads, std::int64_t dim) {
        return lookup_pool_gradient_bound(to_bags(bags, segment_bags, segment_modes),
                                          to_matrices<SegmentGradient, const float>(grads), dim);
      },
      release);
  module.def("use_portable_sums", &use_portable_sums);
  module.def(
      "lookup_pool_weight_grad",
      [](const RowsTuple& rows, const BagsTuple& bags, const SegmentBags& segment_bags,
         const SegmentModes& segment_modes, const MatrixList& grads, Address weight_grad) {
        lookup_pool_weight_grad(to_rows(rows), to_bags(bags, segment_bags, segment_modes),
                                to_matrices<SegmentGradient, const float>(grads),
                                as_pointer<float>(weight_grad));
      },
      release);
}

}  // namespace nestpipe
