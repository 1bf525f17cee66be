# Third-party libraries. Installed packages are used where CMake finds them; FetchContent fetches the
# others in the versions of Debian 12. Without a network, name sources with
# -DFETCHCONTENT_SOURCE_DIR_FMT=... (scripts/vendor packs them).
include(FetchContent)

FetchContent_Declare(
  fmt
  GIT_REPOSITORY https://github.com/fmtlib/fmt.git GIT_TAG 9.1.0 GIT_SHALLOW ON SYSTEM
  FIND_PACKAGE_ARGS 8.1)
FetchContent_Declare(
  spdlog
  GIT_REPOSITORY https://github.com/gabime/spdlog.git GIT_TAG v1.10.0 GIT_SHALLOW ON SYSTEM
  FIND_PACKAGE_ARGS 1.9)
FetchContent_Declare(
  CLI11
  GIT_REPOSITORY https://github.com/CLIUtils/CLI11.git GIT_TAG v2.1.2 GIT_SHALLOW ON SYSTEM
  FIND_PACKAGE_ARGS 2.1)
FetchContent_Declare(
  yaml-cpp
  GIT_REPOSITORY https://github.com/jbeder/yaml-cpp.git GIT_TAG yaml-cpp-0.7.0 GIT_SHALLOW ON
  SYSTEM FIND_PACKAGE_ARGS 0.6)
FetchContent_Declare(
  nlohmann_json
  GIT_REPOSITORY https://github.com/nlohmann/json.git GIT_TAG v3.11.2 GIT_SHALLOW ON SYSTEM
  FIND_PACKAGE_ARGS 3.11)
FetchContent_Declare(
  ZLIB
  GIT_REPOSITORY https://github.com/madler/zlib.git GIT_TAG v1.2.13 GIT_SHALLOW ON SYSTEM
  FIND_PACKAGE_ARGS)
FetchContent_Declare(
  libdeflate
  GIT_REPOSITORY https://github.com/ebiggers/libdeflate.git GIT_TAG v1.20 GIT_SHALLOW ON SYSTEM
  FIND_PACKAGE_ARGS)
# protozero in place of protobuf, whose headers in libtorch's include folder would shadow those of another
# version. It has headers only, and neither Debian's package nor its own build makes a target.
find_path(PROTOZERO_INCLUDE_DIR protozero/pbf_writer.hpp)
set(SYNCBN_READS_DATA ${SYNCBN_WITH_TORCH})
if(SYNCBN_PYTHON STREQUAL "ONLY")
  set(SYNCBN_READS_DATA FALSE)
endif()
if(SYNCBN_READS_DATA AND NOT PROTOZERO_INCLUDE_DIR)
  FetchContent_Declare(
    protozero
    GIT_REPOSITORY https://github.com/mapbox/protozero.git GIT_TAG v1.7.1 GIT_SHALLOW ON
    SOURCE_SUBDIR include) # no CMakeLists.txt there: nothing is built
endif()
FetchContent_Declare(
  GTest
  GIT_REPOSITORY https://github.com/google/googletest.git GIT_TAG release-1.12.1 GIT_SHALLOW ON
  SYSTEM FIND_PACKAGE_ARGS 1.10)
FetchContent_Declare(
  benchmark
  GIT_REPOSITORY https://github.com/google/benchmark.git GIT_TAG v1.7.1 GIT_SHALLOW ON SYSTEM
  FIND_PACKAGE_ARGS 1.6)

