// An Apple GPU ("mps") that exists only as device guard, hooks and memory of the host, for a torch built without MPS.
// Every operator computes on the CPU, so a run has real numbers. As on a real one, no tensor of float64 can be made,
// and an operator refuses tensors of several devices.
//
// tests/fake_mps.py builds it, and loads it before `import torch`.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <mutex>
#include <set>
#include <string>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
const Device kMps(DeviceType::MPS, 0);

std::mutex mutex;
std::set<std::string> computed;     // names of the operators that came here
std::set<std::string> mixed;        // those that were given tensors of the CPU too
int64_t num_waits = 0;              // copies to the host, for which it waits
size_t held_bytes = 0;

void forget(void* data) {
  const auto* start = static_cast<size_t*>(data) - 8;
  held_bytes -= start[0];
  c10::free_cpu(const_cast<size_t*>(start));
}

struct Memory final : public c10::Allocator {
  at::DataPtr allocate(size_t size) override {
    auto* start = static_cast<size_t*>(c10::alloc_cpu(size + 64));
    start[0] = size;
    held_bytes += size;
    return {start + 8, start + 8, &forget, kMps};
  }
  at::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
Memory memory;

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<DeviceType::MPS> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return kMps; }
  Device exchangeDevice(Device) const override { return kMps; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kMps); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kMps); }
  Stream getNewStream(Device, int = 0) const override { return Stream(Stream::DEFAULT, kMps); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(MPS, Guard);

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype_or_none,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  const auto dtype = dtype_or_none.value_or(at::get_default_dtype_as_scalartype());
  TORCH_CHECK_TYPE(dtype != at::kDouble && dtype != at::kComplexDouble,
                   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
                   "Please use float32 instead.");
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::MPS), dtype);
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = c10::contiguous_strides(sizes);
  std::vector<c10::SymInt> symbolic(strides.begin(), strides.end());
  auto tensor = empty_strided(size, symbolic, dtype, layout, device, pinned);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) {
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return tensor;
}

// The same bytes as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  const auto offset = tensor.storage_offset();
  const auto& storage = tensor.storage();
  auto bytes = storage.nbytes();
  at::DataPtr data(storage.mutable_data(), storage.mutable_data(), [](void*) {}, Device(DeviceType::CPU));
  auto alias = c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false);
  at::AutoDispatchBelowADInplaceOrView below;
  auto found = at::empty({0}, tensor.options().device(at::kCPU));
  found.set_(alias, offset, tensor.sizes(), tensor.strides());
  return found;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (to.is_cpu()) ++num_waits;
  // A change of dtype happens on the GPU, which has no float64 either way.
  TORCH_CHECK_TYPE(from.scalar_type() == to.scalar_type() ||
                       (from.scalar_type() != at::kDouble && to.scalar_type() != at::kDouble),
                   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
                   "Please use float32 instead.");
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  copy_from(to.sizes() == from.sizes() ? from : from.expand(to.sizes()), to, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// Operators that give another view of the same memory.
Tensor view_as(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset.value_or(self.storage_offset()));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return view;
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  const auto host = on_host(self).view(C10_AS_INTARRAYREF_SLOW(size));
  return view_as(self, host.sizes(), host.strides(), self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return view_as(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), self.storage_offset());
}

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = c10::contiguous_strides(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  const auto needed = at::detail::computeStorageNbytes(sizes, strides, self.dtype().itemsize(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    auto data = memory.allocate(needed);
    std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    impl->unsafe_storage().set_data_ptr_noswap(std::move(data));
    impl->unsafe_storage().set_nbytes(needed);
  }
  impl->set_sizes_and_strides(sizes, strides);
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  ++num_waits;
  return on_host(self).item();
}

// MPS computes attention by plain mathematics; where no gradient is wanted, in a kernel of its own.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal, std::nullopt,
                                                            scale, enable_gqa));
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = toString(op.operator_name());
  bool has_host = false, has_device = false;
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == DeviceType::MPS) has_device = true;
    // A tensor of one number may be on the CPU, as for any GPU.
    if (tensor.is_cpu() && tensor.dim() > 0) has_host = true;
  };
  for (const auto& value : arguments) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) for (const auto& each : value.toTensorVector()) look(each);
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    computed.insert(name);
  }
  // Indices may be on the CPU.
  TORCH_CHECK(!(has_host && has_device) || name.find("index") != std::string::npos,
              "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu! (", name,
              ")");
  const auto waits = num_waits;
  at::native::cpu_fallback(op, stack);
  num_waits = waits;
}

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { m.impl("scaled_dot_product_attention", &attention); }

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("scaled_dot_product_attention", &attention);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("copy_", &copy);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &view_as);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &local_scalar);
}
}  // namespace

namespace at {
// The registry asks for exactly this name.
struct MPSHooks : public MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isOnMacOSorNewer(unsigned major, unsigned) const override { return major <= 15; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  const Generator& getDefaultGenerator(DeviceIndex = -1) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Allocator* getMPSDeviceAllocator() const override { return &memory; }
  void deviceSynchronize() const override {}
  void commitStream() const override {}
  void emptyCache() const override {}
  size_t getCurrentAllocatedMemory() const override { return held_bytes; }
  size_t getDriverAllocatedMemory() const override { return held_bytes; }
  size_t getRecommendedMaxMemory() const override { return size_t(12) << 30; }
};
REGISTER_MPS_HOOKS(MPSHooks);
}  // namespace at

// What Python asks of the imitation.
extern "C" {
__attribute__((visibility("default"))) int64_t fake_mps_waits() { return num_waits; }
__attribute__((visibility("default"))) const char* fake_mps_operators() {
  static std::string text;
  std::lock_guard<std::mutex> lock(mutex);
  text.clear();
  for (const auto& name : computed) text += name + "\n";
  return text.c_str();
}
}
