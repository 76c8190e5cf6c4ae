// Memory, queues, events and random numbers of the pretend accelerator.
#include "pretend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <set>

namespace pretend {

using Lock = std::lock_guard<std::recursive_mutex>;

State& state() {
  static State* all = new State;  // never destroyed: Python may let go of tensors later
  return *all;
}

static thread_local int64_t the_current_stream = 0;
int64_t current_stream() { return the_current_stream; }

void note(const std::string& what, int64_t stream) {
  if (state().is_logging) state().log.push_back(std::to_string(stream) + " " + what);
}

static void drain(std::deque<std::pair<int64_t, Task>>& tasks, int64_t number) {
  while (!tasks.empty() && tasks.front().first <= number) {
    auto task = std::move(tasks.front().second);
    tasks.pop_front();
    task();
  }
}

void run_until(int64_t stream, int64_t number) { drain(state().queues[stream].tasks, number); }

void land_until(int64_t stream, int64_t number) {
  run_until(stream, number);
  drain(state().queues[stream].landings, number);
}

void wait(const std::string& who, int64_t stream, int64_t number) {
  Lock lock(state().lock);
  TORCH_CHECK(!state().refuses_waits, "the host waits for the device (", who, ") where it may not");
  state().counters.waits++;
  note("wait: " + who, stream);
  land_until(stream, number);
}

int64_t next(const std::string& what) {
  Lock lock(state().lock);
  auto stream = current_stream();
  auto& queue = state().queues[stream];
  drain(queue.tasks, queue.given);
  state().counters.operations++;
  note(what, stream);
  return ++queue.given;
}

// ---- memory ----

struct Block {
  size_t size;
  int64_t stream;
  std::map<int64_t, int64_t> uses;  // by other streams: the number of the last operation
  std::set<int64_t> recorded;
};

static std::map<const void*, Block>& blocks() {
  static auto* all = new std::map<const void*, Block>;
  return *all;
}

void touch(const at::Tensor& tensor) {
  Lock lock(state().lock);
  auto found = blocks().find(tensor.storage().data());
  auto stream = current_stream();
  if (found != blocks().end() && found->second.stream != stream)
    found->second.uses[stream] = state().queues[stream].given;
}

void record_stream(const c10::DataPtr& memory, int64_t stream) {
  Lock lock(state().lock);
  auto found = blocks().find(memory.get());
  if (found != blocks().end()) found->second.recorded.insert(stream);
}

static c10::CachingDeviceAllocator::DeviceStats stats;
static size_t limit = size_t{1} << 40;

template <class Change>
static void count(size_t bytes, Change change) {
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  for (auto* sum : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
    change((*sum)[all], bytes);
  for (auto* number : {&stats.allocation, &stats.segment, &stats.active}) change((*number)[all], size_t{1});
}

static int64_t live() { return stats.allocated_bytes[0].current; }

void set_limit(int64_t bytes) {
  Lock lock(state().lock);
  limit = bytes;
}

static void note_memory(void* memory, int64_t bytes, int64_t stream) {
  c10::reportMemoryUsageToProfiler(memory, bytes, live(), live(), device());
  if (!state().is_logging) return;
  for (int64_t number : {reinterpret_cast<int64_t>(memory), bytes, stream}) state().trace.push_back(number);
}

static void release(void* memory) {
  if (memory == nullptr) return;
  Lock lock(state().lock);
  auto found = blocks().find(memory);
  auto& block = found->second;
  auto& waited = state().queues[block.stream].waited_for;
  for (auto [stream, number] : block.uses)  // who takes this memory next may write while that stream still reads
    if (!block.recorded.count(stream) && waited[stream] < number) state().counters.unsafe_frees++;
  count(block.size, [](auto& stat, size_t amount) { stat.decrease(amount); });
  note_memory(memory, -static_cast<int64_t>(block.size), block.stream);
  blocks().erase(found);
  std::free(memory);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, device()};
    Lock lock(state().lock);
    void* memory = live() + bytes > limit ? nullptr : std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory == nullptr) {
      stats.num_ooms++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "pretend out of memory. Tried to allocate ", bytes, " bytes; of ", limit, " bytes ",
          limit - std::min<size_t>(limit, live()), " are free.");
    }
    std::memset(memory, 0xFF, bytes);  // nan, so that memory read before it was written shows
    blocks()[memory] = {bytes, current_stream(), {}, {}};
    count(bytes, [](auto& stat, size_t amount) { stat.increase(amount); });
    note_memory(memory, bytes, current_stream());
    return {memory, memory, &release, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override { record_stream(memory, stream.id()); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(state().lock);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    count(0, [](auto& stat, size_t) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex) override {
    Lock lock(state().lock);
    count(0, [](auto& stat, size_t) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Lock lock(state().lock);
    return {limit - std::min<size_t>(limit, live()), limit};
  }
};

static Allocator the_allocator;
REGISTER_ALLOCATOR(kType, &the_allocator);
c10::Allocator* allocator() { return &the_allocator; }

// ---- pinned memory of the host ----

static std::map<const char*, size_t>& pinned() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}

static void unpin(void* memory) {
  Lock lock(state().lock);
  pinned().erase(static_cast<char*>(memory));
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(state().lock);
    void* memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::memset(memory, 0xFF, bytes);
    pinned()[static_cast<char*>(memory)] = bytes;
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// ---- streams and events ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  static const Event& event_of(void* event) { return *static_cast<Event*>(event); }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device) const override { return stream_of(the_current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device where, bool) const override { return getNewStream(where); }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    Lock lock(state().lock);
    return stream_of(state().num_streams++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = the_current_stream;
    the_current_stream = stream.id();
    return stream_of(before);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(state().lock);
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream.id(), state().queues[stream.id()].given, std::chrono::steady_clock::now()};
    note("record", stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Lock lock(state().lock);
    auto [other, number, when] = event_of(event);
    if (other == stream.id()) return;
    auto& queue = state().queues[stream.id()];
    queue.given++;
    queue.tasks.emplace_back(queue.given, [other = other, number = number] { run_until(other, number); });
    queue.landings.emplace_back(queue.given, [other = other, number = number] { land_until(other, number); });
    auto& up_to = queue.waited_for[other];
    up_to = std::max(up_to, number);
    note("waits for stream " + std::to_string(other), stream.id());
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || is_done(event_of(event).stream, event_of(event).number);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_done(stream.id(), std::numeric_limits<int64_t>::max());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait("event", event_of(event).stream, event_of(event).number);
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait("stream", stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    wait("device", 0);
    Lock lock(state().lock);
    for (int64_t stream = 0; stream < state().num_streams; stream++)
      land_until(stream, std::numeric_limits<int64_t>::max());
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event_of(second).when - event_of(first).when).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream.id());
  }

 private:
  // Asking makes the device go on, so that who asks again and again ends.
  static bool is_done(int64_t stream, int64_t number) {
    Lock lock(state().lock);
    auto& queue = state().queues[stream];
    auto done = [number](auto& tasks) { return tasks.empty() || tasks.front().first > number; };
    bool was = done(queue.tasks) && done(queue.landings);
    land_until(stream, number);
    return was;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers: those of the CPU's generator, from a state of its own ----

struct GeneratorImpl final : c10::GeneratorImpl {
  GeneratorImpl() : c10::GeneratorImpl(device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  at::Generator inner = at::detail::createCPUGenerator();

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the pretend generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the pretend generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& to) override { inner.unsafeGetGeneratorImpl()->set_state(to); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl;
    copy->inner = inner.clone();
    return copy;
  }
};

const at::Generator& default_generator() {
  static auto* generator = new at::Generator(at::make_generator<GeneratorImpl>());
  return *generator;
}

at::Generator cpu_generator(const at::Generator& of_device) {
  return static_cast<GeneratorImpl*>(of_device.unsafeGetGeneratorImpl())->inner;
}

// ---- what torch asks of an accelerator ----

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<GeneratorImpl>(); }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void* memory) const override {
    Lock lock(state().lock);
    auto address = static_cast<const char*>(memory);
    auto after = pinned().upper_bound(address);
    if (after == pinned().begin()) return false;
    auto [begin, bytes] = *std::prev(after);
    return address < begin + std::max<size_t>(bytes, 1);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator the_pinned;
    return &the_pinned;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = allocator()->allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
static const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace pretend
