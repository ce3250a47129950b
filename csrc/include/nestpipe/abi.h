// The version that the Python package and the extension must agree on; raise both when a binding
// changes its meaning.
#pragma once

namespace nestpipe {

constexpr int kAbiVersion = 15;

}  // namespace nestpipe
