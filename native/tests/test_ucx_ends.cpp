// How paths, receivers and engines end. Two engines in one process; argument: the lane.
#include <arpa/inet.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "pdx/ucx/worker_address.h"
#include "ucx_pair.h"

namespace {

using namespace pdx::ucx;
using namespace pdx::testing;

void a_destroyed_receiver_ends_the_path() {
  Pair pair(64 << 20);
  pair.receiver.close_receiver(pair.receiver_id);
  pair.receiver.close_receiver(pair.receiver_id);
  if (lane == "tcp") {
    const std::vector<char> before = pair.destination;
    std::uint64_t ticket = 0;
    try {
      ticket = pair.post(1, shuffled(1024, 65536, 16, 1));
    } catch (const UsageError&) {
      // The path was closed already.
    }
    const Completion closed = pair.sent.wait(Event::PathClosed);
    CHECK(closed.id == pair.path);
    CHECK(ticket == 0 || !pair.sent.ticket(ticket + 15).error.empty());
    CHECK(before == pair.destination);
  } else {
    pair.sent.wait(Event::PathClosed);
  }
  CHECK(throws<UsageError>([&] { pair.post(2, shuffled(1, 8, 1, 1)); }, "is closed"));
  CHECK(throws<UsageError>([&] { pair.sender.commit(pair.path, 2, ""); }, "is closed"));
  // A new receiver, a new path.
  const auto [id, address] = pair.receiver.open_receiver();
  const std::uint64_t path = pair.sender.connect(address, 10.0);
  pair.sent.wait("the new path", [&](const auto& done) {
    return done.event == Event::PathOpened && done.id == path && done.error.empty();
  });
  CHECK(id != pair.receiver_id);
}

void another_sender_than_the_expected_one_is_cut_off() {
  Pair pair(1 << 20);
  Engine other(options(lane));
  pair.receiver.watch_sender(pair.receiver_id, other.send_address());
  const Completion lost = pair.received.wait(Event::SenderLost);
  CHECK(lost.error.find("another sender") != std::string::npos);
  pair.sent.wait(Event::PathClosed);
}

void a_sender_connects_anew_to_a_new_receiver() {
  Pair pair(8 << 20);
  const auto answer = [&](std::uint64_t path) {
    return pair.sent.wait("an answer", [=](const auto& done) {
      return done.event == Event::PathOpened && done.id == path;
    });
  };
  pair.sender.close_path(pair.path);
  pair.sent.wait(Event::PathClosed);
  // The old receiver may have gone down with the path; what is told is the truth in both cases.
  pair.path = pair.sender.connect(pair.receiver_address, 10.0);
  if (!answer(pair.path).error.empty()) {
    pair.received.wait(Event::SenderLost);
  }
  pair.receiver.close_receiver(pair.receiver_id);
  std::tie(pair.receiver_id, pair.receiver_address) = pair.receiver.open_receiver();
  pair.path = pair.sender.connect(pair.receiver_address, 10.0);
  CHECK(answer(pair.path).error.empty());
  const Runs runs = shuffled(128, 65536, 1, 1);
  CHECK(pair.sent.ticket(pair.post(1, runs)).error.empty());
  CHECK(landed(runs, pair.source.data(), pair.destination.data()));
}

void closing_a_path_ends_its_tickets() {
  Pair pair(32 << 20);
  const std::uint64_t first = pair.post(1, shuffled(8192, 4096, 8, 1));
  pair.sender.close_path(pair.path);
  pair.sender.close_path(pair.path);
  pair.sent.wait(Event::PathClosed);
  CHECK(pair.sent.count(Event::Posted) == 8);
  CHECK(pair.sent.list.back().event == Event::PathClosed);
  CHECK(!pair.sent.ticket(first + 7).error.empty());
  CHECK(pair.sent.count(Event::PathClosed) == 1);
}

// What a path whose writes were cut off leaves behind: its sender goes on, its receiver too.
void cut_off(const std::function<void(Pair&)>& end, std::uint64_t seed) {
  Pair pair(32 << 20);
  const std::uint64_t first = pair.post(1, shuffled(8192, 4096, 8, seed));
  std::this_thread::sleep_for(std::chrono::microseconds(300 * seed));
  end(pair);
  const Completion closed = pair.sent.wait(Event::PathClosed);
  CHECK(pair.sent.count(Event::Posted) == 8 && pair.sent.list.back().event == Event::PathClosed);
  CHECK(!pair.sent.ticket(first + 7).error.empty());
  if (closed.drained) {
    const std::vector<char> after = pair.destination;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(after == pair.destination);
  }
  CHECK(pair.received.wait(Event::SenderLost).id == pair.receiver_id);
  std::tie(pair.receiver_id, pair.receiver_address) = pair.receiver.open_receiver();
  pair.path = pair.sender.connect(pair.receiver_address, 10.0);
  pair.sent.wait("the new path", [&](const auto& done) {
    return done.event == Event::PathOpened && done.id == pair.path && done.error.empty();
  });
  const Runs runs = shuffled(512, 65536, 1, seed);
  CHECK(pair.sent.ticket(pair.post(2, runs)).error.empty());
  CHECK(landed(runs, pair.source.data(), pair.destination.data()));
}

void a_path_closed_while_it_writes_harms_nothing() {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    cut_off([](Pair& pair) { pair.sender.close_path(pair.path); }, seed);
  }
}

