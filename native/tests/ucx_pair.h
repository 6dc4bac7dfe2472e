// Two engines in one process, and how their tests are run: one argument, the lane.
#pragma once
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "ucx_testing.h"

namespace pdx::testing {

inline std::string lane;

inline void run(const char* name, void (*test)()) {
  std::fprintf(stderr, "%s %s\n", lane.c_str(), name);
  test();
}

#define RUN(test) pdx::testing::run(#test, &test)

// A sender and a receiver with an open path between them.
struct Pair {
  explicit Pair(std::size_t bytes, ucx::EngineOptions sending = options(lane))
      : source(random_bytes(bytes, 1)),
        destination(bytes, '\x5a'),
        sender(sending),
        receiver(options(lane)),
        sent(sender),
        received(receiver) {
    source_region = sender.register_region(range_of(source.data(), bytes)).id;
    remote = {{range_of(destination.data(), bytes),
               receiver.register_region(range_of(destination.data(), bytes)).rkey}};
    std::tie(receiver_id, receiver_address) = receiver.open_receiver();
    path = sender.connect(receiver_address, 10.0);
    const ucx::Completion opened = sent.wait(ucx::Event::PathOpened);
    CHECK(opened.error.empty() && opened.id == path);
    CHECK(ucx::transports_problem(lane, opened.data).empty());
    receiver.watch_sender(receiver_id, sender.send_address());
  }

  std::uint64_t post(std::uint64_t generation, const Runs& runs) {
    return sender.post(path, generation, runs.table(), std::vector{source_region}, remote);
  }

  std::vector<char> source;
  std::vector<char> destination;
  ucx::Engine sender;
  ucx::Engine receiver;
  Told sent;
  Told received;
  std::uint64_t source_region = 0;
  std::vector<ucx::RemoteRange> remote;
  std::uint64_t receiver_id = 0;
  std::string receiver_address;
  std::uint64_t path = 0;
};

}  // namespace pdx::testing
