# syncbn_add_plugin(<name> SOURCES ... [LINK ...]) makes lib<name>.so, which train loads if its
# configuration has `plugins: [lib<name>.so]`.
#
# The plug-in links libtorch, but none of syncbn's libraries: it uses those of the program that loads
# it, with their registries of networks, data sets and so on.
function(syncbn_add_plugin name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(${name} MODULE ${ARG_SOURCES})
  target_compile_features(${name} PRIVATE cxx_std_20)
  foreach(usage INCLUDE_DIRECTORIES COMPILE_DEFINITIONS)
    set_property(TARGET ${name} APPEND
                 PROPERTY ${usage} $<TARGET_PROPERTY:syncbn::train,INTERFACE_${usage}>)
  endforeach()
  if(TARGET syncbn_revision) # in syncbn's own build, where it writes a header that plug-ins include
    add_dependencies(${name} syncbn_revision)
  endif()
  # Two plug-ins may have classes of the same name: each needs its own static variables of templates.
  target_compile_options(${name} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)
  target_link_libraries(${name} PRIVATE syncbn::libtorch fmt::fmt spdlog::spdlog ${ARG_LINK})
endfunction()
