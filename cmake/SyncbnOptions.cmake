# All options of the build.
option(SYNCBN_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(SYNCBN_BUILD_BENCH "Build the benchmarks (target syncbn_bench)" OFF)
option(SYNCBN_BUILD_FUZZERS "Build the libFuzzer programs of tests/fuzz; needs clang" OFF)
option(SYNCBN_INSTALL "Make the install target" ${PROJECT_IS_TOP_LEVEL})
option(SYNCBN_WITH_TORCH "Build the parts that use libtorch (all but the launcher)" ON)
option(SYNCBN_RECORD_BUILD_TIME "Record each compilation's processor time for bench/build_time" OFF)
option(SYNCBN_WERROR "Treat warnings as errors" OFF)
set(SYNCBN_CUDA AUTO CACHE STRING "Build the NCCL/CUDA library: AUTO (if it can be), ON or OFF")
set_property(CACHE SYNCBN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SYNCBN_PYTHON AUTO CACHE STRING
    "Build the Python package: AUTO (if it can be), ON, OFF, or ONLY (and what it needs of lib)")
set_property(CACHE SYNCBN_PYTHON PROPERTY STRINGS AUTO ON OFF ONLY)
set(SYNCBN_SANITIZE "" CACHE STRING "Sanitizers for all targets, as -fsanitize takes them")

if(NOT SYNCBN_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "SYNCBN_CUDA is ${SYNCBN_CUDA}; it may be AUTO, ON or OFF")
endif()

if(NOT SYNCBN_PYTHON MATCHES "^(AUTO|ON|OFF|ONLY)$")
  message(FATAL_ERROR "SYNCBN_PYTHON is ${SYNCBN_PYTHON}; it may be AUTO, ON, OFF or ONLY")
endif()
if(SYNCBN_PYTHON MATCHES "^ON" AND NOT SYNCBN_WITH_TORCH)
  message(FATAL_ERROR "SYNCBN_PYTHON is ${SYNCBN_PYTHON}, but SYNCBN_WITH_TORCH is OFF; the Python package needs "
                      "libtorch")
endif()

if(SYNCBN_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SYNCBN_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${SYNCBN_SANITIZE})
endif()
