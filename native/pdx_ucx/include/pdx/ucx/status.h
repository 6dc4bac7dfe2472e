// Status texts and the errors that calls into this library throw.
#pragma once
#include <ucs/type/status.h>

#include <stdexcept>
#include <string>

namespace pdx::ucx {

// "UCS_ERR_CONNECTION_RESET: Connection reset by remote peer".
std::string status_text(ucs_status_t status);

// A setting or an argument that can never work; nothing was changed.
struct SettingError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A call that this state does not allow, or a run outside its region; nothing was posted.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// UCX or the system refused, or a deadline passed.
struct ResourceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws ResourceError("what: status text") unless status is UCS_OK.
void check(ucs_status_t status, const char* what);

}  // namespace pdx::ucx
