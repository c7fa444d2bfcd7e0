// "simdev": four PrivateUse1 devices for tests that live in host memory.
//
// What it is for: proving statements about device memory (bytes held, peak,
// out of memory at a limit, bytes moved between host and device) on a machine
// without an accelerator. It says nothing about speed or about stream races.
//
// How it computes: every kernel runs the CPU's own kernel on CPU tensors that
// alias the device memory (same storage bytes, sizes, strides and offset), so a
// result is bitwise the CPU's, no bytes are copied to compute it, and in-place
// operations and views act on the device memory itself. What a kernel returns in
// fresh memory is taken over by the device's allocator and counted from then on.
// Temporaries inside one CPU kernel are host memory and are not counted.
//
// Several devices: each index has its own counters, limit and current stream. An
// operator refuses operands that lie on different indices, and copies alone cross.
// That is stricter than CUDA for _foreach_ operators, which there go one by one
// through lists that lie on several devices.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

constexpr c10::DeviceType kSimdev = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;

c10::Device device_at(c10::DeviceIndex index) {
  return c10::Device(kSimdev, index);
}

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < kDevices,
      "simdev has ",
      int(kDevices),
      " devices, not index ",
      int(index));
}

thread_local c10::DeviceIndex current_device = 0;

// The index asked for; where none is (-1), the current one.
c10::DeviceIndex index_or_current(c10::DeviceIndex index) {
  if (index == -1) {
    return current_device;
  }
  check_index(index);
  return index;
}

// ---------------------------------------------------------------------------
// Memory: counters, allocator, pinned allocator
// ---------------------------------------------------------------------------

struct Counters {
  int64_t allocated = 0; // bytes held now
  int64_t peak = 0; // the most bytes held since the last reset
  int64_t allocations = 0; // how many times bytes were obtained
  int64_t frees = 0;
  int64_t total = 0; // bytes ever obtained
  int64_t out_of_memory = 0; // how many requests the limit refused
  int64_t limit = -1; // negative: none
};

// One lock for the counters: the limit has to be checked and the bytes added in
// one step, because backward runs in a thread of its own.
std::mutex counters_mutex;
std::array<Counters, kDevices> counters_of;

std::atomic<int64_t> host_to_device{0};
std::atomic<int64_t> device_to_host{0};
std::atomic<int64_t> peer[kDevices][kDevices]; // bytes copied, by source and target
std::atomic<int64_t> fallbacks{0};

void reserve(size_t nbytes, c10::DeviceIndex index) {
  if (nbytes == 0) {
    return;
  }
  const auto asked = static_cast<int64_t>(nbytes);
  std::lock_guard<std::mutex> lock(counters_mutex);
  auto& counters = counters_of[index];
  if (counters.limit >= 0 && counters.allocated + asked > counters.limit) {
    counters.out_of_memory += 1;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "simdev out of memory at index ",
        int(index),
        ": asked for ",
        asked,
        " bytes, in use ",
        counters.allocated,
        " bytes, limit ",
        counters.limit,
        " bytes");
  }
  counters.allocated += asked;
  counters.total += asked;
  counters.allocations += 1;
  counters.peak = std::max(counters.peak, counters.allocated);
}

void release(size_t nbytes, c10::DeviceIndex index) {
  if (nbytes == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(counters_mutex);
  counters_of[index].allocated -= static_cast<int64_t>(nbytes);
  counters_of[index].frees += 1;
}

// One piece of device memory: the host memory behind it and what it was counted as.
struct Block {
  c10::DataPtr host;
  size_t nbytes;
  c10::DeviceIndex index;
};

void delete_block(void* context) {
  auto* block = static_cast<Block*>(context);
  release(block->nbytes, block->index);
  delete block;
}

// Makes device memory out of host memory that something else allocated, counting
// it. Refused at the limit, and then `host` is simply freed.
c10::DataPtr adopt(
    c10::DataPtr host,
    size_t nbytes,
    c10::DeviceIndex index) {
  if (!host) {
    nbytes = 0; // zeros that autograd passes without memory behind them
  }
  reserve(nbytes, index);
  auto* block = new Block{std::move(host), nbytes, index};
  return {block->host.get(), block, &delete_block, device_at(index)};
}

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t nbytes) {
  reserve(nbytes, index);
  try {
    // The CPU's allocator, hence its alignment: kernels choose vectorized
    // paths by alignment, and results have to be bitwise the CPU's.
    auto* block =
        new Block{c10::GetCPUAllocator()->allocate(nbytes), nbytes, index};
    return {block->host.get(), block, &delete_block, device_at(index)};
  } catch (...) {
    release(nbytes, index);
    throw;
  }
}