void a_path_forced_while_it_writes_harms_nothing() {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    cut_off(
        [](Pair& pair) {
          pair.sender.cancel(pair.path, 1, 1e-9);
          // Where it had drained already, the path is still there to be closed.
          pair.sender.close_path(pair.path);
        },
        seed);
  }
}

void a_path_that_ends_while_it_opens_harms_nothing() {
  Engine sender(options(lane));
  Engine receiver(options(lane));
  Told sent(sender);
  for (int round = 0; round < 60; ++round) {
    const auto [id, address] = receiver.open_receiver();
    const std::uint64_t path = sender.connect(address, 10.0);
    std::this_thread::sleep_for(std::chrono::microseconds(150 * round));
    if (round % 3 == 0) {
      receiver.close_receiver(id);
    }
    if (round % 3 != 1) {
      sender.close_path(path);
    }
    sent.wait("an answer",
              [=](const auto& done) { return done.event == Event::PathOpened && done.id == path; });
    sender.close_path(path);
    sent.wait("its end",
              [=](const auto& done) { return done.event == Event::PathClosed && done.id == path; });
    receiver.close_receiver(id);
  }
}

void a_second_path_to_a_receiver_is_refused() {
  Pair pair(1 << 20);
  const std::uint64_t second = pair.sender.connect(pair.receiver_address, 10.0);
  const Completion opened = pair.sent.wait("an answer", [=](const auto& done) {
    return done.event == Event::PathOpened && done.id == second;
  });
  CHECK(!opened.error.empty());
  const Completion lost = pair.received.wait(Event::SenderLost);
  CHECK(lost.error.find("another path") != std::string::npos);
  pair.sent.wait("the end of the first path", [&](const auto& done) {
    return done.event == Event::PathClosed && done.id == pair.path;
  });
}

void a_closed_sender_is_lost() {
  Pair pair(1 << 20);
  pair.sender.close(4.0);
  const Completion lost = pair.received.wait(Event::SenderLost);
  CHECK(lost.id == pair.receiver_id && !lost.error.empty());
  CHECK(pair.received.count(Event::SenderLost) == 1);
  // Its worker is gone, and closing it is still allowed.
  pair.receiver.close_receiver(pair.receiver_id);
}

void a_receiver_that_is_not_there_is_told_in_time() {
  Engine sender(options(lane));
  Told sent(sender);
  std::string address;
  {
    Engine receiver(options(lane));
    address = receiver.open_receiver().second;
  }
  const std::uint64_t path = sender.connect(address, 0.5);
  const Completion opened = sent.wait(Event::PathOpened, 5.0);
  CHECK(opened.id == path && !opened.error.empty());
  CHECK(throws<UsageError>([&] { sender.commit(path, 1, ""); }, "is closed"));
  CHECK(throws<UsageError>([&] { sender.connect("junk", 1.0); }, "lane address"));
  sender.connect(sender.send_address(), 1.0);
  sent.wait("the address of a sender is refused", [](const auto& done) {
    return done.error.find("not that of a receiver") != std::string::npos;
  });
  LaneAddress old = LaneAddress::unpack(address);
  old.ucx_minor += 1;
  sender.connect(old.pack(), 1.0);
  sent.wait("another UCX is refused", [](const auto& done) {
    return done.error.find("do not interoperate") != std::string::npos;
  });
}

void close_is_idempotent_and_bounded() {
  Pair pair(64 << 20);
  pair.post(1, shuffled(16384, 4096, 4, 1));
  const auto begin = std::chrono::steady_clock::now();
  pair.sender.close(4.0);
  pair.sender.close(4.0);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(4));
  for (auto& done : pair.sender.drain()) {
    pair.sent.list.push_back(std::move(done));
  }
  CHECK(pair.sent.count(Event::Posted) == 4 && pair.sent.count(Event::PathClosed) == 1);
  CHECK(throws<UsageError>([&] { pair.post(2, shuffled(1, 8, 1, 1)); }, "engine is closed"));
  CHECK(throws<UsageError>([&] { pair.sender.open_receiver(); }, "engine is closed"));
  pair.sender.close_path(pair.path);
  pair.sender.close_receiver(5);
}

