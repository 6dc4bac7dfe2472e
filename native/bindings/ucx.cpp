// The extension pdxfer._ucx: the UCX data plane. Only pdxfer.fabric imports it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pdx/ucx/engine.h"
#include "pdx/ucx/status.h"

namespace nb = nanobind;

namespace {

using pdx::ucx::Engine;
using Runs = nb::ndarray<const std::int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using Splits = nb::ndarray<const std::int64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Remote = std::tuple<std::uint64_t, std::uint64_t, nb::bytes>;

std::string text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

void raise_as(const char* name, const std::exception& error) {
  const nb::object type = nb::module_::import_("pdxfer.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

void translate(const std::exception_ptr& thrown, void* /*payload*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const pdx::ucx::SettingError& error) {
    raise_as("ConfigError", error);
  } catch (const pdx::ucx::UsageError& error) {
    raise_as("LocalProtocolError", error);
  } catch (const pdx::ucx::ResourceError& error) {
    raise_as("ResourceError", error);
  }
}

nb::list drain(Engine& engine) {
  std::vector<pdx::ucx::Completion> taken;
  {
    const nb::gil_scoped_release released;
    taken = engine.drain();
  }
  nb::list list;
  for (const auto& done : taken) {
    list.append(nb::make_tuple(static_cast<int>(done.event), done.id, done.generation, done.ticket,
                               done.length_bytes, done.runs, done.drained, bytes_of(done.data),
                               done.error));
  }
  return list;
}

std::uint64_t post(Engine& engine, std::uint64_t path, std::uint64_t generation, const Runs& runs,
                   const Splits& splits, const std::vector<std::uint64_t>& source,
                   const std::vector<Remote>& destination) {
  std::vector<pdx::ucx::RemoteRange> remote;
  remote.reserve(destination.size());
  for (const auto& [address, length, rkey] : destination) {
    remote.push_back({{address, length}, text_of(rkey)});
  }
  const pdx::ucx::RunTable table{{runs.data(), runs.size()}, {splits.data(), splits.size()}};
  const nb::gil_scoped_release released;
  return engine.post(path, generation, table, source, std::move(remote));
}

pdx::ucx::EngineOptions options(const std::string& lane, const std::string& net_devices,
                                const std::string& address_family,
                                const std::string& tcp_port_range, double tcp_user_timeout_s,
                                std::uint64_t window_bytes, std::uint64_t window_descriptors_min,
                                double spin_us, std::uint64_t commit_bytes_max,
                                double watch_timeout_s) {
  pdx::ucx::EngineOptions made;
  made.lane = {lane, net_devices, address_family, tcp_port_range, tcp_user_timeout_s};
  made.window = {window_bytes, window_descriptors_min};
  made.spin_us = spin_us;
  made.commit_bytes_max = commit_bytes_max;
  made.watch_timeout_s = watch_timeout_s;
  return made;
}

void bind_engine(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Engine>(m, "Engine", "The data plane of one agent and lane; see pdx/ucx/engine.h.")
      .def(
          "__init__",
          [](Engine* self, const std::string& lane, const std::string& net_devices,
             const std::string& address_family, const std::string& tcp_port_range,
             double tcp_user_timeout_s, std::uint64_t window_bytes,
             std::uint64_t window_descriptors_min, double spin_us, std::uint64_t commit_bytes_max,
             double watch_timeout_s) {
            const nb::gil_scoped_release released;
            new (self) Engine(options(lane, net_devices, address_family, tcp_port_range,
                                      tcp_user_timeout_s, window_bytes, window_descriptors_min,
                                      spin_us, commit_bytes_max, watch_timeout_s));
          },
          nb::kw_only(), nb::arg("lane"), nb::arg("net_devices"), nb::arg("address_family"),
          nb::arg("tcp_port_range"), nb::arg("tcp_user_timeout_s"), nb::arg("window_bytes"),
          nb::arg("window_descriptors_min"), nb::arg("spin_us"), nb::arg("commit_bytes_max"),
          nb::arg("watch_timeout_s"))
      .def("fileno", &Engine::fileno)
      .def(
          "drain", &drain,
          nb::sig("def drain(self) -> list[tuple[int, int, int, int, int, int, bool, bytes, str]]"),
          "Event, id, generation, ticket, length_bytes, runs, drained, data, error of each.")
      .def("wait", &Engine::wait, nb::arg("timeout_s"), Released(),
           "True when drain has something within timeout_s.")
      .def(
          "register",
          [](Engine& self, std::uint64_t address, std::uint64_t length_bytes) {
            pdx::ucx::RegionInfo info;
            {
              const nb::gil_scoped_release released;
              info = self.register_region({address, length_bytes});
            }
            return std::make_pair(info.id, bytes_of(info.rkey));
          },
          nb::arg("address"), nb::arg("length_bytes"), "Region id and remote key.")
      .def("deregister", &Engine::deregister_region, nb::arg("region"), Released())
      .def("send_address", [](const Engine& self) { return bytes_of(self.send_address()); })
      .def(
          "connect",
          [](Engine& self, const nb::bytes& address, double timeout_s) {
            const std::string text = text_of(address);
            const nb::gil_scoped_release released;
            return self.connect(text, timeout_s);
          },
          nb::arg("address"), nb::arg("timeout_s"), "Path id.")
      .def("post", &post,
           nb::sig("def post(self, path: int, generation: int, "
                   "runs: numpy.typing.NDArray[numpy.int64], "
                   "splits: numpy.typing.NDArray[numpy.int64], source: list[int], "
                   "destination: list[tuple[int, int, bytes]]) -> int"),
           nb::arg("path"), nb::arg("generation"), nb::arg("runs"), nb::arg("splits"),
           nb::arg("source"), nb::arg("destination"),
           "Ticket of the first batch; the others count up from it.")
      .def(
          "commit",
          [](Engine& self, std::uint64_t path, std::uint64_t generation, const nb::bytes& payload) {
            std::string text = text_of(payload);
            const nb::gil_scoped_release released;
            return self.commit(path, generation, std::move(text));
          },
          nb::arg("path"), nb::arg("generation"), nb::arg("payload"), "Ticket.")
      .def("cancel", &Engine::cancel, nb::arg("path"), nb::arg("generation"), nb::arg("deadline_s"),
           Released())
      .def("close_path", &Engine::close_path, nb::arg("path"), Released())
      .def(
          "open_receiver",
          [](Engine& self) {
            std::pair<std::uint64_t, std::string> made;
            {
              const nb::gil_scoped_release released;
              made = self.open_receiver();
            }
            return std::make_pair(made.first, bytes_of(made.second));
          },
          "Receiver id and address.")
      .def(
          "watch_sender",
          [](Engine& self, std::uint64_t receiver, const nb::bytes& address) {
            const std::string text = text_of(address);
            const nb::gil_scoped_release released;
            self.watch_sender(receiver, text);
          },
          nb::arg("receiver"), nb::arg("address"))
      .def("close_receiver", &Engine::close_receiver, nb::arg("receiver"), Released(),
           "The worker is destroyed on return.")
      .def("close", &Engine::close, nb::arg("deadline_s"), Released());
}

}  // namespace

NB_MODULE(_ucx, m) {
  m.doc() = "The UCX data plane of pdxfer.";
  nb::register_exception_translator(translate);
  m.def(
      "runtime",
      [] {
        const auto found = pdx::ucx::runtime();
        return std::make_pair(found.version(), found.path);
      },
      "Version and file of the UCX that is loaded.");
  bind_engine(m);
}
