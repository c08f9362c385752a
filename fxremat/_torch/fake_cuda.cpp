// What a build of torch without CUDA, or a machine without a GPU, has no answer for while tensors of device
// "cuda" are traced: a device guard, what the build says of itself, and which attention kernel is chosen.
// Nothing here computes. `enter` puts the answers in force, `leave` puts back what was there before.
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::EventFlag;
using c10::Stream;

const Device card(DeviceType::CUDA, 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return card; }
  Device getDevice() const override { return card; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  // One stream, on which everything has happened already.
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, card); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, card); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, card); }
  void record(void**, const Stream&, DeviceIndex, EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// A build with CUDA and cuDNN, and one card.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
};

bool has_flash = true;

// In torch's default order: flash (1), memory-efficient (2), math (0).
int64_t attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  const auto dtype = query.scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto width = query.sym_size(-1);
  if (has_flash && is_half && !mask.has_value() && width == value.sym_size(-1) && width <= 256) return 1;
  return is_half || dtype == at::kFloat ? 2 : 0;
}

auto& slot() { return c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)]; }

const c10::impl::DeviceGuardImplInterface* guard_before = nullptr;
void* answers_before = nullptr;

// Torch makes the object of its hooks once, and reads it through a reference from then on. It has no fields
// but its table of functions, which is exchanged.
void exchange_answers(void* const* from, void** before) {
  void* place = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  if (before != nullptr) std::memcpy(before, place, sizeof(void*));
  std::memcpy(place, from, sizeof(void*));
}

}  // namespace

// Args: whether the card runs the flash kernels, which need compute capability 8.0.
extern "C" void enter(bool flash) {
  static const auto* guard = new Guard();
  static const auto* hooks = new Hooks();
  has_flash = flash;
  guard_before = slot().exchange(guard);
  exchange_answers(reinterpret_cast<void* const*>(hooks), &answers_before);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention);
}

extern "C" void leave() {
  slot().store(guard_before);
  exchange_answers(&answers_before, nullptr);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(nullptr);
}
