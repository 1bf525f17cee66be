# The GPU code is a separate shared library, syncbn_dist_cuda, so that everything else builds and
# runs without CUDA. Building it needs nvcc, the CUDA runtime, torch's CUDA libraries and NCCL's
# header, but no GPU.
#
# Sets SYNCBN_HAVE_CUDA. The top CMakeLists.txt must include this file: enable_language() is for the
# whole project.

set(SYNCBN_HAVE_CUDA FALSE)

# Why the GPU library cannot be built here; empty if it can.
function(_syncbn_cuda_obstacle out)
  set(${out} "" PARENT_SCOPE)
  if(NOT SYNCBN_WITH_TORCH)
    set(${out} "SYNCBN_WITH_TORCH is off" PARENT_SCOPE)
  elseif(NOT SyncbnLibtorch_HAS_CUDA OR NOT EXISTS ${SyncbnLibtorch_ROOT}/lib/libc10_cuda.so)
    set(${out} "the libtorch in ${SyncbnLibtorch_ROOT} was built without CUDA" PARENT_SCOPE)
  elseif(NOT SYNCBN_NVCC)
    set(${out} "nvcc was not found: set CUDACXX to it, or CUDA_HOME to the toolkit" PARENT_SCOPE)
  elseif(NOT _syncbn_nvcc_major STREQUAL _syncbn_cudart_major)
    set(${out} "${SYNCBN_NVCC} is of CUDA ${_syncbn_nvcc_major}, and torch uses CUDA ${_syncbn_cudart_major}: set CUDACXX to an nvcc of that version"
        PARENT_SCOPE)
  elseif(SYNCBN_CUDA STREQUAL "AUTO" AND _syncbn_torch_cuda_lacks)
    list(JOIN _syncbn_torch_cuda_lacks ", " lacks)
    set(${out} "torch's own GPU library lacks ${lacks}: scripts/setup --python installs all of torch"
        PARENT_SCOPE)
  elseif(NOT SYNCBN_NCCL_INCLUDE_DIR)
    set(${out} "nccl.h was found neither beside torch (nvidia/nccl/include) nor in the system: install NCCL's header, or all of torch's requirements (scripts/setup --python)"
        PARENT_SCOPE)
  endif()
endfunction()

