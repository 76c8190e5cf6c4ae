// Every operation of the pretend accelerator: the CPU's kernel over the same memory; copies over the wall are counted.
#include "pretend.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include <set>

namespace pretend {

using Lock = std::lock_guard<std::recursive_mutex>;

static at::Tensor alias_of(const c10::Storage& storage, const at::Tensor& like) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}

static c10::Storage on_host(const c10::Storage& of_device) {  // the same memory; what grows, grows elsewhere
  c10::DataPtr memory(of_device.mutable_data(), c10::Device(c10::kCPU));
  return c10::Storage(
      c10::Storage::use_byte_size_t(), of_device.nbytes(), std::move(memory), c10::GetAllocator(c10::kCPU), true);
}

static at::Tensor seen_by_cpu(const at::Tensor& tensor) { return alias_of(on_host(tensor.storage()), tensor); }

static at::Tensor empty_like(const at::Tensor& tensor, at::IntArrayRef strides) {
  return at::detail::empty_strided_generic(
      tensor.sizes(), strides, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.scalar_type());
}

// ---- copies ----

static void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto stream = current_stream();
  bool is_pinned = from.is_pinned();
  bool is_late = non_blocking && is_pinned;
  auto source = is_late ? from : from.clone();  // pageable memory is read at once, into a buffer of the driver's
  auto number = next("copy to device, " + std::to_string(to.nbytes()) + " bytes");
  touch(to);
  Lock lock(state().lock);
  state().counters.copies_to_device++;
  state().counters.bytes_to_device += to.nbytes();
  state().queues[stream].tasks.emplace_back(number, [=] {
    Below below;
    if (is_late) land_until(stream, number - 1);  // what this stream wrote to the source before
    seen_by_cpu(to).copy_(source);
  });
  if (!non_blocking) wait("a copy to the device", stream);
}

static void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto stream = current_stream();
  auto number = next("copy to host, " + std::to_string(from.nbytes()) + " bytes");
  touch(from);
  auto read = seen_by_cpu(from).clone();
  Lock lock(state().lock);
  state().counters.copies_to_host++;
  state().counters.bytes_to_host += from.nbytes();
  state().queues[stream].landings.emplace_back(number, [=] {
    Below below;
    to.copy_(read);
  });
  if (!non_blocking || !to.is_pinned()) wait("a copy to the host", stream);
}

static at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Below below;
  auto source = from.sizes() == to.sizes() ? from : from.expand_as(to);
  if (from.numel() == 0 || to.numel() == 0) return to;
  if (from.is_cpu()) {
    to_device(source, to, non_blocking);
  } else if (to.is_cpu()) {
    to_host(source, to, non_blocking);
  } else {
    next("copy_");
    touch(from);
    touch(to);
    seen_by_cpu(to).copy_(seen_by_cpu(source));
  }
  return to;
}

// ---- memory and shapes ----

static void grow(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) return;
  auto memory = allocator()->allocate(bytes);
  if (storage->nbytes()) std::memcpy(memory.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr(std::move(memory));
  storage->set_nbytes(bytes);
}

static void reshape(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  grow(tensor, at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(), offset));
}

static at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

static const at::Tensor& resize_(
    const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto meta = at::empty(sizes, at::TensorOptions(at::kMeta).memory_format(format));
  if (tensor.sizes() != sizes) reshape(tensor, sizes, meta.strides(), tensor.storage_offset());
  return tensor;
}

static at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  reshape(tensor, sizes, strides, offset);
  return tensor;
}

static at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  auto size = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(storage), 0, {size}, {1});
}

static at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static at::Tensor& set_empty(at::Tensor& tensor) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, allocator(), true);
  return set_storage(tensor, nothing, 0, {0}, {1});
}

static at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

static at::Scalar item(const at::Tensor& tensor) {
  Below below;
  next("item");
  wait("item", current_stream());
  return seen_by_cpu(tensor).item();
}

static void record(at::Tensor& tensor, at::Stream stream) { record_stream(tensor.storage().data_ptr(), stream.id()); }