// Connections that a stranger opens and leaves idle, until no descriptor is left.
void idle_connections_take_a_listener_but_not_the_lane() {
  Engine receiver(options(lane));
  Engine sender(options(lane));
  Told sent(sender);
  const auto [first, address] = receiver.open_receiver();
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto entries = WorkerAddress::parse(LaneAddress::unpack(address).worker).entries;
  std::memcpy(&at.sin_port, entries.front().interface.data(), sizeof at.sin_port);
  rlimit limit{};
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit before = limit;
  limit.rlim_cur = 128;
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  std::vector<int> idle;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (bool listens = true; listens && std::chrono::steady_clock::now() < end;) {
    const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (one < 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      // Make room to ask once more.
      close(idle.back());
      idle.pop_back();
      continue;
    }
    idle.push_back(one);
    listens = connect(one, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0;
    CHECK(listens || errno == ECONNREFUSED);
  }
  for (const int one : idle) {
    close(one);
  }
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  sender.connect(address, 1.0);
  CHECK(!sent.wait(Event::PathOpened).error.empty());  // nobody listens there any more
  receiver.close_receiver(first);
  for (int i = 0; i < 3; ++i) {
    const auto [id, again] = receiver.open_receiver();
    const std::uint64_t path = sender.connect(again, 10.0);
    sent.wait("a path to a new receiver", [=](const auto& done) {
      return done.event == Event::PathOpened && done.id == path && done.error.empty();
    });
  }
}

void a_region_keeps_its_context() {
  const std::vector<char> memory(4096);
  auto context = std::make_shared<const Context>(options(lane).lane);
  const std::weak_ptr<const Context> watched = context;
  auto region = std::make_shared<Region>(context, range_of(memory.data(), memory.size()));
  context.reset();
  CHECK(!watched.expired());
  region.reset();
  CHECK(watched.expired());
}

void a_post_may_race_with_close() {
  const std::vector<char> memory(4096);
  Runs runs;
  for (std::uint64_t i = 0; i < 1'000'000; ++i) {
    runs.add(0, 0, 64);
  }
  runs.end_batch();
  for (int round = 0; round < 3; ++round) {
    Engine sender(options(lane));
    const RegionInfo info = sender.register_region(range_of(memory.data(), memory.size()));
    const std::vector regions{info.id};
    const std::vector<RemoteRange> remote{{range_of(memory.data(), memory.size()), info.rkey}};
    std::atomic<bool> posting{false};
    std::thread poster([&] {
      posting = true;
      CHECK(throws<UsageError>([&] { sender.post(77, 1, runs.table(), regions, remote); }, ""));
    });
    // Close comes while the post is being built; there is no path for it anyway.
    while (!posting) {
      std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    sender.close(4.0);
    poster.join();
  }
}

void a_forked_child_is_refused() {
  Pair pair(1 << 20);
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        throws<UsageError>([&] { pair.post(1, shuffled(1, 8, 1, 1)); }, "forked child") &&
        throws<UsageError>([&] { pair.sender.close(1.0); }, "forked child");
    std::_Exit(refused ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(pair.sent.ticket(pair.post(1, shuffled(16, 8, 1, 1))).error.empty());
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 2);
  lane = arguments[1];
  RUN(a_destroyed_receiver_ends_the_path);
  RUN(another_sender_than_the_expected_one_is_cut_off);
  RUN(a_sender_connects_anew_to_a_new_receiver);
  RUN(closing_a_path_ends_its_tickets);
  RUN(a_path_closed_while_it_writes_harms_nothing);
  RUN(a_path_forced_while_it_writes_harms_nothing);
  RUN(a_path_that_ends_while_it_opens_harms_nothing);
  RUN(a_second_path_to_a_receiver_is_refused);
  RUN(a_closed_sender_is_lost);
  RUN(a_receiver_that_is_not_there_is_told_in_time);
  RUN(close_is_idempotent_and_bounded);
  RUN(a_region_keeps_its_context);
  RUN(a_post_may_race_with_close);
  RUN(a_forked_child_is_refused);
  // Last: what UCX forgets there stays in this process, and later workers may meet it.
  RUN(idle_connections_take_a_listener_but_not_the_lane);
  return 0;
}
