// A CUDA device that is host memory: every operator of the CUDA key runs its CPU kernel.
//
// Three parts make torch believe in the device: a guard (which device is current), hooks (is there
// a device), and a fallback for all CUDA operators. The fallback hands the CPU kernel tensors over
// the same bytes, and wraps what the kernel returns as CUDA tensors again. It reports, by name and
// kind, what would be wrong or slow on a real device:
//   mixed   an operator was given tensors of both devices, which CUDA refuses
//   wait    the host waits for the device (a value is read, or a copy blocks)
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

using at::Tensor;
using c10::Device;
using c10::kCPU;
using c10::kCUDA;

static int device_count = 1;
static thread_local int current = 0;
static py::object* listener = nullptr;  // called with (operator, "mixed" or "wait")

static void report(const std::string& name, const char* kind) {
  if (!listener) return;
  py::gil_scoped_acquire lock;
  (*listener)(name, kind);
}

// ---- the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    uncheckedSetDevice(d);
    return before;
  }
  c10::Stream getStream(Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, Device(kCUDA, d.index() < 0 ? current : d.index()));
  }
  c10::Stream getNewStream(Device d, int) const override { return getStream(d); }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  // There is one queue, and it is always empty: nothing to record or to wait for.
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto before = current;
    current = d;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return exchangeDevice(d < 0 ? current : d);
  }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, current); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

// Bytes of the device's storages now, and the most so far.
static std::atomic<int64_t> live{0}, peak{0};

// Bytes of one storage: `data` frees them, or keeps what owns them alive.
struct Held {
  c10::DataPtr data;
  int64_t bytes;
  Held(c10::DataPtr d, int64_t n) : data(std::move(d)), bytes(n) {
    peak = std::max<int64_t>(peak, live += bytes);
  }
  ~Held() { live -= bytes; }
  static void drop(void* held) { delete static_cast<Held*>(held); }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = c10::alloc_cpu(bytes);
    auto* held = new Held({data, data, &c10::free_cpu, Device(kCPU)}, bytes);
    return {data, held, &Held::drop, Device(kCUDA, current)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};
static Memory memory;

// ---- one storage under two devices

// A storage on `device` over the bytes of `owner`, which it keeps alive.
static c10::Storage share(const c10::Storage& owner, Device device, c10::Allocator* allocator) {
  auto drop = [](void* p) { delete static_cast<c10::Storage*>(p); };
  c10::DataPtr data(owner.mutable_data(), new c10::Storage(owner), drop, device);
  if (device.is_cuda()) {  // what a kernel returned
    auto* address = data.get();
    data = {address, new Held(std::move(data), owner.nbytes()), &Held::drop, device};
  }
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), owner.nbytes(), std::move(data), allocator, true));
}

static Tensor over(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

static Tensor on_host(const Tensor& t) {
  return over(share(t.storage(), kCPU, c10::GetCPUAllocator()), t, c10::DispatchKey::CPU);
}

// The tensors of one call: host aliases of its CUDA arguments, and the way back.
struct Call {
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;          // host -> CUDA
  std::unordered_map<c10::TensorImpl*, std::pair<Tensor, Tensor>> pairs;  // host -> (host, CUDA)
  bool has_host = false, has_device = false;
  int device = current;

  Tensor enter(const Tensor& t) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      has_host |= t.dim() > 0;  // CUDA takes a host tensor without dimensions as a number
      return t;
    }
    has_device = true;
    device = t.device().index();
    auto host = on_host(t);
    storages[host.storage().unsafeGetStorageImpl()] = t.storage();
    pairs.insert({host.unsafeGetTensorImpl(), {host, t}});
    return host;
  }

  Tensor leave(const Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    if (auto found = pairs.find(t.unsafeGetTensorImpl()); found != pairs.end())
      return found->second.second;
    auto* key = t.storage().unsafeGetStorageImpl();
    if (!storages.count(key)) storages[key] = share(t.storage(), Device(kCUDA, device), &memory);
    return over(storages[key], t, c10::DispatchKey::CUDA);
  }

  // What the kernel resized in place.
  void keep_sizes() {
    for (auto& [impl, both] : pairs) {
      auto& [host, cuda] = both;
      auto bytes = host.storage().nbytes();
      if (bytes != cuda.storage().nbytes()) {
        auto data = memory.allocate(bytes);
        memcpy(data.get(), host.storage().data(), bytes);
        auto* storage = cuda.storage().unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(std::move(data));
        storage->set_nbytes(bytes);
      }
      if (host.sizes() != cuda.sizes() || host.strides() != cuda.strides())
        cuda.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }
};

// ---- operators

static bool starts_with(const std::string& text, const char* start) {
  return text.rfind(start, 0) == 0;
}

// Operators whose CUDA kernel makes the host wait, because the result's size or value is needed.
static bool reads_values(const std::string& name, const std::vector<c10::IValue>& args) {
  for (auto* start : {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select",
                      "aten::equal", "aten::unique", "aten::_unique", "aten::bincount"})
    if (starts_with(name, start)) return true;
  if (name == "aten::repeat_interleave.Tensor") return args.back().isNone();
  if (starts_with(name, "aten::index") || starts_with(name, "aten::_index_put_impl"))
    for (auto& arg : args)
      if (arg.isOptionalTensorList())
        for (const std::optional<Tensor>& index : arg.toOptionalTensorList().vec())
          if (index && index->defined() && (index->dtype() == at::kBool || index->is_cpu()))
            return true;
  return false;
}

