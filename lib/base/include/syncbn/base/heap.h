#pragma once

namespace syncbn::base {

/// Lets malloc keep what is freed instead of handing it back to the kernel, which would have to
/// clear it again at each step of a training loop (a fifth of a step of ResNet-18 on one CPU
/// thread). For programs whose use of memory repeats itself; call it early in main(). Does nothing
/// where the user has set MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES, or
/// where malloc is not glibc's.
void keep_freed_memory();

}  // namespace syncbn::base
