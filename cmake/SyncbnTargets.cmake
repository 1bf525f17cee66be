# Functions that make libraries and programs in the same way for every module.

# Link this target privately, so that its warnings do not reach consumers.
add_library(syncbn_warnings INTERFACE)
target_compile_options(
  syncbn_warnings
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wnon-virtual-dtor;-Woverloaded-virtual>
            $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${SYNCBN_WERROR}>>:-Werror>)
# GCC 12 warns falsely about each `"text" + std::string` that it inlines (GCC bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(syncbn_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
# GCC 14 warns falsely that libtorch's optional device guards are uninitialised.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 14)
  target_compile_options(syncbn_warnings
                         INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
endif()

# c10d's headers declare Gloo only with these; none of the public headers needs them.
set(SYNCBN_C10D_DEFINITIONS USE_DISTRIBUTED USE_C10D_GLOO)

# Gives a target that links syncbn::libtorch the precompiled libtorch headers of lib/precompiled.h,
# compiled once with the flags that all modules share. Files with compile options of their own must
# set SKIP_PRECOMPILE_HEADERS.
function(syncbn_precompile target)
  if(NOT TARGET syncbn_precompiled)
    set(empty ${PROJECT_BINARY_DIR}/precompiled.cpp)
    file(CONFIGURE OUTPUT ${empty} CONTENT "")
    add_library(syncbn_precompiled STATIC ${empty})
    target_link_libraries(syncbn_precompiled PRIVATE syncbn::base syncbn::libtorch syncbn_warnings)
    target_compile_definitions(syncbn_precompiled PRIVATE ${SYNCBN_C10D_DEFINITIONS})
    target_precompile_headers(syncbn_precompiled PRIVATE ${PROJECT_SOURCE_DIR}/lib/precompiled.h)
  endif()
  target_compile_definitions(${target} PRIVATE ${SYNCBN_C10D_DEFINITIONS})
  target_precompile_headers(${target} REUSE_FROM syncbn_precompiled)
endfunction()

# These modules mostly wait or call libtorch, so -O1 is enough; it saves a seventh of the build time.
set(SYNCBN_COLD_MODULES launch models config train)

# syncbn_add_library(<module> [SHARED|STATIC] SOURCES ... [PUBLIC ...] [PRIVATE ...])
# makes syncbn_<module> (static by default) with the alias syncbn::<module>. The library and the
# headers in lib/<module>/include are installed.
function(syncbn_add_library module)
  cmake_parse_arguments(ARG "SHARED;STATIC" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  set(kind STATIC)
  if(ARG_SHARED)
    set(kind SHARED)
  endif()
  set(target syncbn_${module})
  add_library(${target} ${kind} ${ARG_SOURCES})
  add_library(syncbn::${module} ALIAS ${target})
  target_include_directories(
    ${target}
    PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>
           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/src)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE}
                                                                $<BUILD_INTERFACE:syncbn_warnings>)
  if("syncbn::libtorch" IN_LIST ARG_PUBLIC OR "syncbn::dist" IN_LIST ARG_PUBLIC)
    syncbn_precompile(${target})
  endif()
  if(module IN_LIST SYNCBN_COLD_MODULES)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${module})
  set_property(GLOBAL APPEND PROPERTY SYNCBN_LIBRARIES ${target})
  set_property(GLOBAL APPEND PROPERTY SYNCBN_HEADER_DIRS ${CMAKE_CURRENT_SOURCE_DIR}/include)
endfunction()

# syncbn_add_program(<name> SOURCES ... LINK ...) makes build/bin/<name> and installs it.
function(syncbn_add_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINK} syncbn_warnings)
  set_property(GLOBAL APPEND PROPERTY SYNCBN_PROGRAMS ${name})
endfunction()

# Makes the target syncbn_product: everything but tests and benchmarks. Call it after all modules.
function(syncbn_add_product_target)
  get_property(libraries GLOBAL PROPERTY SYNCBN_LIBRARIES)
  get_property(programs GLOBAL PROPERTY SYNCBN_PROGRAMS)
  get_property(pages GLOBAL PROPERTY SYNCBN_PAGES)
  add_custom_target(syncbn_product)
  add_dependencies(syncbn_product ${libraries} ${programs} ${pages})
endfunction()
