// Two processes, one of which dies or hangs. Argument: the lane.
// The child is made before UCX starts; memory that both look at is shared.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "ucx_testing.h"

namespace {

using namespace pdx::ucx;
using namespace pdx::testing;
using Clock = std::chrono::steady_clock;

std::string lane;
constexpr std::size_t kBytes = std::size_t{128} << 20;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void tell(int fd, const std::string& text) {
  const auto size = static_cast<std::uint32_t>(text.size());
  CHECK(write(fd, &size, sizeof size) == sizeof size);
  CHECK(write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

std::string hear(int fd) {
  std::uint32_t size = 0;
  CHECK(read(fd, &size, sizeof size) == sizeof size);
  std::string text(size, '\0');
  CHECK(size == 0 || read(fd, text.data(), size) == static_cast<ssize_t>(size));
  return text;
}

class SharedMemory {
 public:
  explicit SharedMemory(std::size_t size)
      : size_(size),
        data_(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    CHECK(data_ != MAP_FAILED);
  }
  ~SharedMemory() { munmap(data_, size_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  char* data() const { return static_cast<char*>(data_); }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  void* data_;
};

// A process that runs `work` with one end of a socket pair.
class Child {
 public:
  explicit Child(const std::function<void(int)>& work) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    pid_ = fork();
    CHECK(pid_ >= 0);
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[0]);
      work(ends[1]);
      std::_Exit(0);
    }
    close(ends[1]);
    fd = ends[0];
  }
  ~Child() {
    signal(SIGCONT);
    signal(SIGKILL);
    int status = 0;
    // It did not end by itself before.
    CHECK(waitpid(pid_, &status, 0) == pid_ && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    close(fd);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void signal(int number) const { kill(pid_, number); }

  int fd = -1;

 private:
  pid_t pid_ = 0;
};

// A child that receives into `memory` and tells each commit's payload.
void receive(int fd, const SharedMemory& memory) {
  Engine engine(options(lane));
  const RegionInfo region = engine.register_region(range_of(memory.data(), memory.size()));
  const auto [id, address] = engine.open_receiver();
  tell(fd, address);
  tell(fd, region.rkey);
  engine.watch_sender(id, hear(fd));
  Told told(engine);
  while (true) {
    for (const auto& done : engine.drain()) {
      if (done.event == Event::CommitArrived) {
        tell(fd, done.data);
      }
    }
    engine.wait(1.0);
  }
}

// The sending side of a receiving child.
struct Sender {
  Sender(const Child& child, const SharedMemory& memory, EngineOptions sending = options(lane))
      : source(random_bytes(memory.size(), 1)), engine(sending), told(engine) {
    region = engine.register_region(range_of(source.data(), source.size())).id;
    const std::string address = hear(child.fd);
    remote = {{range_of(memory.data(), memory.size()), hear(child.fd)}};
    path = engine.connect(address, 10.0);
    const Completion opened = told.wait(Event::PathOpened);
    CHECK(opened.error.empty());
    tell(child.fd, engine.send_address());
  }

  std::uint64_t post(std::uint64_t generation, const Runs& runs) {
    return engine.post(path, generation, runs.table(), std::vector{region}, remote);
  }

  std::vector<char> source;
  Engine engine;
  Told told;
  std::uint64_t region = 0;
  std::vector<RemoteRange> remote;
  std::uint64_t path = 0;
};

void bytes_cross() {
  const SharedMemory memory(kBytes / 4);
  const Child child([&](int fd) { receive(fd, memory); });
  Sender sender(child, memory);
  for (const std::size_t length : {std::size_t{2} << 20, std::size_t{32} << 10}) {
    const Runs runs = shuffled(memory.size() / length, length, 4, length);
    sender.post(length, runs);
    sender.engine.commit(sender.path, length, std::to_string(length));
    CHECK(hear(child.fd) == std::to_string(length));
    CHECK(landed(runs, sender.source.data(), memory.data()));
  }
}

void a_killed_receiver_fails_every_batch() {
  const SharedMemory memory(kBytes);
  const Child child([&](int fd) { receive(fd, memory); });
  Sender sender(child, memory);
  const std::uint64_t first = sender.post(1, shuffled(kBytes >> 16, 1 << 16, 64, 1));
  sender.told.ticket(first);
  child.signal(SIGKILL);
  const auto begin = Clock::now();
  const Completion last = sender.told.ticket(first + 63);
  sender.told.wait(Event::PathClosed);
  std::fprintf(stderr, "  told after %.3f s: %s\n", since(begin), last.error.c_str());
  CHECK(!last.error.empty() && since(begin) < 5.0);
  CHECK(sender.told.count(Event::Posted) == 64);
  CHECK(throws<UsageError>([&] { sender.post(2, shuffled(1, 8, 1, 1)); }, "is closed"));
}

void a_killed_sender_is_lost_and_silent() {
  const SharedMemory memory(kBytes);
  Engine* engine = nullptr;
  const Child child([&](int fd) {
    // The sender: reads where to write, writes until it dies.
    const std::vector<char> source = random_bytes(kBytes, 1);
    Engine sending(options(lane));
    const std::uint64_t region = sending.register_region(range_of(source.data(), kBytes)).id;
    const std::string address = hear(fd);
    const std::vector<RemoteRange> remote{{range_of(memory.data(), kBytes), hear(fd)}};
    tell(fd, sending.send_address());
    Told told(sending);
    const std::uint64_t path = sending.connect(address, 10.0);
    told.wait(Event::PathOpened);
    const Runs runs = shuffled(kBytes >> 16, 1 << 16, 64, 1);
    const std::uint64_t first = sending.post(path, 1, runs.table(), std::vector{region}, remote);
    told.ticket(first);
    tell(fd, "writing");
    told.wait("nothing: it is killed", [](const auto&) { return false; }, 60.0);
  });
  Engine receiving(options(lane));
  engine = &receiving;
  Told told(*engine);
  const RegionInfo region = receiving.register_region(range_of(memory.data(), kBytes));
  const auto [id, address] = receiving.open_receiver();
  tell(child.fd, address);
  tell(child.fd, region.rkey);
  receiving.watch_sender(id, hear(child.fd));
  CHECK(hear(child.fd) == "writing");
  child.signal(SIGKILL);
  const auto begin = Clock::now();
  const Completion lost = told.wait(Event::SenderLost, 10.0);
  std::fprintf(stderr, "  told after %.3f s: %s\n", since(begin), lost.error.c_str());
  CHECK(lost.id == id && since(begin) < 5.0);
  const std::vector<char> after(memory.data(), memory.data() + kBytes);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  CHECK(std::memcmp(after.data(), memory.data(), kBytes) == 0);
}

void a_hung_receiver_is_given_up() {
  const SharedMemory memory(kBytes);
  const Child child([&](int fd) { receive(fd, memory); });
  EngineOptions impatient = options(lane);
  impatient.lane.tcp_user_timeout_s = 1.0;
  Sender sender(child, memory, impatient);
  child.signal(SIGSTOP);
  const std::uint64_t first = sender.post(1, shuffled(kBytes >> 16, 1 << 16, 8, 1));
  const auto begin = Clock::now();
  const Completion last = sender.told.ticket(first + 7);
  std::fprintf(stderr, "  told after %.3f s: %s\n", since(begin), last.error.c_str());
  CHECK(!last.error.empty() && since(begin) < 10.0);
  CHECK(!sender.told.wait(Event::PathClosed).drained);
}

void a_cancel_that_does_not_drain_closes_the_path() {
  const SharedMemory memory(kBytes);
  const Child child([&](int fd) { receive(fd, memory); });
  Sender sender(child, memory);
  child.signal(SIGSTOP);
  sender.post(1, shuffled(kBytes >> 16, 1 << 16, 8, 1));
  // Until the window is full of writes that nobody takes.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  sender.engine.cancel(sender.path, 1, 0.3);
  const auto begin = Clock::now();
  const Completion closed = sender.told.wait(Event::PathClosed);
  std::fprintf(stderr, "  told after %.3f s: %s\n", since(begin), closed.error.c_str());
  CHECK(!closed.drained && since(begin) < 3.0);
  CHECK(sender.told.count(Event::Posted) == 8 && sender.told.count(Event::Cancelled) == 0);
}

// Ends the path of a sender whose receiver hangs; then another receiver must be served as before.
void end_beside_a_hung_receiver(const std::function<void(Sender&)>& write, bool drained) {
  const SharedMemory memory(kBytes);
  const Child child([&](int fd) { receive(fd, memory); });
  Sender sender(child, memory);
  child.signal(SIGSTOP);
  write(sender);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  sender.engine.close_path(sender.path);
  CHECK(sender.told.wait(Event::PathClosed).drained == drained);
  child.signal(SIGCONT);
  Engine other(options(lane));
  std::vector<char> target(1 << 20);
  const std::vector<RemoteRange> remote{
      {range_of(target.data(), target.size()),
       other.register_region(range_of(target.data(), target.size())).rkey}};
  const std::uint64_t path = sender.engine.connect(other.open_receiver().second, 10.0);
  sender.told.wait("another path", [=](const auto& done) {
    return done.event == Event::PathOpened && done.id == path && done.error.empty();
  });
  const Runs runs = shuffled(16, 65536, 1, 1);
  const std::uint64_t ticket =
      sender.engine.post(path, 9, runs.table(), std::vector{sender.region}, remote);
  CHECK(sender.told.ticket(ticket).error.empty());
  CHECK(landed(runs, sender.source.data(), target.data()));
}

void a_path_to_a_hung_receiver_is_closed() {
  const bool cma = lane == "cma";
  // More than the network holds; less than that, all of it handed over; and messages only.
  end_beside_a_hung_receiver(
      [](Sender& sender) { sender.post(1, shuffled(kBytes >> 16, 1 << 16, 8, 1)); }, cma);
  end_beside_a_hung_receiver([](Sender& sender) { sender.post(1, shuffled(8, 4096, 1, 1)); }, cma);
  end_beside_a_hung_receiver(
      [](Sender& sender) {
        for (std::uint64_t generation = 1; generation <= 200; ++generation) {
          sender.engine.commit(sender.path, generation, std::string(60 << 10, 'c'));
        }
      },
      true);
}

void an_engine_closes_in_time_beside_a_hung_receiver() {
  const SharedMemory memory(kBytes);
  const Child child([&](int fd) { receive(fd, memory); });
  Sender sender(child, memory);
  child.signal(SIGSTOP);
  sender.post(1, shuffled(kBytes >> 16, 1 << 16, 8, 1));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto begin = Clock::now();
  sender.engine.close(2.0);
  std::fprintf(stderr, "  closed after %.3f s\n", since(begin));
  CHECK(since(begin) < 2.0);
  CHECK(!sender.told.wait(Event::PathClosed).drained);
  CHECK(sender.told.count(Event::Posted) == 8);
}

void run(const char* name, void (*test)()) {
  std::fprintf(stderr, "%s %s\n", lane.c_str(), name);
  test();
}

#define RUN(test) run(#test, &test)

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 2);
  lane = arguments[1];
  // Each test forks before it starts UCX, and has closed UCX again when the next one forks.
  RUN(bytes_cross);
  RUN(a_killed_receiver_fails_every_batch);
  RUN(a_killed_sender_is_lost_and_silent);
  RUN(a_path_to_a_hung_receiver_is_closed);
  if (lane == "tcp") {
    RUN(a_hung_receiver_is_given_up);
    RUN(a_cancel_that_does_not_drain_closes_the_path);
    RUN(an_engine_closes_in_time_beside_a_hung_receiver);
  }
  return 0;
}
