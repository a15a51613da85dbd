# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` puts down: library, headers, CMake package, pkg-config file, command line.
include(CMakePackageConfigHelpers)

set(ESPALIER_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/espalier)

install(TARGETS espalier EXPORT espalierTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
# The header of the C interface goes with its library.
set(ESPALIER_LEFT_OUT "")
if(NOT TARGET espalier_c)
  set(ESPALIER_LEFT_OUT PATTERN espalier_c.h EXCLUDE)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/espalier ${PROJECT_BINARY_DIR}/include/espalier
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "*.def" ${ESPALIER_LEFT_OUT})
if(TARGET espalier_c)
  install(TARGETS espalier_c EXPORT espalierTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(EXPORT espalierTargets NAMESPACE espalier:: DESTINATION ${ESPALIER_CMAKE_DIR})
if(TARGET espalier_cli)
  install(TARGETS espalier_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# The archive is static: whoever links it links its private dependencies too.
if(ESPALIER_HAS_CUDA)
  set(ESPALIER_CONFIG_CUDA "find_dependency(CUDAToolkit)")
  set(ESPALIER_PC_CUDA "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
else()
  set(ESPALIER_CONFIG_CUDA "")
  set(ESPALIER_PC_CUDA "")
endif()
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/espalierConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/espalierConfig.cmake
                              INSTALL_DESTINATION ${ESPALIER_CMAKE_DIR})
# Before 1.0 every minor version may break its callers.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/espalierConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/espalierConfig.cmake ${PROJECT_BINARY_DIR}/espalierConfigVersion.cmake
        DESTINATION ${ESPALIER_CMAKE_DIR})

# Absolute install directories (distributions set them) must not get the prefix in front.
cmake_path(APPEND ESPALIER_PC_LIBDIR "\${prefix}" "${CMAKE_INSTALL_LIBDIR}")
cmake_path(APPEND ESPALIER_PC_INCLUDEDIR "\${prefix}" "${CMAKE_INSTALL_INCLUDEDIR}")
# The prefix from where the file lies, so that `cmake --install --prefix` may choose another.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(ESPALIER_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH ESPALIER_PC_UP "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  set(ESPALIER_PC_PREFIX "\${pcfiledir}/${ESPALIER_PC_UP}")
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/espalier.pc.in ${PROJECT_BINARY_DIR}/espalier.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/espalier.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(TARGET espalier_c)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/espalier_c.pc.in ${PROJECT_BINARY_DIR}/espalier_c.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/espalier_c.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
