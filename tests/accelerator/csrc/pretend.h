// A pretend accelerator: the host's memory behind a wall, with queues, a limit and counters. What every file here may know.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace pretend {

constexpr auto kType = c10::DeviceType::PrivateUse1;
inline c10::Device device() { return {kType, 0}; }

struct Counters {
  int64_t waits = 0, operations = 0, unsafe_frees = 0;
  int64_t copies_to_host = 0, bytes_to_host = 0, copies_to_device = 0, bytes_to_device = 0;
};

using Task = std::function<void()>;

// One stream. Operations run as they come, after the tasks before them. Copies between host and device are tasks: one to the
// device runs when its own stream goes on or is waited for, one to the host is read in turn, and is seen when the host waits.
struct Queue {
  int64_t given = 0;  // the number of the last operation or task
  std::deque<std::pair<int64_t, Task>> tasks;
  std::deque<std::pair<int64_t, Task>> landings;
  std::map<int64_t, int64_t> waited_for;  // by stream: up to which number
};

struct Event {
  int64_t stream, number;
  std::chrono::steady_clock::time_point when;
};

// All that there is, guarded by one lock; tasks run under it.
struct State {
  std::recursive_mutex lock;
  Counters counters;
  std::map<int64_t, Queue> queues;
  int64_t num_streams = 1;
  bool refuses_waits = false, is_logging = false;
  std::vector<std::string> log;
  std::vector<int64_t> trace;  // address, bytes and stream of each allocation; bytes < 0: freed
};
State& state();

int64_t current_stream();
void run_until(int64_t stream, int64_t number);   // the device has done it
void land_until(int64_t stream, int64_t number);  // and the host has seen it
void wait(const std::string& who, int64_t stream, int64_t number = std::numeric_limits<int64_t>::max());
int64_t next(const std::string& what);  // the number of an operation on the current stream, which has come up to it
void note(const std::string& what, int64_t stream);
void touch(const at::Tensor& tensor);  // the current stream uses its memory

c10::Allocator* allocator();
void set_limit(int64_t bytes);
void record_stream(const c10::DataPtr& memory, int64_t stream);
at::Generator cpu_generator(const at::Generator& of_device);
const at::Generator& default_generator();

// No mode, autograd or autocast sees what is called inside.
struct Below {
  at::AutoDispatchBelowAutograd autograd;
  c10::impl::ExcludeDispatchKeyGuard modes{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::AutocastCPU,
       c10::DispatchKey::AutocastPrivateUse1, c10::DispatchKey::Functionalize})};
};

}  // namespace pretend
