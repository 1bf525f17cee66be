# Outside libraries. Debian's packages where they are there; FetchContent fills in where they are
# not (offline: -DFETCHCONTENT_SOURCE_DIR_<NAME>=...).
include(FetchContent)

FetchContent_Declare(
  fmt GIT_REPOSITORY https://github.com/fmtlib/fmt.git GIT_TAG 9.1.0
  FIND_PACKAGE_ARGS 8.1)
FetchContent_Declare(
  spdlog GIT_REPOSITORY https://github.com/gabime/spdlog.git GIT_TAG v1.10.0
  FIND_PACKAGE_ARGS 1.9)
FetchContent_Declare(
  CLI11 GIT_REPOSITORY https://github.com/CLIUtils/CLI11.git GIT_TAG v2.1.2
  FIND_PACKAGE_ARGS 2.1)
FetchContent_Declare(
  yaml-cpp GIT_REPOSITORY https://github.com/jbeder/yaml-cpp.git GIT_TAG yaml-cpp-0.7.0
  FIND_PACKAGE_ARGS 0.6)
FetchContent_Declare(
  nlohmann_json GIT_REPOSITORY https://github.com/nlohmann/json.git GIT_TAG v3.11.2
  FIND_PACKAGE_ARGS 3.10)
set(SPDLOG_FMT_EXTERNAL ON)
FetchContent_MakeAvailable(fmt spdlog CLI11 yaml-cpp nlohmann_json)

# yaml-cpp named its target plainly until 0.8.
if(NOT TARGET yaml-cpp::yaml-cpp AND TARGET yaml-cpp)
  add_library(yaml-cpp::yaml-cpp ALIAS yaml-cpp)
endif()

find_package(Threads REQUIRED)

if(SYNCBN_WITH_TORCH)
  find_package(ZLIB REQUIRED)
  find_package(SyncbnLibtorch 2.11 REQUIRED)
endif()

if(SYNCBN_BUILD_TESTS)
  FetchContent_Declare(
    GTest URL https://github.com/google/googletest/archive/release-1.12.1.tar.gz
    FIND_PACKAGE_ARGS 1.10)
  FetchContent_MakeAvailable(GTest)
endif()
if(SYNCBN_BUILD_BENCH)
  FetchContent_Declare(
    benchmark GIT_REPOSITORY https://github.com/google/benchmark.git GIT_TAG v1.7.1
    FIND_PACKAGE_ARGS 1.6)
  FetchContent_MakeAvailable(benchmark)
endif()