struct SimdevAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    return allocate_on(current_device, nbytes);
  }

  // No raw deleter: the context is a Block, not the data pointer.
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  // What torch.accelerator.memory_*() reads.
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex index) override {
    const auto& counters = counters_of[index_or_current(index)];
    std::lock_guard<std::mutex> lock(counters_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto aggregate =
        static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    c10::CachingAllocator::Stat bytes;
    bytes.current = counters.allocated;
    bytes.peak = counters.peak;
    bytes.allocated = counters.total;
    bytes.freed = counters.total - counters.allocated;
    // Nothing is cached, so every notion of "held" is the same number.
    stats.allocated_bytes[aggregate] = bytes;
    stats.reserved_bytes[aggregate] = bytes;
    stats.active_bytes[aggregate] = bytes;
    stats.requested_bytes[aggregate] = bytes;
    stats.allocation[aggregate].current = counters.allocations - counters.frees;
    stats.allocation[aggregate].allocated = counters.allocations;
    stats.allocation[aggregate].freed = counters.frees;
    stats.num_ooms = counters.out_of_memory;
    stats.num_device_alloc = counters.allocations;
    stats.num_device_free = counters.frees;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    auto& counters = counters_of[index_or_current(index)];
    std::lock_guard<std::mutex> lock(counters_mutex);
    counters.peak = counters.allocated;
  }

  // (free, total): the limit where there is one, else the host's memory.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const auto& counters = counters_of[index_or_current(index)];
    std::lock_guard<std::mutex> lock(counters_mutex);
    int64_t total = counters.limit;
    if (total < 0) {
      total = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) *
          static_cast<int64_t>(sysconf(_SC_PAGESIZE));
    }
    const int64_t available = std::max<int64_t>(0, total - counters.allocated);
    return {static_cast<size_t>(available), static_cast<size_t>(total)};
  }
};

// Leaked on purpose: tensors may outlive the module's statics at exit.
SimdevAllocator* device_allocator() {
  static auto* allocator = new SimdevAllocator();
  return allocator;
}

// Ordinary host memory that remembers its addresses, so that is_pinned() can
// answer and tests can see that pinned buffers were asked for.
struct PinnedMemory {
  std::mutex mutex;
  std::map<const char*, size_t> ranges; // by first byte
  int64_t allocated = 0;
};

PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory();
  return *memory;
}

