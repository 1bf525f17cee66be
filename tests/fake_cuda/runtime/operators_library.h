#pragma once

namespace fake_cuda {

/// Called when a library with kernels was loaded: it may have been libtorch's.
void note_new_library();

/// Opens libfake_cuda_operators.so once libtorch_cuda is in the process. A machine that is
/// preloaded into shells and launchers must not bring libtorch along.
void load_operators_of_new_libraries();

}  // namespace fake_cuda