static bool may_mix(const std::string& name) {
  for (auto* start : {"aten::index.", "aten::index_put", "aten::_index_put_impl", "aten::set_"})
    if (starts_with(name, start)) return true;
  return false;
}

static void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto name = schema.operator_name().name + "." + schema.operator_name().overload_name;
  auto args = torch::jit::pop(*stack, schema.arguments().size());
  if (reads_values(name, args)) report(name, "wait");
  Call call;
  for (auto& arg : args) {
    if (arg.isTensor()) {
      arg = call.enter(arg.toTensor());
    } else if (arg.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : arg.toTensorList().vec()) list.push_back(call.enter(t));
      arg = list;
    } else if (arg.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : arg.toOptionalTensorList().vec())
        list.push_back(t ? std::optional<Tensor>(call.enter(*t)) : t);
      arg = list;
    } else if (arg.isDevice()) {
      arg = Device(kCPU);
    }
  }
  if (call.has_host && call.has_device && !may_mix(name)) report(name, "mixed");
  for (auto& arg : args) stack->push_back(arg);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto results = torch::jit::pop(*stack, schema.returns().size());
  call.keep_sizes();
  for (auto& result : results) {
    if (result.isTensor()) {
      result = call.leave(result.toTensor());
    } else if (result.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : result.toTensorList().vec()) list.push_back(call.leave(t));
      result = list;
    }
    stack->push_back(result);
  }
}

using MaybeType = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<Device>;

static Tensor allocate(int64_t elements, MaybeType type, MaybeDevice device) {
  auto dtype = type.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  c10::DeviceGuard guard(Device(kCUDA, device && device->index() >= 0 ? device->index() : current));
  auto bytes = elements * at::elementSize(dtype);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, memory.allocate(bytes), &memory, true));
  return at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      at::scalarTypeToTypeMeta(dtype));
}

static Tensor empty(at::IntArrayRef sizes, MaybeType type, MaybeLayout, MaybeDevice device,
                    std::optional<bool>, std::optional<at::MemoryFormat>) {
  auto made = allocate(c10::multiply_integers(sizes), type, device);
  made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return made;
}

static Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, MaybeType type,
                            MaybeLayout, MaybeDevice device, std::optional<bool>) {
  int64_t elements = 1;
  for (size_t i = 0; i < sizes.size(); i++)
    elements = sizes[i] == 0 || elements == 0 ? 0 : elements + (sizes[i] - 1) * strides[i];
  auto made = allocate(elements, type, device);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

// ---- pinned memory: addresses of the host that a copy may read while the host goes on

static std::set<void*> pinned_addresses;
static std::mutex pinning;  // a thread of the loader pins while the trainer copies

struct Pinned {
  c10::Storage owner;
  explicit Pinned(c10::Storage storage) : owner(std::move(storage)) {
    std::lock_guard<std::mutex> guard(pinning);
    pinned_addresses.insert(owner.mutable_data());
  }
  ~Pinned() {
    std::lock_guard<std::mutex> guard(pinning);
    pinned_addresses.erase(owner.mutable_data());
  }
  static void drop(void* pinned) { delete static_cast<Pinned*>(pinned); }
};

static bool is_pinned(const Tensor& t) {
  std::lock_guard<std::mutex> guard(pinning);
  return t.numel() == 0 || pinned_addresses.count(t.storage().mutable_data());
}

static Tensor pin(const Tensor& t) {
  if (is_pinned(t)) return t;
  auto copied = t.detach().clone();
  auto storage = copied.storage();
  c10::DataPtr data(storage.mutable_data(), new Pinned(storage), &Pinned::drop, Device(kCPU));
  return over(c10::Storage(c10::make_intrusive<c10::StorageImpl>(
                  c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data),
                  c10::GetCPUAllocator(), false)),
              copied, c10::DispatchKey::CPU);
}

// A copy from the device always makes the host wait here: nothing is copied to pinned memory.
static Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  if (from.is_cuda() && !to.is_cuda()) report("copy to host", "wait");
  if (!from.is_cuda() && to.is_cuda() && !(non_blocking && is_pinned(from)))
    report(non_blocking ? "copy of ordinary memory to device" : "copy to device", "wait");
  auto target = to.is_cuda() ? on_host(to) : to;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  target.copy_(from.is_cuda() ? on_host(from) : from);
  return to;
}

static Tensor& set_part(Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (strides.empty())
    impl->set_sizes_contiguous(sizes);
  else
    impl->set_sizes_and_strides(sizes, strides);
  return t;
}

static Tensor& set_storage(Tensor& t, at::Storage storage) {
  auto elements = static_cast<int64_t>(storage.nbytes() / t.element_size());
  return set_part(t, storage, 0, {elements}, {});
}

static Tensor& set_tensor(Tensor& t, const Tensor& source) {
  return set_part(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static void record_stream(Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kCUDA, &memory);
  m.def("on_host", &on_host, "A CPU tensor over the bytes of a CUDA tensor.");
  m.def("listen", [](py::object f) { listener = f.is_none() ? nullptr : new py::object(f); });
  m.def("set_count", [](int n) { device_count = n; });
  m.def("set_device", [](int n) { current = n; });
  m.def("is_pinned", &is_pinned);
  m.def("pin", &pin, "A copy in pinned memory.");
  m.def("live_bytes", [] { return live.load(); });
  m.def("peak_bytes", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = live.load(); });
  m.def("current_device", [] { return current; });
}
