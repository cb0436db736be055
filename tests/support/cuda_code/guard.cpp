// A CUDA device that does nothing: what torch asks for when it makes a fake CUDA tensor, in a build without CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

namespace {

const Device only(DeviceType::CUDA, 0);

struct Guard : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return only; }
  Device exchangeDevice(Device) const override { return only; }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, only); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

struct CUDAHooks : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
REGISTER_CUDA_HOOKS(CUDAHooks)
