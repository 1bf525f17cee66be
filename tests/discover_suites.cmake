# Writes the file by which ctest finds the test suites of PROGRAM: one ctest entry per GoogleTest suite.
# A suite Exhaustive… also has the label exhaustive (CONTRIBUTING.md).
#   cmake -D PROGRAM=… -D OUT=… [-D PREFIX=…] [-D FILTER=…] -D TIMEOUT=… -D LABELS=… [-D ENVIRONMENT=…] -P …
if(NOT FILTER)
  set(FILTER "*")
endif()
execute_process(
  COMMAND ${PROGRAM} --gtest_list_tests --gtest_filter=${FILTER}
  OUTPUT_VARIABLE listing RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} --gtest_list_tests failed: ${status}\n${listing}")
endif()
# CPU tests must behave the same on every machine: two ranks would use a workstation's two GPUs.
if(NOT LABELS MATCHES "(^|;)(fake)?gpu(;|$)")
  list(PREPEND ENVIRONMENT CUDA_VISIBLE_DEVICES=)
endif()
# In halves of a core, as are the jobs of the test presets and of scripts/run-tests. Tests of faults mostly wait.
set(processors 2)
if(LABELS MATCHES "(^|;)fault(;|$)")
  set(processors 1)
endif()
string(REGEX MATCHALL "(^|\n)[^ \n]+\\.( |\n|$)" suites "${listing}")
set(text "")
foreach(suite IN LISTS suites)
  string(STRIP "${suite}" suite)
  # The tests of this suite that FILTER selects.
  string(FIND "\n${listing}" "\n${suite}" begin)
  string(SUBSTRING "\n${listing}" ${begin} -1 rest)
  string(REGEX MATCH "^\n[^\n]*((\n  [^\n]*)*)" _ "${rest}")
  string(REGEX MATCHALL "\n  [^ \n]+" tests "${CMAKE_MATCH_1}")
  list(TRANSFORM tests STRIP)
  if(FILTER STREQUAL "*")
    set(selected "${suite}*")
  else()
    list(TRANSFORM tests PREPEND "${suite}")
    list(JOIN tests ":" selected)
  endif()
  string(REGEX REPLACE "\\.$" "" name "${suite}")
  set(labels ${LABELS})
  if(name MATCHES "^Exhaustive")
    list(APPEND labels exhaustive)
  endif()
  string(APPEND text "add_test([[${PREFIX}${name}]] [[${PROGRAM}]] [[--gtest_filter=${selected}]]"
                     " --timeout=${TIMEOUT} [[--prefix=${PREFIX}]])\n"
                     "set_tests_properties([[${PREFIX}${name}]] PROPERTIES LABELS [[${labels}]]"
                     " SKIP_RETURN_CODE 77 TIMEOUT 2400 PROCESSORS ${processors} ENVIRONMENT [[${ENVIRONMENT}]])\n")
endforeach()
file(WRITE ${OUT} "${text}")