# Options of the fetched libraries. The block keeps these names out of this project's scope.
block()
  if(NOT DEFINED CMAKE_POLICY_VERSION_MINIMUM)
    set(CMAKE_POLICY_VERSION_MINIMUM 3.5) # for CMake 4: some of these releases require less
  endif()
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW) # option() respects the variables below
  set(BUILD_SHARED_LIBS OFF)
  set(BUILD_TESTING OFF)
  set(CMAKE_UNITY_BUILD OFF) # their sources are not written for it
  # Linked statically into this project's binaries; not installed.
  set(FMT_INSTALL OFF)
  set(SPDLOG_INSTALL OFF)
  set(SKIP_INSTALL_ALL ON) # zlib's
  set(SPDLOG_FMT_EXTERNAL ON)
  set(YAML_CPP_INSTALL OFF)
  set(YAML_CPP_BUILD_TOOLS OFF)
  set(YAML_CPP_BUILD_TESTS OFF)
  set(YAML_CPP_BUILD_CONTRIB OFF)
  set(JSON_Install OFF)
  set(LIBDEFLATE_BUILD_SHARED_LIB OFF)
  set(LIBDEFLATE_BUILD_GZIP OFF)
  set(CLI11_SINGLE_FILE OFF)
  set(CLI11_BUILD_DOCS OFF)
  set(CLI11_BUILD_EXAMPLES OFF)
  set(CLI11_BUILD_TESTS OFF)
  set(INSTALL_GTEST OFF)
  set(BENCHMARK_ENABLE_TESTING OFF)
  set(BENCHMARK_ENABLE_INSTALL OFF)
  set(BENCHMARK_ENABLE_WERROR OFF)
  FetchContent_MakeAvailable(fmt spdlog)
  if(NOT SYNCBN_PYTHON STREQUAL "ONLY")
    FetchContent_MakeAvailable(CLI11 yaml-cpp nlohmann_json)
  endif()
  if(SYNCBN_READS_DATA)
    FetchContent_MakeAvailable(ZLIB libdeflate)
    if(NOT PROTOZERO_INCLUDE_DIR)
      FetchContent_MakeAvailable(protozero)
      set(PROTOZERO_INCLUDE_DIR ${protozero_SOURCE_DIR}/include)
    endif()
    add_library(protozero::protozero INTERFACE IMPORTED GLOBAL)
    target_include_directories(protozero::protozero SYSTEM INTERFACE ${PROTOZERO_INCLUDE_DIR})
  endif()
  if(SYNCBN_BUILD_TESTS)
    FetchContent_MakeAvailable(GTest)
  endif()
  if(SYNCBN_BUILD_BENCH)
    FetchContent_MakeAvailable(benchmark)
  endif()
endblock()

# yaml-cpp before 0.8 has a target without namespace. A fetched zlib has one as well, and does not
# export its two header folders.
if(TARGET yaml-cpp AND NOT TARGET yaml-cpp::yaml-cpp)
  add_library(yaml-cpp::yaml-cpp ALIAS yaml-cpp)
endif()
if(TARGET zlibstatic AND NOT TARGET ZLIB::ZLIB)
  target_include_directories(zlibstatic SYSTEM INTERFACE $<BUILD_INTERFACE:${zlib_SOURCE_DIR}>
                                                         $<BUILD_INTERFACE:${zlib_BINARY_DIR}>)
  add_library(ZLIB::ZLIB ALIAS zlibstatic)
endif()
if(TARGET libdeflate_static AND NOT TARGET libdeflate::libdeflate)
  add_library(libdeflate::libdeflate ALIAS libdeflate_static)
endif()

find_package(Threads REQUIRED)
# Not fetched: libjpeg-turbo cannot be built within another project.
if(SYNCBN_READS_DATA OR SYNCBN_BUILD_FUZZERS)
  find_package(JPEG)
  find_package(PNG)
  if(NOT JPEG_FOUND OR NOT PNG_FOUND)
    message(FATAL_ERROR "libjpeg-turbo and libpng are needed to read images: scripts/setup installs "
                        "them, or install libjpeg62-turbo-dev and libpng-dev (libjpeg-turbo-devel "
                        "and libpng-devel)")
  endif()
endif()
if(SYNCBN_WITH_TORCH)
  find_package(SyncbnLibtorch 2.11 REQUIRED)
endif()