void delete_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& memory = pinned_memory();
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.ranges.erase(static_cast<const char*>(block->host.get()));
    memory.allocated -= static_cast<int64_t>(block->nbytes);
  }
  delete block;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto* block =
        new Block{c10::GetCPUAllocator()->allocate(nbytes), nbytes, -1};
    auto& memory = pinned_memory();
    {
      std::lock_guard<std::mutex> lock(memory.mutex);
      if (nbytes > 0) {
        memory.ranges[static_cast<const char*>(block->host.get())] = nbytes;
      }
      memory.allocated += static_cast<int64_t>(nbytes);
    }
    return {
        block->host.get(), block, &delete_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

bool is_pinned_pointer(const void* data) {
  auto& memory = pinned_memory();
  const auto* address = static_cast<const char*>(data);
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto after = memory.ranges.upper_bound(address);
  if (after == memory.ranges.begin()) {
    return false;
  }
  --after;
  return address < after->first + after->second;
}

// ---------------------------------------------------------------------------
// Device guard: streams that are only names, events that are times
// ---------------------------------------------------------------------------

struct Event {
  std::chrono::steady_clock::time_point at;
};

// Work is done when the call that asks for it returns, so every stream is always
// idle. Streams still have identities: code that mixes them up can be caught.
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::atomic<c10::StreamId> last_stream{0};

c10::Stream stream_of(c10::StreamId id, c10::DeviceIndex index) {
  return c10::Stream(
      c10::Stream::UNSAFE, device_at(index_or_current(index)), id);
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  return std::exchange(current_device, index_or_current(index));
}

struct SimdevGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSimdev;

  SimdevGuard() = default;
  explicit SimdevGuard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return kSimdev;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_at(exchange_device(device.index()));
  }
  c10::Device getDevice() const override {
    return device_at(current_device);
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = index_or_current(device.index());
    return stream_of(current_streams[index], index);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(0, device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(++last_stream, device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(++last_stream, device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto index = stream.device_index();
    return stream_of(std::exchange(current_streams[index], stream.id()), index);
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(
      void** event,
      const c10::Stream&,
      const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->at = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex)
      const override {
    TORCH_CHECK(first && second, "simdev: both events must be recorded");
    const auto passed =
        static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};

// ---------------------------------------------------------------------------
// Hooks
// ---------------------------------------------------------------------------

struct SimdevHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    exchange_device(index);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }

  bool isPinnedPtr(const void* data) const override {
    return is_pinned_pointer(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedAllocator();
    return allocator;
  }

  // The device draws from the CPU's generator: a program that is seeded the same
  // draws the same numbers on simdev as on the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }

  // UntypedStorage.resize_(): the new bytes are held together with the old ones
  // until they are copied, as on a real device.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes)
      const override {
    const size_t old = storage.nbytes();
    if (old == nbytes) {
      return;
    }
    auto data = allocate_on(storage.device().index(), nbytes);
    if (const size_t kept = std::min(old, nbytes)) {
      std::memcpy(data.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(nbytes);
  }
};

// ---------------------------------------------------------------------------
// Running CPU kernels on device memory
// ---------------------------------------------------------------------------

at::Tensor tensor_over(
    c10::Storage storage,
    c10::DispatchKey key,
    const at::Tensor& like) {
  c10::DispatchKeySet keys(key);
  if (like._is_zerotensor()) {
    keys = keys.add(c10::DispatchKey::ZeroTensor);
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), keys, like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) {
    impl->_set_conj(true);
  }
  if (like.is_neg()) {
    impl->_set_neg(true);
  }
  return tensor;
}

void delete_storage_reference(void* context) {
  delete static_cast<c10::Storage*>(context);
}

// One call of CPU code on device tensors: host(t) for every argument, then the
// code, then commit(), then device(t) for every result.
//
// Aliasing is kept on both sides because storages are mapped one to one: two
// arguments that share memory still do, and a result that is a view of an
// argument becomes a view of the device tensor.
class HostCall {
 public:
  explicit HostCall(std::string name) : name_(std::move(name)) {}

  // The index that results are made on where no operand says which.
  void ask_for(c10::DeviceIndex index) {
    asked_ = index_or_current(index);
  }

  // The CPU tensor over `tensor`'s memory. A CPU tensor is passed through; as on
  // a real device it may be mixed with device tensors only when it is a single
  // number, unless `cpu_allowed`.
  at::Tensor host(const at::Tensor& tensor, bool cpu_allowed = false) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!tensor.is_privateuseone()) {
      passed_through_.insert(tensor.unsafeGetTensorImpl());
      if (tensor.is_cpu() && tensor.dim() > 0 && !cpu_allowed) {
        stranger_ = tensor.device();
      }
      return tensor;
    }
    if (!home_.has_value()) {
      home_ = tensor.device();
    } else if (*home_ != tensor.device()) {
      stranger_ = tensor.device();
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == at::kStrided,
        name_,
        ": simdev holds strided tensors only, not ",
        tensor.layout());
    for (const auto& [device, host] : tensors_) {
      if (device.is_same(tensor)) {
        return host;
      }
    }
    check_memory(tensor);
    auto host =
        tensor_over(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    tensors_.emplace_back(tensor, host);
    return host;
  }

  std::optional<at::Tensor> host(const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() ? std::optional<at::Tensor>(host(*tensor))
                              : std::nullopt;
  }

  // To be called when all arguments were given.
  void check_devices() const {
    TORCH_CHECK(
        !(home_.has_value() && stranger_.has_value()),
        name_,
        ": Expected all tensors to be on the same device, but found at least two "
        "devices, ",
        *home_,
        " and ",
        *stranger_,
        "!");
  }

  // Brings back what the CPU code did to its arguments besides writing to them:
  // an out= argument may have been resized, which gave its alias new memory.
  void commit() {
    for (auto& [device, host] : storages_) {
      if (host.data() != device.data() || host.nbytes() != device.nbytes()) {
        const size_t nbytes = host.nbytes();
        auto data = adopt(
            host.set_data_ptr(c10::DataPtr()), nbytes, device.device().index());
        device.set_data_ptr_noswap(std::move(data));
        device.set_nbytes(nbytes);
      }
    }
    for (auto& [device, host] : tensors_) {
      if (device.sizes() != host.sizes() || device.strides() != host.strides() ||
          device.storage_offset() != host.storage_offset()) {
        device.unsafeGetTensorImpl()->set_sizes_and_strides(
            host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }

  // The device tensor for a result: an argument itself, a view of an argument's
  // memory, or a new tensor. By value, so that memory which nobody else refers
  // to can be taken over instead of copied.
  at::Tensor device(at::Tensor result) {
    if (!result.defined() || !result.is_cpu() ||
        passed_through_.count(result.unsafeGetTensorImpl())) {
      return result;
    }
    for (const auto& [device, host] : tensors_) {
      if (host.is_same(result)) {
        return device;
      }
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == at::kStrided && result.has_storage(),
        name_,
        ": simdev holds strided tensors only, not ",
        result.layout());
    return tensor_over(
        device_storage(result), c10::DispatchKey::PrivateUse1, result);
  }

 private:
  // Freed memory (storage resized to 0) is a null pointer: say so, where a CPU
  // kernel would read it and end the process.
  void check_memory(const at::Tensor& tensor) const {
    if (tensor.numel() == 0) {
      return;
    }
    const auto needed = at::detail::computeStorageNbytes(
        tensor.sizes(),
        tensor.strides(),
        tensor.itemsize(),
        tensor.storage_offset());
    TORCH_CHECK(
        needed <= tensor.storage().nbytes(),
        name_,
        ": a simdev tensor of size ",
        tensor.sizes(),
        " needs ",
        needed,
        " bytes of storage, which holds ",
        tensor.storage().nbytes(),
        " (was it freed?)");
  }

  c10::Storage host_storage(const c10::Storage& device) {
    for (const auto& [known, host] : storages_) {
      if (known.is_alias_of(device)) {
        return host;
      }
    }
    // The alias keeps the device memory alive, should CPU code keep the alias.
    c10::DataPtr data(
        device.mutable_data(),
        new c10::Storage(device),
        &delete_storage_reference,
        c10::Device(c10::kCPU));
    c10::Storage host(
        c10::Storage::use_byte_size_t(),
        device.nbytes(),
        std::move(data),
        c10::GetCPUAllocator(),
        /*resizable=*/true);
    storages_.emplace_back(device, host);
    return host;
  }

  c10::Storage device_storage(const at::Tensor& result) {
    c10::Storage host = result.storage();
    for (const auto& [device, known] : storages_) {
      if (known.is_alias_of(host)) {
        return device;
      }
    }
    const size_t nbytes = host.nbytes();
    // Two references to the storage: the result's and this function's.
    const bool sole_owner = result.use_count() == 1 && host.use_count() == 2;
    const auto index = home_.has_value() ? home_->index() : asked_;
    c10::DataPtr data;
    if (sole_owner) {
      data = adopt(host.set_data_ptr(c10::DataPtr()), nbytes, index);
    } else {
      data = allocate_on(index, nbytes);
      if (nbytes > 0) {
        std::memcpy(data.get(), host.data(), nbytes);
      }
    }
    c10::Storage device(
        c10::Storage::use_byte_size_t(),
        nbytes,
        std::move(data),
        device_allocator(),
        /*resizable=*/true);
    // Several results may share one storage.
    storages_.emplace_back(device, host);
    return device;
  }

  std::string name_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_; // device, host
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_; // device, host
  std::unordered_set<c10::TensorImpl*> passed_through_;
  c10::DeviceIndex asked_ = current_device;
  std::optional<c10::Device> home_; // where the first operand lies
  std::optional<c10::Device> stranger_; // where another one lies
};

// ---------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------

// Any operator, by the CPU's kernel for it.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  fallbacks += 1;
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
      "simdev runs CPU kernels, and the CPU has none for ",
      schema.operator_name());
  HostCall call(schema.name());

  const size_t arguments = schema.arguments().size();
  const size_t first = stack->size() - arguments;
  for (size_t i = 0; i < arguments; ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      // Lengths for packing stay on the CPU on every device.
      const bool cpu_allowed = schema.arguments()[i].name() == "lengths";
      value = call.host(value.toTensor(), cpu_allowed);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(call.host(tensor));
      }
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      // Indices. CPU indices into a device tensor are allowed on real devices,
      // which move them; the move is traffic that the program caused.
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor :
           value.toOptionalTensorVector()) {
        if (tensor.has_value() && tensor->defined() && tensor->is_cpu()) {
          host_to_device += static_cast<int64_t>(tensor->nbytes());
        }
        list.push_back(
            tensor.has_value()
                ? std::optional<at::Tensor>(call.host(*tensor, true))
                : std::nullopt);
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      // Factories reach this device by the device they are asked for.
      if (value.toDevice().type() == kSimdev) {
        call.ask_for(value.toDevice().index());
      }
      value = c10::Device(c10::kCPU);
    }
  }
  call.check_devices();

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  call.commit();
  const size_t results = schema.returns().size();
  const size_t first_result = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    c10::IValue& value = (*stack)[first_result + i];
    if (value.isTensor()) {
      value = call.device(std::move(value).toTensor());
    } else if (value.isTensorList()) {
      auto tensors = std::move(value).toTensorVector();
      c10::List<at::Tensor> list;
      for (at::Tensor& tensor : tensors) {
        list.push_back(call.device(std::move(tensor)));
      }
      value = std::move(list);
    }
  }
}

// Factories.

// The device that a factory allocates on, which is current for so long.
c10::DeviceGuard factory_device(
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !layout.has_value() || *layout == at::kStrided,
      "simdev holds strided tensors only");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  return c10::DeviceGuard(
      device_at(index_or_current(device.has_value() ? device->index() : -1)));
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  const auto guard = factory_device(layout, device, pin_memory);
  return at::detail::empty_generic(
      size,
      device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      memory_format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  const auto guard = factory_device(layout, device, pin_memory);
  return at::detail::empty_strided_generic(
      size,
      stride,
      device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// Copies: the only place, with item() and CPU indices, where traffic is counted.

at::Tensor copy_from(
    const at::Tensor& from,
    const at::Tensor& to,
    bool /*non_blocking*/) {
  HostCall call("copy_");
  auto source = call.host(from, true);
  auto target = call.host(to, true);
  // As CUDA does it: broadcast before the transfer; change the dtype on the host
  // on the way in and after the transfer on the way out, and between devices on
  // the source.
  if (from.is_cpu() && to.is_privateuseone()) {
    host_to_device += static_cast<int64_t>(to.numel() * to.itemsize());
  } else if (from.is_privateuseone() && to.is_cpu()) {
    device_to_host += static_cast<int64_t>(to.numel() * from.itemsize());
  } else if (from.device() != to.device()) {
    peer[from.get_device()][to.get_device()] +=
        static_cast<int64_t>(to.numel() * to.itemsize());
  }
  target.copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  HostCall call("item");
  device_to_host += static_cast<int64_t>(tensor.itemsize());
  return call.host(tensor).item();
}

// Views and storage: metadata only, by torch's own code for it.

const at::Tensor& resize_(
    const at::Tensor& tensor,
    at::IntArrayRef size,
    std::optional<at::MemoryFormat> memory_format) {
  // Grows the storage through the storage's own allocator, which allocates on the
  // current device.
  // Torch's code sets the size first; where the bytes are refused, the tensor must
  // not be left larger than its storage.
  const c10::DeviceGuard guard(tensor.device());
  const auto old_size = tensor.sizes().vec();
  const auto old_stride = tensor.strides().vec();
  try {
    return at::native::resize_(tensor, size, memory_format);
  } catch (...) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(old_size, old_stride);
    throw;
  }
}

at::Tensor as_strided(
    const at::Tensor& tensor,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

at::Tensor view(const at::Tensor& tensor, at::IntArrayRef size) {
  return at::native::view(tensor, size);
}

at::Tensor reshape_alias(
    const at::Tensor& tensor,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

at::Tensor unfold(
    const at::Tensor& tensor,
    int64_t dimension,
    int64_t size,
    int64_t step) {
  return at::native::unfold(tensor, dimension, size, step);
}

at::Tensor& set_storage_offset(
    at::Tensor& tensor,
    at::Storage source,
    int64_t offset,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(
      tensor, std::move(source), offset, size, stride);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) {
  return at::native::set_(tensor, std::move(source));
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return tensor.set_(std::move(storage), 0, {0}, {});
}

void record_stream(at::Tensor&, c10::Stream) {}

// Convolution: torch hands devices it does not know to these two.

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  HostCall call("convolution");
  auto host_input = call.host(input);
  auto host_weight = call.host(weight);
  auto host_bias = call.host(bias);
  call.check_devices();
  return call.device(at::convolution(
      host_input,
      host_weight,
      host_bias,
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> output_mask) {
  HostCall call("convolution_backward");
  auto host_grad = call.host(grad_output);
  auto host_input = call.host(input);
  auto host_weight = call.host(weight);
  call.check_devices();
  const int64_t channels =
      transposed ? weight.size(1) * groups : weight.size(0);
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      host_grad,
      host_input,
      host_weight,
      at::IntArrayRef(channels),
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups,
      output_mask);
  return {
      call.device(std::move(grad_input)),
      call.device(std::move(grad_weight)),
      call.device(std::move(grad_bias))};
}

// Dropout. On a device torch takes the fused operator, which keeps a mask of
// bytes; the numbers are those of the CPU's unfused dropout, which draws and
// scales a noise tensor: x * (bernoulli(1 - p) / (1 - p)).

std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input,
    double p,
    std::optional<bool> train) {
  HostCall call("native_dropout");
  auto host_input = call.host(input);
  const bool training = train.value_or(true);
  if (!training || p == 0 || input.numel() == 0) {
    auto mask = at::ones_like(host_input, at::kBool, at::MemoryFormat::Contiguous);
    return {call.device(host_input.clone()), call.device(std::move(mask))};
  }
  if (p == 1) {
    auto mask = at::zeros_like(host_input, at::kBool, at::MemoryFormat::Contiguous);
    return {
        call.device(at::zeros_like(host_input)), call.device(std::move(mask))};
  }
  auto noise = at::empty_like(host_input).bernoulli_(1 - p);
  auto mask = noise.to(at::kBool);
  noise.div_(1 - p);
  return {
      call.device(host_input.mul(noise)), call.device(std::move(mask))};
}

at::Tensor native_dropout_backward(
    const at::Tensor& grad_output,
    const at::Tensor& mask,
    double scale) {
  HostCall call("native_dropout_backward");
  auto grad = call.host(grad_output);
  auto noise = call.host(mask).to(grad.scalar_type());
  call.check_devices();
  if (scale != 0) { // 0 for p == 1, whose mask is all zero anyway
    noise.div_(1 / scale); // scale is 1 / (1 - p): the division of the forward
  }
  return call.device(grad.mul(noise));
}

// Histogram of integers: devices have it (mixture-of-experts models count tokens
// per expert by it when they are not on the CPU), the CPU does not.

at::Tensor histc(
    const at::Tensor& tensor,
    int64_t bins,
    const at::Scalar& min,
    const at::Scalar& max) {
  HostCall call("histc");
  auto host = call.host(tensor);
  if (!at::isIntegralType(host.scalar_type(), /*includeBool=*/false)) {
    return call.device(at::histc(host, bins, min, max));
  }
  return call.device(
      at::histc(host.to(at::kDouble), bins, min, max).to(host.scalar_type()));
}

// Attention. What the CPU would choose is chosen: where that is its fused kernel,
// torch's entry for fused kernels of unknown devices leads to it below.

int64_t fused_attention_choice(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  // The fused kernel gives no gradient to the mask.
  if (mask.has_value() && mask->defined() && mask->requires_grad()) {
    return static_cast<int64_t>(sdp::SDPBackend::math);
  }
  HostCall call("_fused_sdp_choice");
  auto host_query = call.host(query);
  auto host_key = call.host(key);
  auto host_value = call.host(value);
  auto host_mask = call.host(mask);
  call.check_devices();
  const auto choice = at::_fused_sdp_choice(
      host_query,
      host_key,
      host_value,
      host_mask,
      dropout_p,
      is_causal,
      scale,
      enable_gqa);
  return choice == static_cast<int64_t>(sdp::SDPBackend::flash_attention)
      ? static_cast<int64_t>(sdp::SDPBackend::overrideable)
      : choice;
}

std::tuple<
    at::Tensor,
    at::Tensor,
    at::Tensor,
    at::Tensor,
    c10::SymInt,
    c10::SymInt,
    at::Tensor,
    at::Tensor,
    at::Tensor>
fused_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout_p,
    bool is_causal,
    bool /*return_debug_mask*/,
    std::optional<double> scale) {
  HostCall call("scaled_dot_product_attention");
  auto host_query = call.host(query);
  auto host_key = call.host(key);
  auto host_value = call.host(value);
  auto host_mask = call.host(mask);
  call.check_devices();
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      host_query, host_key, host_value, dropout_p, is_causal, host_mask, scale);
  // Undefined where the CPU's kernel has nothing: autograd saves them as such.
  return {
      call.device(std::move(output)),
      call.device(std::move(logsumexp)),
      at::Tensor(),
      at::Tensor(),
      query.sym_size(2),
      key.sym_size(2),
      at::Tensor(),
      at::Tensor(),
      at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>
fused_attention_backward(
    const at::Tensor& grad_output,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    std::array<bool, 4> /*grad_input_mask*/,
    const at::Tensor& output,
    const at::Tensor& logsumexp,
    const at::Tensor& /*cum_seq_q*/,
    const at::Tensor& /*cum_seq_k*/,
    c10::SymInt /*max_q*/,
    c10::SymInt /*max_k*/,
    double dropout_p,
    bool is_causal,
    const at::Tensor& /*philox_seed*/,
    const at::Tensor& /*philox_offset*/,
    std::optional<double> scale) {
  HostCall call("scaled_dot_product_attention_backward");
  auto host_grad = call.host(grad_output);
  auto host_query = call.host(query);
  auto host_key = call.host(key);
  auto host_value = call.host(value);
  auto host_output = call.host(output);
  auto host_logsumexp = call.host(logsumexp);
  std::optional<at::Tensor> host_mask;
  if (mask.defined()) {
    host_mask = call.host(mask);
  }
  call.check_devices();
  auto [grad_query, grad_key, grad_value] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          host_grad,
          host_query,
          host_key,
          host_value,
          host_output,
          host_logsumexp,
          dropout_p,
          is_causal,
          host_mask,
          scale);
  return {
      call.device(std::move(grad_query)),
      call.device(std::move(grad_key)),
      call.device(std::move(grad_value)),
      at::Tensor()};
}

} // namespace

// ---------------------------------------------------------------------------
// Registration
// ---------------------------------------------------------------------------

namespace {

struct RegisterAllocator {
  RegisterAllocator() {
    c10::SetAllocator(kSimdev, device_allocator());
  }
} register_allocator;

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimdevGuard);

} // namespace

