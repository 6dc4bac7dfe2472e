// Addresses from outside, made to look right or not: none ends the process. Argument: the lane.
#include <sys/eventfd.h>
#include <unistd.h>

#include <bit>

#include "pdx/ucx/context.h"
#include "pdx/ucx/worker.h"
#include "pdx/ucx/worker_set.h"
#include "ucx_pair.h"

namespace {

using namespace pdx::ucx;
using namespace pdx::testing;

constexpr std::size_t kDomain = 9;  // behind header and worker id
constexpr std::size_t kAttributes = 16;

// A worker with everything under it, in this thread's hands.
struct Stranger {
  ~Stranger() { close(wake); }

  int wake = eventfd(0, EFD_NONBLOCK);
  Context context{options(lane).lane};
  WorkerSet workers{wake, 0};
  Worker worker{context, workers};
};

// Where each transport's attributes begin.
std::vector<std::size_t> attributes_of(const std::string& address) {
  std::vector<std::size_t> found;
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(address[i]); };
  for (std::size_t i = kDomain; i < address.size() && (at(i) & 0x80) == 0;) {
    const unsigned length = at(i + 1);
    i += 2 + ((length & 0x20) != 0 ? 1 : 0) + (length & 0x1f);
    for (bool last = false; !last;) {
      found.push_back(i + 2);
      const unsigned interface = at(i + 2 + kAttributes);
      last = (interface & 0x80) != 0;
      i += 2 + kAttributes + 1 + (interface & 0x3f);
    }
  }
  return found;
}

// Whether it names only sockets and processes that `own` names: a test writes to nobody else.
bool stays_here(const std::string& address, const std::string& own) {
  WorkerAddress forged;
  try {
    forged = WorkerAddress::parse(address);
  } catch (const UsageError&) {
    return true;  // it is refused
  }
  const WorkerAddress real = WorkerAddress::parse(own);
  return std::all_of(forged.entries.begin(), forged.entries.end(), [&](const auto& entry) {
    return std::any_of(real.entries.begin(), real.entries.end(), [&](const auto& other) {
      return entry.device == other.device && entry.interface == other.interface;
    });
  });
}

class Forger {
 public:
  explicit Forger(std::uint64_t seed) : random_(seed) {}

  // Half of them keep the form of an address, the other half do not.
  std::string forge(const std::string& own) {
    while (true) {
      std::string made = below(2) == 0 ? with_form(own) : without_form(own);
      if (!made.empty() && stays_here(made, own)) {
        return made;
      }
    }
  }

 private:
  std::size_t below(std::size_t limit) { return random_() % limit; }
  char any() { return static_cast<char>(random_() & 0xff); }

  std::string with_form(std::string made) {
    for (const std::size_t at : attributes_of(made)) {
      for (std::size_t field = 0; field < 3; ++field) {
        constexpr float kValues[] = {0.0F, 1e-9F, 1e-5F, 1.0F, 9.9F, 1e3F, 1e9F, 9e14F};
        if (below(2) == 0) {
          const auto bits = std::bit_cast<std::uint32_t>(kValues[below(std::size(kValues))]);
          std::memcpy(made.data() + at + 4 * field, &bits, sizeof bits);
        }
      }
      made[at + 12] = any();  // priority
    }
    for (std::size_t i = 1; i < kDomain; ++i) {
      made[i] = any();
    }
    made[kDomain] = static_cast<char>(below(32));
    const std::string devices = made.substr(kDomain, made.size() - kDomain - 2);
    for (std::size_t i = below(8) == 0 ? below(200) : 0; i > 0; --i) {
      made.insert(kDomain, devices);
    }
    return made;
  }

  std::string without_form(std::string made) {
    for (std::size_t i = 1 + below(3); i > 0 && !made.empty(); --i) {
      const std::size_t at = below(made.size());
      switch (below(5)) {
        case 0:
          made[at] = any();
          break;
        case 1:
          made[at] = static_cast<char>(made[at] ^ (1 << below(8)));
          break;
        case 2:
          made.resize(at);
          break;
        case 3:
          made.erase(at, 1);
          break;
        default:
          made.insert(at, 1 + below(20), any());
      }
    }
    return made;
  }

  std::mt19937_64 random_;
};

