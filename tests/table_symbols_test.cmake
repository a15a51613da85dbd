# SPDX-License-Identifier: Apache-2.0
#
# The object files of the kernel tables (src/cpu/table_*.cc) define one global function each and nothing weak. A
# weak symbol - an inline function, a member of a template - exists in many object files, of which the linker
# keeps one: the copy that was compiled for AVX-512 would then run on machines without.
# Variables: NM, LIBRARY (libespalier.a), SOURCE_DIR, PROCESSOR.
foreach(variable NM LIBRARY SOURCE_DIR PROCESSOR)
  if(NOT ${variable})
    message(FATAL_ERROR "${variable} is not set")
  endif()
endforeach()

set(tables table_portable.cc)
if(PROCESSOR STREQUAL "x86_64")
  file(GLOB tables RELATIVE ${SOURCE_DIR}/src/cpu ${SOURCE_DIR}/src/cpu/table_*.cc)
endif()

execute_process(COMMAND ${NM} --print-file-name --portability --defined-only ${LIBRARY}
                OUTPUT_VARIABLE symbols RESULT_VARIABLE status ERROR_VARIABLE errors)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${NM} ${LIBRARY}: ${errors}")
endif()

set(failures "")
foreach(table ${tables})
  # "archive[member]: name type value size"
  string(REGEX MATCHALL "[^\n]*\\[${table}\\.o[^\n]*" lines "${symbols}")
  set(functions "")
  foreach(line ${lines})
    if(NOT line MATCHES ": ([^ ]+) ([A-Za-z])( |$)")
      string(APPEND failures "\n  not a symbol: ${line}")
      continue()
    endif()
    set(name ${CMAKE_MATCH_1})
    set(type ${CMAKE_MATCH_2})
    if(type STREQUAL "T")
      list(APPEND functions ${name})
    elseif(type MATCHES "^[WVu]$" AND NOT name STREQUAL "DW.ref.__gxx_personality_v0")
      # The exception is a pointer to the handler of exceptions, the same in every file.
      string(APPEND failures "\n  ${table}: ${name} is weak (${type})")
    elseif(type MATCHES "^[BDRGSC]$")
      string(APPEND failures "\n  ${table}: ${name} is a global variable (${type})")
    endif()
  endforeach()
  list(LENGTH functions count)
  if(NOT count EQUAL 1)
    string(APPEND failures "\n  ${table}: global functions are '${functions}'; legal: one, which fills the table")
  endif()
endforeach()
if(failures)
  message(FATAL_ERROR "${LIBRARY}:${failures}")
endif()
message(STATUS "${tables}: no weak symbols")
