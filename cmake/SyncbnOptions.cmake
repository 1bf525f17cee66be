# Every switch of the build, in one place.
include(CMakeDependentOption)

option(SYNCBN_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(SYNCBN_BUILD_BENCH "Build the benchmarks" OFF)
option(SYNCBN_WITH_TORCH "Build the parts that use libtorch (all but the launcher)" ON)
option(SYNCBN_WERROR "Treat warnings as errors" OFF)
set(SYNCBN_CUDA AUTO CACHE STRING "Build the NCCL/CUDA library: AUTO, ON or OFF")
set_property(CACHE SYNCBN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SYNCBN_SANITIZE "" CACHE STRING "Sanitizers for all targets, as -fsanitize takes them")

if(SYNCBN_SANITIZE)
  add_compile_options(-fsanitize=${SYNCBN_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${SYNCBN_SANITIZE})
endif()
