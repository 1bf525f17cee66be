#pragma once

namespace fake_cuda {

/// To be called when a library with kernels was loaded: it may be libtorch's.
void note_new_library();

/// Opens libfake_cuda_operators.so once libtorch_cuda is in the process. Shells and launchers
/// preload the fake CUDA libraries as well, and must not load libtorch.
void load_operators_of_new_libraries();

}  // namespace fake_cuda