static int64_t no_fused_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // the mathematical form
}

// ---- all the rest ----

static const std::set<std::string> takes_host_indices = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
static const std::set<std::string> takes_host_lengths = {
    "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward", "aten::_ctc_loss", "aten::_ctc_loss_backward"};

// The arguments of one call as the CPU sees them, and its results as tensors of the device.
struct Crossing {
  const c10::FunctionSchema& schema;
  std::map<c10::StorageImpl*, c10::Storage> host_of, device_of;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // of the device, as the CPU saw it

  at::Tensor in(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cpu()) {
      bool is_index = takes_host_indices.count(schema.name());
      bool is_allowed = !is_written && (tensor.dim() == 0 || is_index || takes_host_lengths.count(schema.name()));
      TORCH_CHECK(
          is_allowed, "Expected all tensors to be on the same device, but ", schema.name(), " got one on the CPU, ",
          tensor.sizes(), ", among those on ", device());
      if (is_index && tensor.dim()) state().counters.copies_to_device++;
      return tensor;
    }
    TORCH_CHECK(tensor.layout() == at::kStrided, schema.name(), ": the pretend accelerator has no ", tensor.layout());
    touch(tensor);
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto [found, is_new] = host_of.try_emplace(key);
    if (is_new) {
      found->second = on_host(tensor.storage());
      device_of[found->second.unsafeGetStorageImpl()] = tensor.storage();
    }
    auto alias = alias_of(found->second, tensor);
    if (is_written) written.emplace_back(tensor, alias);
    return alias;
  }

  c10::IValue in(const c10::IValue& value, bool is_written) {
    if (value.isTensor()) return in(value.toTensor(), is_written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(in(tensor, is_written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::make_optional(in(*tensor, is_written)) : std::nullopt);
      return list;
    }
    if (value.isGenerator() && value.toGenerator().device().type() == kType) return cpu_generator(value.toGenerator());
    if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::kCPU);
    return value;
  }

  at::Tensor out(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    TORCH_CHECK(tensor.layout() == at::kStrided, schema.name(), ": the pretend accelerator has no ", tensor.layout());
    auto view = device_of.find(tensor.storage().unsafeGetStorageImpl());
    if (view != device_of.end()) {
      auto result = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(view->second), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
      reshape(result, tensor.sizes(), tensor.strides(), tensor.storage_offset());
      return result;
    }
    auto source = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
    auto result = empty_like(source, source.strides());
    if (source.nbytes()) std::memcpy(result.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
    return result;
  }

  c10::IValue out(const c10::IValue& value) {
    if (value.isTensor()) return out(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(out(tensor));
    return list;
  }

  // Outputs that the CPU's kernel has resized are resized on the device.
  void settle() {
    for (auto& [tensor, alias] : written) {
      if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides())
        reshape(tensor, alias.sizes(), alias.strides(), alias.storage_offset());
      if (alias.nbytes() && alias.storage().data() != tensor.storage().data())
        std::memcpy(tensor.storage().mutable_data(), alias.storage().data(), alias.storage().nbytes());
    }
  }
};

// What a device cannot know before it has computed it, the host has to wait for.
static bool is_awaited(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.hasTag(at::Tag::data_dependent_output)) return true;
  if (op.schema().name() == "aten::index") return false;  // of a mask torch has asked for nonzero before
  if (takes_host_indices.count(op.schema().name())) {
    for (const std::optional<at::Tensor> index : arguments[1].toOptionalTensorVector())
      if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
    return false;
  }
  if (op.schema().name() == "aten::repeat_interleave") return arguments.back().isNone();
  return op.hasTag(at::Tag::dynamic_output_shape);
}

// Random operations draw from the device's generator.
struct OwnDraws {
  explicit OwnDraws(bool is_random) : is_random(is_random) {
    if (is_random) swap();
  }
  ~OwnDraws() {
    if (is_random) swap();
  }
  static void swap() {
    auto host = at::detail::getDefaultCPUGenerator();
    auto own = cpu_generator(default_generator());
    auto state = host.get_state();
    host.set_state(own.get_state());
    own.set_state(state);
  }
  bool is_random;
};

