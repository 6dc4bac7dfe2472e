#include "core_requests.h"

#include <cstring>
#include <stdexcept>
#include <string_view>

namespace nb = nanobind;

namespace pdx::bindings {
namespace {

[[noreturn]] void refuse(const char* what) {
  PyErr_Clear();
  throw std::invalid_argument(what);
}

// A new reference, or a refusal.
nb::object held(PyObject* object, const char* what) {
  if (object == nullptr) refuse(what);
  return nb::steal(object);
}

PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

std::int64_t integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) refuse("an integer of 64 bits is needed");
  return value;
}

bool is_int64(const Py_buffer& view) {
  if (view.ndim != 1 || view.itemsize != sizeof(std::int64_t) || view.format == nullptr) {
    return false;
  }
  return std::strcmp(view.format, "l") == 0 || std::strcmp(view.format, "q") == 0;
}

}  // namespace

ReadRequests::ReadRequests(const Plan& plan, nb::handle ranges, nb::handle source,
                           nb::handle destination) {
  if (!PyDict_Check(ranges.ptr())) refuse("token ranges are no dict");
  requests_.reserve(static_cast<std::size_t>(PyDict_Size(ranges.ptr())));
  PyObject* name = nullptr;
  PyObject* range = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(ranges.ptr(), &at, &name, &range) != 0;) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &length) : nullptr;
    if (text == nullptr) refuse("a group name is no string");
    const auto group = plan.find_group(std::string_view(text, static_cast<std::size_t>(length)));
    if (!group.has_value()) refuse("a group that the plan lacks");
    if (!PyTuple_Check(range) || PyTuple_Size(range) != 2) refuse("a token range is no pair");
    const std::int64_t first = integer(PyTuple_GetItem(range, 0));
    const std::int64_t end = integer(PyTuple_GetItem(range, 1));
    const PageList mine = pages_of(source.ptr(), name);
    const PageList theirs = pages_of(destination.ptr(), name);
    requests_.push_back({*group, mine, theirs, first, end});
  }
}

PageList ReadRequests::pages_of(PyObject* mapping, PyObject* name) {
  static PyObject* const ids_name = interned("ids");
  static PyObject* const first_token_name = interned("first_token");
  const nb::object pages = held(PyObject_GetItem(mapping, name), "pages of a group are missing");
  const nb::object ids = held(PyObject_GetAttr(pages.ptr(), ids_name), "pages without ids");
  const nb::object first =
      held(PyObject_GetAttr(pages.ptr(), first_token_name), "pages without first_token");
  Py_buffer& view = views_.emplace_back().buffer;
  if (PyObject_GetBuffer(ids.ptr(), &view, PyBUF_ND | PyBUF_FORMAT) != 0) {
    refuse("page ids are no array");
  }
  if (!is_int64(view)) refuse("page ids are not int64 in one dimension");
  return {static_cast<const std::int64_t*>(view.buf),
          static_cast<std::size_t>(view.len) / sizeof(std::int64_t), integer(first.ptr())};
}

}  // namespace pdx::bindings
