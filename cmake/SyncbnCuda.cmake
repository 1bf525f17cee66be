# NCCL's part is a shared library of its own, syncbn_dist_cuda, so that everything else builds and
# runs without CUDA. Plain C++: building it needs headers of the CUDA runtime and of NCCL, and
# torch's CUDA libraries, but no nvcc and no GPU.
#
# Sets SYNCBN_HAVE_CUDA, SYNCBN_CUDA_INCLUDE_DIRS and SYNCBN_CUDART.

set(SYNCBN_HAVE_CUDA FALSE)

# Why the library cannot be built here; empty if it can.
function(_syncbn_cuda_obstacle out)
  set(${out} "" PARENT_SCOPE)
  if(NOT SYNCBN_WITH_TORCH)
    set(${out} "SYNCBN_WITH_TORCH is off" PARENT_SCOPE)
  elseif(NOT SyncbnLibtorch_HAS_CUDA OR NOT EXISTS ${SyncbnLibtorch_ROOT}/lib/libc10_cuda.so)
    set(${out} "the libtorch in ${SyncbnLibtorch_ROOT} was built without CUDA" PARENT_SCOPE)
  elseif(_syncbn_torch_cuda_lacks)
    list(JOIN _syncbn_torch_cuda_lacks ", " lacks)
    set(${out} "torch's own GPU library lacks ${lacks}: scripts/setup --python installs all of torch"
        PARENT_SCOPE)
  elseif(NOT SYNCBN_CUDA_INCLUDE_DIR)
    set(${out} "cuda_runtime_api.h was found neither beside torch (nvidia/*/include) nor in a toolkit: install all of torch's requirements (scripts/setup --python), or configure with -DSYNCBN_CUDA_INCLUDE_DIR=FOLDER"
        PARENT_SCOPE)
  elseif(NOT _syncbn_header_major STREQUAL _syncbn_cudart_major)
    set(${out} "${SYNCBN_CUDA_INCLUDE_DIR} is of CUDA ${_syncbn_header_major}, and torch uses CUDA ${_syncbn_cudart_major}: configure with -DSYNCBN_CUDA_INCLUDE_DIR=FOLDER of a toolkit of that version"
        PARENT_SCOPE)
  elseif(NOT SYNCBN_NCCL_INCLUDE_DIR)
    set(${out} "nccl.h was found neither beside torch (nvidia/nccl/include) nor in the system: install NCCL's header, or all of torch's requirements (scripts/setup --python)"
        PARENT_SCOPE)
  endif()
endfunction()

if(NOT SYNCBN_CUDA STREQUAL "OFF")
  # torch's own headers first: they match the CUDA and NCCL that torch was built with.
  file(GLOB _syncbn_wheels ${SyncbnLibtorch_ROOT}/../nvidia/*/include)
  find_path(
    SYNCBN_CUDA_INCLUDE_DIR cuda_runtime_api.h
    HINTS ${_syncbn_wheels} $ENV{CUDA_HOME}/include ${CUDAToolkit_ROOT}/include
    PATHS /usr/local/cuda/include)
  find_path(SYNCBN_NCCL_INCLUDE_DIR nccl.h HINTS ${_syncbn_wheels} PATHS /usr/local/cuda/include)
  mark_as_advanced(SYNCBN_CUDA_INCLUDE_DIR SYNCBN_NCCL_INCLUDE_DIR)
  set(SYNCBN_CUDA_INCLUDE_DIRS ${SYNCBN_CUDA_INCLUDE_DIR} ${_syncbn_wheels})

  # If torch was installed without the packages that only GPUs need, its GPU library cannot load.
  execute_process(COMMAND ldd ${SyncbnLibtorch_ROOT}/lib/libtorch_cuda.so
                  OUTPUT_VARIABLE _syncbn_ldd ERROR_QUIET)
  string(REGEX MATCHALL "[^ \t\n]+ => not found" _syncbn_torch_cuda_lacks "${_syncbn_ldd}")
  list(TRANSFORM _syncbn_torch_cuda_lacks REPLACE " => not found" "")

  # The CUDA runtime changes its structures between major versions.
  string(REGEX MATCH "libcudart\\.so\\.([0-9]+) => ([^ ]+)" _syncbn_cudart "${_syncbn_ldd}")
  set(_syncbn_cudart_major "${CMAKE_MATCH_1}")
  file(REAL_PATH "${CMAKE_MATCH_2}" SYNCBN_CUDART)
  set(_syncbn_header_major "")
  if(SYNCBN_CUDA_INCLUDE_DIR)
    file(STRINGS ${SYNCBN_CUDA_INCLUDE_DIR}/cuda_runtime_api.h _syncbn_version
         REGEX "#define CUDART_VERSION +[0-9]+")
    string(REGEX MATCH "([0-9]+)[0-9][0-9][0-9]" _syncbn_version "${_syncbn_version}")
    set(_syncbn_header_major "${CMAKE_MATCH_1}")
  endif()

  _syncbn_cuda_obstacle(_syncbn_obstacle)
  if(NOT _syncbn_obstacle)
    set(SYNCBN_HAVE_CUDA TRUE)
    message(STATUS "GPU library: yes (CUDA in ${SYNCBN_CUDA_INCLUDE_DIR}, NCCL in "
                   "${SYNCBN_NCCL_INCLUDE_DIR})")
  elseif(SYNCBN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SYNCBN_CUDA is ON, but ${_syncbn_obstacle}")
  else()
    message(STATUS "GPU library: no (${_syncbn_obstacle})")
  endif()
endif()

# syncbn_add_cuda_library(SOURCES ...) makes syncbn_dist_cuda, linked to syncbn::dist. Call it only if
# SYNCBN_HAVE_CUDA is true. Nothing links the library: syncbn_dist loads it at run time from the
# folder of its own file.
function(syncbn_add_cuda_library)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  add_library(syncbn_dist_cuda SHARED ${ARG_SOURCES})
  add_library(syncbn::dist_cuda ALIAS syncbn_dist_cuda)
  target_include_directories(
    syncbn_dist_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include ${SYNCBN_DIST_PRIVATE_DIRS})
  target_include_directories(
    syncbn_dist_cuda SYSTEM PRIVATE ${SYNCBN_NCCL_INCLUDE_DIR} ${SYNCBN_CUDA_INCLUDE_DIRS})
  target_compile_definitions(syncbn_dist_cuda PRIVATE USE_DISTRIBUTED USE_C10D_NCCL)
  target_compile_features(syncbn_dist_cuda PUBLIC cxx_std_20)
  target_link_libraries(
    syncbn_dist_cuda
    PUBLIC syncbn_dist
    PRIVATE ${SyncbnLibtorch_ROOT}/lib/libtorch_cuda.so ${SyncbnLibtorch_ROOT}/lib/libc10_cuda.so
            ${SYNCBN_CUDART} $<BUILD_INTERFACE:syncbn_warnings>)
  # The linker must keep torch's libraries even if no symbol of theirs is used.
  target_link_options(syncbn_dist_cuda PRIVATE -Wl,--no-as-needed -Wl,--allow-shlib-undefined)
  set_target_properties(syncbn_dist_cuda PROPERTIES EXPORT_NAME dist_cuda)
  set_property(GLOBAL APPEND PROPERTY SYNCBN_LIBRARIES syncbn_dist_cuda)
endfunction()
