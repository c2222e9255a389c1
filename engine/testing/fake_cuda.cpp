// A device guard that does nothing, for a torch that was built without CUDA.
//
// Several operators of torch set the current device before they are dispatched, also for tensors
// without memory. A torch without CUDA has no guard for CUDA devices, and raises.
#include <c10/core/impl/DeviceGuardImplInterface.h>

static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;

extern "C" void set_guard(bool is_installed) {
  const auto index = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[index].store(is_installed ? &guard : nullptr);
}
