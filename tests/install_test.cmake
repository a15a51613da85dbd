# SPDX-License-Identifier: Apache-2.0
# Installs BUILD_DIR into an empty prefix, then builds and runs tests/install against it, once through
# find_package and once through pkg-config. Run with cmake -P; any failure ends it with an error.
cmake_minimum_required(VERSION 3.25)

set(work ${BUILD_DIR}/install_test)
set(checkpoint ${SOURCE_DIR}/data/tiny-qwen3moe-exl3-mixed)
set(c_example ${SOURCE_DIR}/examples/c/one_layer.c)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}\nended with ${status}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect_token program)
  run(${program} ${checkpoint})
  if(NOT output MATCHES "^layer 0 on cpu: y\\[0\\] = -?[0-9]")
    message(FATAL_ERROR "${program} printed: ${output}")
  endif()
endfunction()

function(expect_layer program)
  run(${program} ${checkpoint} 1)
  if(NOT output MATCHES "^layer 1: 16 experts of 256 x 512\ncpu executor on the host\nsum of y -?[0-9]")
    message(FATAL_ERROR "${program} printed: ${output}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${work}/prefix)
foreach(file include/espalier/espalier.h include/espalier/formats.def include/espalier/version.h
        include/espalier/espalier_c.h bin/espalier)
  if(NOT EXISTS ${work}/prefix/${file})
    message(FATAL_ERROR "not installed: ${file}")
  endif()
endforeach()

# Nothing of the build or source tree may be left in what was installed.
file(GLOB_RECURSE texts ${work}/prefix/*.cmake ${work}/prefix/*.pc ${work}/prefix/*.h)
foreach(file ${texts})
  file(READ ${file} text)
  string(FIND "${text}" "espalier_flags" flags)
  string(REPLACE "${work}/prefix" "" text "${text}")
  string(FIND "${text}" "${SOURCE_DIR}" path)
  if(NOT path EQUAL -1 OR NOT flags EQUAL -1)
    message(FATAL_ERROR "${file} speaks of the source tree or of espalier_flags")
  endif()
endforeach()

run(${CMAKE_COMMAND} -S ${SOURCE_DIR}/tests/install -B ${work}/cmake -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_C_COMPILER=${C} -DC_EXAMPLE=${c_example} -DCMAKE_PREFIX_PATH=${work}/prefix)
run(${CMAKE_COMMAND} --build ${work}/cmake)
expect_token(${work}/cmake/one_token)
expect_layer(${work}/cmake/one_layer)

file(GLOB_RECURSE pc ${work}/prefix/*/espalier.pc)
cmake_path(GET pc PARENT_PATH pc_dir)
cmake_path(GET pc_dir PARENT_PATH lib_dir)
find_program(PKG_CONFIG NAMES pkg-config pkgconf REQUIRED)
run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_dir} ${PKG_CONFIG} --static --cflags --libs espalier)
separate_arguments(pc_flags UNIX_COMMAND "${output}")
run(${CXX} -std=c++20 -O1 ${SOURCE_DIR}/tests/install/main.cc -o ${work}/one_token_pc ${pc_flags})
expect_token(${work}/one_token_pc)
run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_dir} ${PKG_CONFIG} --modversion espalier)
if(NOT output MATCHES "^${VERSION}")
  message(FATAL_ERROR "pkg-config says version ${output} instead of ${VERSION}")
endif()

run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_dir} ${PKG_CONFIG} --cflags --libs espalier_c)
separate_arguments(pc_flags UNIX_COMMAND "${output}")
run(${C} -std=c11 -O1 ${c_example} -o ${work}/one_layer_pc ${pc_flags} -Wl,-rpath,${lib_dir})
expect_layer(${work}/one_layer_pc)
