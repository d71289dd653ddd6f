// A CUDA device that exists only as a device guard, hooks and the choice of an attention kernel: enough for
// FakeTensorMode and autograd on "cuda" tensors in a torch built without CUDA. No kernel runs.
//
// tests/fake_gpu.py builds it, and loads it before `import torch`: torch looks the hooks up once, while it is imported.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
// The registry asks for exactly this name.
struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 8; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 8; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

namespace native {
// The kernel that scaled_dot_product_attention takes on a GPU from Ampere on, as far as its arguments decide it:
// flash attention for 16-bit inputs without a mask, the memory-efficient kernel for a mask or float32, else plain
// mathematics. (On Hopper torch may prefer cuDNN's kernel, whose results have the same sizes as those of flash
// attention.) See use_flash_attention and use_mem_efficient_attention in ATen/native/transformers/cuda/sdp_utils.cpp.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double, bool, std::optional<double>, bool enable_gqa) {
  const bool is_half = query.scalar_type() == kHalf || query.scalar_type() == kBFloat16;
  const bool one_dtype = query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type();
  const bool is_dense = query.dim() == 4 && one_dtype;
  const bool one_head_size = query.sym_size(-1) == value.sym_size(-1);
  const bool same_heads = query.dim() == 4 && query.sym_size(1) == key.sym_size(1);
  if (is_dense && is_half && !mask.has_value() && one_head_size && query.sym_size(-1) <= 256 &&
      globalContext().userEnabledFlashSDP()) {
    return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  }
  if (is_dense && (is_half || query.scalar_type() == kFloat) && (same_heads || !enable_gqa) &&
      !(mask.has_value() && mask->requires_grad()) && globalContext().userEnabledMemEfficientSDP()) {
    return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  }
  return static_cast<int64_t>(sdp::SDPBackend::math);
}
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}  // namespace native
}  // namespace at

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
const Device kGpu(DeviceType::CUDA, 0);

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 8; }
  Device getDevice() const override { return kGpu; }
  Device exchangeDevice(Device) const override { return kGpu; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kGpu); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kGpu); }
  Stream getNewStream(Device device, int = 0) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace
