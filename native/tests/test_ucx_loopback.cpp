// Two engines in one process. Argument: the lane.
#include <thread>

#include "ucx_pair.h"

namespace {

using namespace pdx::ucx;
using namespace pdx::testing;

void bytes_land_exactly_and_before_the_commit() {
  // The last piece of memory is no run's; longer than one piece, odd, and single bytes too.
  Pair pair(24 << 20);
  Runs runs = shuffled(64, 4096, 4, 3);
  runs.add(1 << 20, (1 << 20) + 1, (9 << 20) + 7);
  runs.add(0, 700'001, 1);
  runs.end_batch();
  runs.end_batch();
  const std::uint64_t first = pair.post(7, runs);
  const std::uint64_t commit = pair.sender.commit(pair.path, 7, std::string("pay\0load", 8));
  const Completion arrived = pair.received.wait(Event::CommitArrived);
  CHECK(landed(runs, pair.source.data(), pair.destination.data()));
  CHECK(arrived.data == std::string("pay\0load", 8) && arrived.id == pair.receiver_id);
  std::vector<char> expected(pair.destination.size(), '\x5a');
  for (std::size_t i = 0; i < runs.values.size(); i += 5) {
    std::memcpy(expected.data() + runs.values[i + 3], pair.source.data() + runs.values[i + 1],
                static_cast<std::size_t>(runs.values[i + 4]));
  }
  CHECK(expected == pair.destination);
  CHECK(pair.sent.ticket(commit).error.empty());
  const std::uint64_t lengths[] = {65536, 65536, 65536, 65536, (9 << 20) + 8, 0};
  for (std::uint64_t i = 0; i < 6; ++i) {
    const Completion done = pair.sent.ticket(first + i);
    CHECK(done.event == Event::Posted && done.error.empty() && done.generation == 7);
    CHECK(done.length_bytes == lengths[i] && done.runs == (i < 4 ? 16 : i == 4 ? 2 : 0));
  }
}

void many_small_runs_and_commits() {
  Pair pair(8 << 20);
  for (std::uint64_t generation = 1; generation <= 8; ++generation) {
    const Runs runs = shuffled(2048, 4096, 8, generation);
    pair.post(generation, runs);
    const std::string payload(generation * 8192, static_cast<char>('a' + generation));
    pair.sender.commit(pair.path, generation, payload);
    const Completion arrived =
        pair.received.wait("this commit", [&](const auto& done) { return done.data == payload; });
    CHECK(landed(runs, pair.source.data(), pair.destination.data()));
  }
  CHECK(pair.received.count(Event::CommitArrived) == 8);
}

void a_post_that_leaves_its_region_posts_nothing() {
  Pair pair(1 << 20);
  Runs runs = shuffled(16, 4096, 1, 1);
  runs.add(0, (1 << 20) - 10, 11);
  runs.splits.back() = 17;
  CHECK(throws<UsageError>([&] { pair.post(1, runs); }, "run 16: destination offset"));
  Runs high = shuffled(16, 4096, 1, 1);
  auto wrapping = pair.remote;
  wrapping[0].range.address = ~std::uint64_t{0} - 4096;
  CHECK(throws<UsageError>(
      [&] {
        pair.sender.post(pair.path, 1, high.table(), std::vector{pair.source_region}, wrapping);
      },
      "end above 2^63"));
  CHECK(throws<UsageError>(
      [&] {
        pair.sender.post(pair.path, 1, high.table(), std::vector<std::uint64_t>{99}, pair.remote);
      },
      "source region 99 is not registered"));
  // A later, good post of the same generation is not harmed, and nothing else was written.
  const Runs good = shuffled(2, 4096, 1, 1);
  CHECK(pair.sent.ticket(pair.post(1, good)).error.empty());
  CHECK(pair.sent.count(Event::Posted) == 1);
  CHECK(std::count(pair.destination.begin() + 8192, pair.destination.end(), '\x5a') ==
        static_cast<long>(pair.destination.size()) - 8192);
}

void cancel_drops_what_is_not_posted() {
  EngineOptions narrow = options(lane);
  narrow.window = {std::uint64_t{64} << 10, 1};
  Pair pair(64 << 20, narrow);
  const Runs large = shuffled(8192, 8192, 64, 1);
  const std::uint64_t first = pair.post(1, large);
  Runs small;
  small.add(0, 0, 4096);
  small.end_batch();
  const std::uint64_t commit = pair.sender.commit(pair.path, 1, "never");
  pair.sender.cancel(pair.path, 1, 0.0);
  const Completion cancelled = pair.sent.wait(Event::Cancelled);
  const std::vector<char> after = pair.destination;
  CHECK(cancelled.generation == 1);
  CHECK(pair.sent.count(Event::Posted) == 64);
  std::uint64_t placed = 0;
  for (std::uint64_t i = 0; i < 64; ++i) {
    placed += pair.sent.ticket(first + i).length_bytes;
  }
  CHECK(placed < (std::uint64_t{64} << 20));
  CHECK(pair.sent.ticket(first + 63).error.find("cancelled") != std::string::npos);
  CHECK(pair.sent.ticket(commit).error.find("cancelled") != std::string::npos);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(after == pair.destination);
  // Nothing more is ever sent for it; other generations go on.
  CHECK(!pair.sent.ticket(pair.post(1, small)).error.empty());
  CHECK(!pair.sent.ticket(pair.sender.commit(pair.path, 1, "no")).error.empty());
  CHECK(pair.sent.ticket(pair.post(2, small)).error.empty());
  pair.sender.commit(pair.path, 2, "two");
  CHECK(pair.received.wait(Event::CommitArrived).data == "two");
  pair.sender.cancel(pair.path, 77, 1.0);
  pair.sent.wait("an unknown generation is cancelled at once", [](const auto& done) {
    return done.event == Event::Cancelled && done.generation == 77;
  });
}

void generations_share_a_path() {
  EngineOptions narrow = options(lane);
  narrow.window = {std::uint64_t{256} << 10, 8};
  Pair pair(32 << 20, narrow);
  const std::uint64_t large = pair.post(1, shuffled(8192, 4096, 1, 1));
  Runs small;
  small.add(0, 0, 4096);
  small.end_batch();
  const std::uint64_t quick = pair.post(2, small);
  CHECK(pair.sent.ticket(quick).error.empty());
  // The long one, queued before, has not kept it waiting.
  for (const auto& done : pair.sent.list) {
    CHECK(done.ticket != large);
    if (done.ticket == quick) {
      break;
    }
  }
  CHECK(pair.sent.ticket(large).error.empty());
}

void receivers_share_a_sender() {
  EngineOptions narrow = options(lane);
  narrow.window = {std::uint64_t{256} << 10, 8};
  Pair pair(32 << 20, narrow);
  Engine second(options(lane));
  Told received(second);
  std::vector<char> destination(1 << 20);
  const std::vector<RemoteRange> remote{
      {range_of(destination.data(), destination.size()),
       second.register_region(range_of(destination.data(), destination.size())).rkey}};
  const std::uint64_t path = pair.sender.connect(second.open_receiver().second, 10.0);
  pair.sent.wait("the second path", [&](const auto& done) {
    return done.event == Event::PathOpened && done.id == path && done.error.empty();
  });
  // The first receiver's long transfer is queued before the second one's short one.
  const std::uint64_t large = pair.post(1, shuffled(8192, 4096, 1, 1));
  const Runs runs = shuffled(16, 4096, 1, 1);
  const std::uint64_t small =
      pair.sender.post(path, 1, runs.table(), std::vector{pair.source_region}, remote);
  pair.sender.commit(path, 1, "short");
  CHECK(received.wait(Event::CommitArrived).data == "short");
  CHECK(landed(runs, pair.source.data(), destination.data()));
  CHECK(pair.sent.ticket(small).error.empty() && pair.sent.ticket(large).error.empty());
  // One receiver's end is not the other's.
  second.close(4.0);
  pair.sent.wait("the end of the second path", [&](const auto& done) {
    return done.event == Event::PathClosed && done.id == path;
  });
  CHECK(pair.sent.ticket(pair.post(2, runs)).error.empty());
}

void a_sender_may_be_named_while_it_writes() {
  Engine sender(options(lane));
  Engine receiver(options(lane));
  Told sent(sender);
  Told received(receiver);
  const std::vector<char> source = random_bytes(32 << 20, 1);
  std::vector<char> destination(source.size());
  const std::uint64_t region = sender.register_region(range_of(source.data(), source.size())).id;
  const std::vector<RemoteRange> remote{
      {range_of(destination.data(), destination.size()),
       receiver.register_region(range_of(destination.data(), destination.size())).rkey}};
  const auto [id, address] = receiver.open_receiver();
  const std::uint64_t path = sender.connect(address, 10.0);
  CHECK(sent.wait(Event::PathOpened).error.empty());
  const Runs runs = shuffled(512, 65536, 8, 1);
  const std::uint64_t first = sender.post(path, 1, runs.table(), std::vector{region}, remote);
  sent.ticket(first);
  receiver.watch_sender(id, sender.send_address());
  CHECK(sent.ticket(first + 7).error.empty());
  CHECK(landed(runs, source.data(), destination.data()));
  CHECK(received.count(Event::SenderLost) == 0);
  // Its end is told even where nobody has named it.
  sender.close(4.0);
  CHECK(received.wait(Event::SenderLost).id == id);
}

void what_a_peer_says_wrongly_is_refused() {
  Pair pair(1 << 20);
  const Runs runs = shuffled(16, 4096, 1, 1);
  std::vector<std::string> keys{"", "junk", std::string(9, '\xff'), std::string(4096, '\0')};
  for (std::size_t length = 1; length < pair.remote[0].rkey.size(); ++length) {
    keys.push_back(pair.remote[0].rkey.substr(0, length));
  }
  for (const std::string& key : keys) {
    const std::vector<RemoteRange> wrong{pair.remote[0], {pair.remote[0].range, key}};
    CHECK(throws<UsageError>(
        [&] {
          pair.sender.post(pair.path, 1, runs.table(), std::vector{pair.source_region}, wrong);
        },
        "destination region 1: the remote key of " + std::to_string(key.size()) + " bytes"));
  }
  const std::string address = pair.receiver.open_receiver().second;
  for (std::size_t at = 0; at < address.size(); ++at) {
    std::string changed = address;
    changed[at] = static_cast<char>(~changed[at]);
    for (const std::string& wrong : {changed, address.substr(0, at)}) {
      CHECK(throws<UsageError>([&] { pair.sender.connect(wrong, 1.0); }, "lane address"));
      CHECK(throws<UsageError>([&] { pair.receiver.watch_sender(pair.receiver_id, wrong); },
                               "lane address"));
    }
  }
  LaneAddress other = LaneAddress::unpack(address);
  other.probe.rkey = "a key";
  pair.sender.connect(other.pack(), 1.0);
  pair.sent.wait("a probe of another kind is refused", [](const auto& done) {
    return done.event == Event::PathOpened && done.error.find("remote key") != std::string::npos;
  });
  CHECK(pair.sent.ticket(pair.post(1, runs)).error.empty());
}

void a_region_in_use_is_kept() {
  Pair pair(64 << 20);
  const std::uint64_t ticket = pair.post(1, shuffled(1024, 65536, 1, 1));
  pair.sender.deregister_region(pair.source_region);
  CHECK(throws<UsageError>([&] { pair.sender.deregister_region(pair.source_region); },
                           "is not registered"));
  const Completion released = pair.sent.wait(Event::RegionReleased);
  CHECK(released.id == pair.source_region);
  CHECK(pair.sent.count(Event::Posted) == 1 && pair.sent.ticket(ticket).error.empty());
  CHECK(throws<UsageError>([&] { pair.post(2, shuffled(1, 8, 1, 1)); }, "is not registered"));
}

void memory_at_the_end_of_the_address_space_is_refused() {
  Engine engine(options(lane));
  const std::uint64_t last_page = ~std::uint64_t{0} - 4095;
  for (const Range& range : {Range{last_page, 4096}, Range{last_page - 4096, 4097},
                             Range{4096, last_page}, Range{kAddressLimit, 4096}}) {
    CHECK(throws<UsageError>([&] { engine.register_region(range); }, "end above 2^63"));
  }
  // UCX does not look at the memory: the last range that is allowed is registered, and the thread
  // goes on.
  engine.deregister_region(engine.register_region({kAddressLimit - 4096, 4096}).id);
  CHECK(!engine.open_receiver().second.empty());
}

void settings_are_refused_before_ucx_starts() {
  EngineOptions bad = options(lane);
  bad.lane.net_devices = "nosuchdevice0";
  CHECK(throws<SettingError>([&] { Engine engine(bad); }, "nosuchdevice0"));
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 2);
  lane = arguments[1];
  RUN(bytes_land_exactly_and_before_the_commit);
  RUN(many_small_runs_and_commits);
  RUN(a_post_that_leaves_its_region_posts_nothing);
  RUN(cancel_drops_what_is_not_posted);
  RUN(generations_share_a_path);
  RUN(receivers_share_a_sender);
  RUN(a_sender_may_be_named_while_it_writes);
  RUN(what_a_peer_says_wrongly_is_refused);
  RUN(a_region_in_use_is_kept);
  RUN(memory_at_the_end_of_the_address_space_is_refused);
  RUN(settings_are_refused_before_ucx_starts);
  return 0;
}
