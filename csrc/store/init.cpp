// Initial embeddings of whole rows.
#include "nestpipe/init.h"

#include "nestpipe/initial_value.h"

namespace nestpipe {

void initial_values(const Initializer& init, std::uint64_t seed, std::uint64_t table_hash,
                    std::int64_t key, std::int64_t dim, float* out) {
  const double* const parameters = init.parameters.data();
  if (init.kind == InitKind::kConstant) {
    for (std::int64_t d = 0; d < dim; ++d) out[d] = static_cast<float>(parameters[0]);
    return;
  }
  const std::uint64_t stream = value_stream(seed, table_hash, key);
  for (std::int64_t d = 0; d < dim; ++d) {
    out[d] = initial_value(init.kind, parameters, stream, d);
  }
}

}  // namespace nestpipe