if(NOT SYNCBN_CUDA STREQUAL "OFF")
  find_program(
    SYNCBN_NVCC nvcc
    HINTS ENV CUDACXX ${CUDAToolkit_ROOT}/bin $ENV{CUDAToolkit_ROOT}/bin $ENV{CUDA_HOME}/bin
    PATHS /usr/local/cuda/bin)
  # torch's own NCCL first: the header must match the NCCL that torch was built with.
  find_path(
    SYNCBN_NCCL_INCLUDE_DIR nccl.h
    HINTS ${SyncbnLibtorch_ROOT}/../nvidia/nccl/include
    PATHS /usr/local/cuda/include)
  mark_as_advanced(SYNCBN_NVCC SYNCBN_NCCL_INCLUDE_DIR)

  # If torch was installed without the packages that only GPUs need, its GPU library cannot load.
  execute_process(COMMAND ldd ${SyncbnLibtorch_ROOT}/lib/libtorch_cuda.so
                  OUTPUT_VARIABLE _syncbn_ldd ERROR_QUIET)
  string(REGEX MATCHALL "[^ \t\n]+ => not found" _syncbn_torch_cuda_lacks "${_syncbn_ldd}")
  list(TRANSFORM _syncbn_torch_cuda_lacks REPLACE " => not found" "")

  # The CUDA runtime changes its structures between major versions.
  string(REGEX MATCH "libcudart\\.so\\.([0-9]+)" _syncbn_cudart "${_syncbn_ldd}")
  set(_syncbn_cudart_major "${CMAKE_MATCH_1}")
  execute_process(COMMAND ${SYNCBN_NVCC} --version OUTPUT_VARIABLE _syncbn_nvcc_version ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+)" _syncbn_nvcc_release "${_syncbn_nvcc_version}")
  set(_syncbn_nvcc_major "${CMAKE_MATCH_1}")

  _syncbn_cuda_obstacle(_syncbn_obstacle)
  if(NOT _syncbn_obstacle)
    if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
      set(CMAKE_CUDA_COMPILER ${SYNCBN_NVCC})
    endif()
    set(_syncbn_architectures_given FALSE)
    if(DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(_syncbn_architectures_given TRUE)
    else()
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90) # A100, H100 and H200; newer GPUs use 90's PTX
    endif()
    enable_language(CUDA)
    if(NOT _syncbn_architectures_given AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 # and B200; newer GPUs use 100's PTX
          CACHE STRING "" FORCE)
      unset(CMAKE_CUDA_ARCHITECTURES) # the normal variable, which hides the cache entry
    endif()
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      # nvcc 12 and later accept this option, but CMake before 3.26 does not know it.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    find_package(CUDAToolkit REQUIRED)
    set(SYNCBN_HAVE_CUDA TRUE)
    message(STATUS "GPU library: yes (CUDA ${CMAKE_CUDA_COMPILER_VERSION}, NCCL in "
                   "${SYNCBN_NCCL_INCLUDE_DIR})")
  elseif(SYNCBN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SYNCBN_CUDA is ON, but ${_syncbn_obstacle}")
  else()
    message(STATUS "GPU library: no (${_syncbn_obstacle})")
  endif()
endif()

# syncbn_add_cuda_library(SOURCES ... [PRIVATE ...]) makes syncbn_dist_cuda, linked to syncbn::dist.
# Call it only if SYNCBN_HAVE_CUDA is true. Nothing links the library: syncbn_dist loads it at run
# time from the folder of its own file.
function(syncbn_add_cuda_library)
  cmake_parse_arguments(ARG "" "" "SOURCES;PRIVATE" ${ARGN})
  add_library(syncbn_dist_cuda SHARED ${ARG_SOURCES})
  add_library(syncbn::dist_cuda ALIAS syncbn_dist_cuda)
  target_include_directories(
    syncbn_dist_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include ${SYNCBN_DIST_PRIVATE_DIRS})
  target_include_directories(syncbn_dist_cuda SYSTEM PRIVATE ${SYNCBN_NCCL_INCLUDE_DIR})
  target_compile_definitions(syncbn_dist_cuda PRIVATE USE_DISTRIBUTED USE_C10D_NCCL)
  target_compile_features(syncbn_dist_cuda PUBLIC cxx_std_20)
  # CUDA::cudart is the toolkit's; torch ships a library with the same soname.
  target_link_libraries(
    syncbn_dist_cuda
    PUBLIC syncbn_dist
    PRIVATE ${ARG_PRIVATE} ${SyncbnLibtorch_ROOT}/lib/libtorch_cuda.so
            ${SyncbnLibtorch_ROOT}/lib/libc10_cuda.so CUDA::cudart
            $<BUILD_INTERFACE:syncbn_warnings>)
  target_compile_options(
    syncbn_dist_cuda
    PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xptxas=-v;-Xcompiler=-Wall,-Wextra>
            $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${SYNCBN_WERROR}>>:-Werror=all-warnings;-Xcompiler=-Werror>)
  # The library exists for its registrations: the linker must keep torch's libraries even if no symbol
  # of theirs is used.
  target_link_options(syncbn_dist_cuda PRIVATE -Wl,--no-as-needed -Wl,--allow-shlib-undefined)
  set_target_properties(syncbn_dist_cuda PROPERTIES EXPORT_NAME dist_cuda)
  set_property(TARGET syncbn_dist_cuda PROPERTY CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/scripts/kernel-resources
                                                --record ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_property(GLOBAL APPEND PROPERTY SYNCBN_LIBRARIES syncbn_dist_cuda)
endfunction()