void own_addresses_are_understood_and_every_piece_of_one_is_checked() {
  const Stranger one;
  const Stranger two;
  const std::string& own = one.worker.address();
  const WorkerAddress ours = WorkerAddress::parse(two.worker.address());
  CHECK(WorkerAddress::problem(own, ours).empty());
  const auto refuse = [&](const std::string& address, const std::string& part) {
    const std::string problem = WorkerAddress::problem(address, ours);
    if (problem.find(part) == std::string::npos) {
      std::fprintf(stderr, "said: %s\n", problem.c_str());
    }
    CHECK(problem.find(part) != std::string::npos);
  };
  for (std::size_t length = 0; length < own.size(); ++length) {
    refuse(own.substr(0, length), "ends inside a field at byte");
  }
  refuse(own + "x", "bytes follow the last device");
  refuse(two.worker.address(), "that of the very worker");
  const auto changed = [&](std::size_t at, int value) {
    std::string made = own;
    made[at] = static_cast<char>(value);
    return made;
  };
  refuse(changed(0, 0x2f), "version or flags");
  refuse(changed(0, 0xa0), "version or flags");
  refuse(changed(kDomain, 0x40), "flags of a device");
  refuse(changed(kDomain, 0x80), "does not end the address");
  refuse(changed(kDomain + 1, 0x40 | own[kDomain + 1]), "flags of a device");
  const std::size_t at = attributes_of(own).front();
  for (const float value : {-1.0F, 1e30F, std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity()}) {
    for (std::size_t field = 0; field < 3; ++field) {
      std::string made = own;
      std::memcpy(made.data() + at + 4 * field, &value, sizeof value);
      refuse(made, "overhead, bandwidth or latency");
    }
  }
  refuse(changed(at + 13, own[at + 13] ^ 1), "capabilities");
  refuse(changed(at - 2, own[at - 2] ^ 1), "neither a tcp nor a cma address");
  refuse(changed(at + kAttributes, own[at + kAttributes] | 0x40), "endpoint addresses");
  if (ours.release >= 0) {
    refuse(changed(own.size() - 2, own[own.size() - 2] ^ 1), "of UCX release");
    refuse(own.substr(0, kDomain) + own.substr(own.size() - 2), "no transport");
  }
}

void a_forged_address_to_connect_to_ends_nobody() {
  Engine sender(options(lane));
  Engine receiver(options(lane));
  Told sent(sender);
  Forger forger(1);
  std::size_t refused = 0;
  auto made = receiver.open_receiver();
  for (int i = 0; i < 400; ++i) {
    LaneAddress address = LaneAddress::unpack(made.second);
    address.worker = forger.forge(address.worker);
    const std::uint64_t path = sender.connect(address.pack(), 0.05);
    const Completion opened = sent.wait("an answer", [=](const auto& done) {
      return done.event == Event::PathOpened && done.id == path;
    });
    sent.list.clear();
    refused += opened.error.find("UCX worker address") != std::string::npos ? 1 : 0;
    if (opened.error.empty()) {
      sender.close_path(path);
      receiver.close_receiver(made.first);
      made = receiver.open_receiver();
      receiver.drain();
    }
  }
  CHECK(refused > 100);
}

// As SendEndpoint opens a path, with a hello of its own.
void say(Stranger& stranger, const std::string& receiver, const std::string& hello) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  std::string problem;
  const ucp_ep_h endpoint =
      stranger.worker.connect(LaneAddress::unpack(receiver).worker, params, problem);
  CHECK(endpoint != nullptr);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  ucs_status_ptr_t request =
      ucp_am_send_nbx(endpoint, kHelloMessage, nullptr, 0, hello.data(), hello.size(), &param);
  CHECK(!UCS_PTR_IS_ERR(request));
  while (request != nullptr && ucp_request_check_status(request) == UCS_INPROGRESS) {
    stranger.worker.progress();
  }
  if (request != nullptr) {
    ucp_request_free(request);
  }
}

void a_forged_address_in_a_greeting_ends_nobody() {
  Engine receiver(options(lane));
  Told received(receiver);
  Forger forger(2);
  std::size_t refused = 0;
  for (int i = 0; i < 100; ++i) {
    const auto [id, address] = receiver.open_receiver();
    Stranger stranger;
    LaneAddress own = LaneAddress::unpack(address);
    own.probe = {};
    own.worker = forger.forge(stranger.worker.address());
    say(stranger, address, Hello{1, "sender", own.pack()}.pack());
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    while (std::chrono::steady_clock::now() < end) {
      stranger.worker.progress();
      for (const Completion& done : receiver.drain()) {
        CHECK(done.event == Event::SenderLost && done.id == id);
        refused += done.error.find("UCX worker address") != std::string::npos ? 1 : 0;
      }
    }
    receiver.close_receiver(id);
    receiver.drain();
  }
  CHECK(refused > 20);
  // The worker's own address, which every peer has been told: a greeting that only connects back.
  const auto [id, address] = receiver.open_receiver();
  Stranger stranger;
  LaneAddress own = LaneAddress::unpack(address);
  own.probe = {};
  say(stranger, address, Hello{1, "sender", own.pack()}.pack());
  const Completion lost = received.wait(Event::SenderLost);
  CHECK(lost.error.find("that of the very worker") != std::string::npos);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 2);
  lane = arguments[1];
  RUN(own_addresses_are_understood_and_every_piece_of_one_is_checked);
  RUN(a_forged_address_to_connect_to_ends_nobody);
  RUN(a_forged_address_in_a_greeting_ends_nobody);
  return 0;
}
