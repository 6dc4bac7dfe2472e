// What each file of the _core bindings adds to the module.
#pragma once
#include <nanobind/nanobind.h>

namespace pdx::bindings {
void bind_plan(nanobind::module_& m);
void bind_board(nanobind::module_& m);
void bind_socket(nanobind::module_& m);
}  // namespace pdx::bindings
