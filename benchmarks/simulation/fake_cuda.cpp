// A CUDA device that is only a device guard and hooks: enough for fake tensors and autograd on "cuda" in a torch built
// without CUDA. No kernel runs. It is loaded before torch is imported, which looks for the hooks once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct CUDAHooks : public CUDAHooksInterface {  // the registry asks for exactly this name
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
