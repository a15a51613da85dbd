// SPDX-License-Identifier: Apache-2.0
//
// Names out of files, made fit for a message.
#ifndef ESPALIER_SRC_BASE_TEXT_H_
#define ESPALIER_SRC_BASE_TEXT_H_

#include <string>
#include <string_view>

namespace espalier {

// The name in single quotes. A name from a file may hold control characters (a terminal would obey them)
// or be megabytes long: the former are written as \xNN, and beyond 200 bytes the middle is left out.
std::string Quoted(std::string_view name);

// The same for a whole message, without quotes: control characters as \xNN, and beyond 4000 bytes the
// middle is left out.
std::string Printable(std::string_view message);

}  // namespace espalier

#endif  // ESPALIER_SRC_BASE_TEXT_H_