namespace at::native {
// Asked by scaled_dot_product_attention without going through the dispatcher.
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fused_attention_choice)
} // namespace at::native

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("histc", histc);
  m.impl("_fused_sdp_choice", fused_attention_choice);
  m.impl("_scaled_dot_product_fused_attention_overrideable", fused_attention);
  m.impl(
      "_scaled_dot_product_fused_attention_overrideable_backward",
      fused_attention_backward);
}

// Lazily conjugated or negated tensors are copied as they are, for the CPU's copy
// reads the flag. Without this, torch would resolve the flag first, by a copy,
// and so on without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// Autocast: torch registers nothing for a device it does not know, not even that
// operators without a policy pass through. The lists are the ones for devices.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at; // the macros name what is in it
  using namespace at::autocast;
#define SIMDEV_LOWER_PRECISION(...) \
  KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMDEV_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMDEV_FP32_SET_OPT_DTYPE(...) \
  KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMDEV_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIMDEV_LOWER_PRECISION)
  AT_FORALL_FP32(SIMDEV_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMDEV_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(
      KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIMDEV_PROMOTE)
}

namespace {

// Where the CPU has a kernel of its own, use it, though torch has a composite
// formula for devices without one (layer norm's mathematics, or a temporary and a
// copy for every in-place addition): the composites give other last bits and hold
// memory that no device would hold. Operators without a composite reach the same
// function through the fallback above.
void prefer_cpu_kernels() {
  static auto* library = new torch::Library(
      torch::Library::IMPL,
      "aten",
      c10::DispatchKey::PrivateUse1,
      __FILE__,
      __LINE__);
  const std::string prefix = "aten::";
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind(prefix, 0) != 0 || !op.has_value() ||
        !op->hasSchema() ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    auto unqualified = name.name.substr(prefix.size());
    if (!name.overload_name.empty()) {
      unqualified += "." + name.overload_name;
    }
    library->impl(
        unqualified.c_str(),
        torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  // The hooks are torch's for the life of the process.
  m.def("init", [] {
    at::RegisterPrivateUse1HooksInterface(new SimdevHooks());
    prefer_cpu_kernels();
  });
  m.attr("devices") = int(kDevices);
  m.def("stats", [](c10::DeviceIndex index) {
    check_index(index);
    std::lock_guard<std::mutex> lock(counters_mutex);
    const auto& counters = counters_of[index];
    py::dict stats;
    stats["allocated"] = counters.allocated;
    stats["peak"] = counters.peak;
    stats["allocations"] = counters.allocations;
    stats["frees"] = counters.frees;
    stats["limit"] = counters.limit;
    stats["out_of_memory"] = counters.out_of_memory;
    stats["host_to_device"] = host_to_device.load();
    stats["device_to_host"] = device_to_host.load();
    stats["fallbacks"] = fallbacks.load();
    stats["pinned"] = pinned_memory().allocated;
    return stats;
  });
  m.def("peer_traffic", [] {
    py::dict traffic;
    for (int from = 0; from < kDevices; ++from) {
      for (int to = 0; to < kDevices; ++to) {
        if (from != to) {
          traffic[py::make_tuple(from, to)] = peer[from][to].load();
        }
      }
    }
    return traffic;
  });
  m.def("reset_peak", [](c10::DeviceIndex index) {
    check_index(index);
    std::lock_guard<std::mutex> lock(counters_mutex);
    counters_of[index].peak = counters_of[index].allocated;
  });
  m.def("set_limit", [](int64_t limit, c10::DeviceIndex index) {
    check_index(index);
    std::lock_guard<std::mutex> lock(counters_mutex);
    counters_of[index].limit = limit;
  });
}