static bool has_generator(c10::ArrayRef<c10::IValue> arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& value) { return value.isGenerator(); });
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Below below;
  const auto& schema = op.schema();
  next(schema.name());
  auto num_arguments = schema.arguments().size();
  auto arguments = torch::jit::last(*stack, num_arguments).vec();
  if (is_awaited(op, arguments)) wait(schema.name(), current_stream());
  Crossing crossing{schema};
  torch::jit::drop(*stack, num_arguments);
  for (size_t i = 0; i < num_arguments; i++) {
    auto* alias = schema.arguments()[i].alias_info();
    stack->push_back(crossing.in(arguments[i], alias != nullptr && alias->isWrite()));
  }
  {
    OwnDraws draws(op.hasTag(at::Tag::nondeterministic_seeded) && !has_generator(arguments));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  crossing.settle();
  auto num_returns = schema.returns().size();
  auto returned = torch::jit::last(*stack, num_returns).vec();
  torch::jit::drop(*stack, num_returns);
  for (size_t i = 0; i < num_returns; i++) {
    auto* alias = schema.returns()[i].alias_info();
    auto given = num_arguments;
    for (size_t j = 0; alias != nullptr && alias->isWrite() && j < num_arguments; j++)
      if (auto* other = schema.arguments()[j].alias_info(); other != nullptr && *other == *alias) given = j;
    stack->push_back(given < num_arguments ? arguments[given] : crossing.out(returned[i]));
  }
}

#define BY_FALLBACK torch::CppFunction::makeFromBoxedFunction<&fallback>()

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(BY_FALLBACK); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record);
  m.impl("_fused_sdp_choice", no_fused_attention);
  // for these torch has a form that asks which device it is on
  m.impl("convolution", BY_FALLBACK);
  m.impl("convolution_backward", BY_FALLBACK);
}

// ---- what tests ask: torch.ops.pretend ----

static c10::Dict<std::string, int64_t> counters() {
  Lock lock(state().lock);
  const auto& now = state().counters;
  c10::Dict<std::string, int64_t> told;
  told.insert("waits", now.waits);
  told.insert("operations", now.operations);
  told.insert("unsafe_frees", now.unsafe_frees);
  told.insert("copies_to_host", now.copies_to_host);
  told.insert("bytes_to_host", now.bytes_to_host);
  told.insert("copies_to_device", now.copies_to_device);
  told.insert("bytes_to_device", now.bytes_to_device);
  return told;
}

static void start_log() {
  Lock lock(state().lock);
  state().log.clear();
  state().trace.clear();
  state().is_logging = true;
}

static std::vector<std::string> take_log() {
  Lock lock(state().lock);
  state().is_logging = false;
  return state().log;
}

static at::Tensor take_trace() {
  Lock lock(state().lock);
  return at::tensor(state().trace, at::kLong).view({-1, 3});
}

TORCH_LIBRARY(pretend, m) {
  m.def("counters() -> Dict(str, int)", counters);
  m.def("set_limit(int bytes) -> ()", set_limit);
  m.def("refuse_waits(bool refuses) -> ()", [](bool refuses) { state().refuses_waits = refuses; });
  m.def("start_log() -> ()", start_log);
  m.def("take_log() -> str[]", take_log);
  m.def("take_trace() -> Tensor", take_trace);
  m.def("random_state() -> Tensor", [] { return default_generator().get_state(); });
  m.def("set_random_state(Tensor state) -> ()", [](const at::Tensor& to) {
    const_cast<at::Generator&>(default_generator()).set_state(to);
  });
  m.def("set_seed(int seed) -> ()", [](int64_t seed) {
    const_cast<at::Generator&>(default_generator()).set_current_seed(static_cast<uint64_t>(seed));
  });
}

}  // namespace pretend
