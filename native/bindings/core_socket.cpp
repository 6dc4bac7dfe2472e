// Python's calls on the local socket, which keep the GIL: they never wait.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <span>
#include <vector>

#include "core_bindings.h"
#include "pdx/local_socket.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdx::bindings {
namespace {

// Contiguous bytes of Python objects, held for one call.
class Views {
 public:
  explicit Views(const nb::list& parts) {
    views_.reserve(parts.size());
    for (nb::handle part : parts) {
      Py_buffer view;
      if (PyObject_GetBuffer(part.ptr(), &view, PyBUF_SIMPLE) != 0) {
        release();
        throw nb::python_error();
      }
      views_.push_back(view);
      spans_.push_back({view.buf, static_cast<std::size_t>(view.len)});
    }
  }
  ~Views() { release(); }
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;

  std::span<const iovec> spans() const { return spans_; }

 private:
  void release() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }
  std::vector<Py_buffer> views_;
  std::vector<iovec> spans_;
};

std::ptrdiff_t send(int fd, const nb::list& parts, const std::vector<int>& descriptors) {
  const Views views(parts);
  return send_now(fd, views.spans(), descriptors);
}

nb::object receive(int fd, std::size_t size, std::size_t descriptors_max) {
  // One buffer a thread: memory of this size, fresh for each call, costs more than the call.
  static thread_local std::vector<std::byte> buffer;
  if (buffer.size() < size) buffer.resize(size);
  const Received received = receive_now(fd, {buffer.data(), size}, descriptors_max);
  if (received.length < 0) return nb::none();
  const nb::bytes data(buffer.data(), static_cast<std::size_t>(received.length));
  return nb::make_tuple(data, received.descriptors, received.truncated);
}

}  // namespace

void bind_socket(nb::module_& m) {
  m.def("send_now", &send, "fd"_a, "parts"_a, "descriptors"_a,
        nb::sig("def send_now(fd: int, parts: list[memoryview], descriptors: list[int]) -> int"),
        "Give the kernel what it takes now, without giving up the GIL; -1: the socket is full.");
  m.def("receive_now", &receive, "fd"_a, "size"_a, "descriptors_max"_a,
        nb::sig("def receive_now(fd: int, size: int, descriptors_max: int) -> "
                "tuple[bytes, list[int], bool] | None"),
        "What is there now, without giving up the GIL: (bytes, descriptors, whether some were "
        "lost); no bytes: the end of the stream; None: nothing is there.");
}

}  // namespace pdx::bindings
