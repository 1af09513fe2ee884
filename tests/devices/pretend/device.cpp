// A second device for tests on machines without a GPU: its memory is the CPU's, but to PyTorch its tensors lie elsewhere.
// So they cannot be mixed with CPU tensors, the autograd engine gives the device threads of its own, and who forgets to move
// a tensor is told. Operations run on the CPU, by PyTorch's own fallback. There are two of them, pretend:0 and pretend:1.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(TYPE, current);
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(TYPE, current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { *event = this_event(); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  static void* this_event() { static int event; return &event; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = nbytes ? std::malloc(nbytes) : nullptr;
    return {memory, memory, &std::free, c10::Device(TYPE, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
Memory memory;
REGISTER_ALLOCATOR(TYPE, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(TYPE, current); }
};

c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::Device(TYPE, device && device->has_index() ? device->index() : current));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, keys(), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::Device(TYPE, device && device->has_index() ? device->index() : current));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, keys(),
                                           c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& tensor) {  // a look at its memory
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto needed = impl->numel() * self.itemsize() + self.storage_offset() * self.itemsize();
  auto storage = self.storage();
  if (storage.nbytes() < needed) {
    const c10::DeviceGuard guard(self.device());
    auto fresh = memory.allocate(needed);
    std::memcpy(fresh.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(fresh));
    storage.set_nbytes(needed);
  }
  return self;
}

at::Tensor& set(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Scalar local_scalar(const at::Tensor& self) { return on_cpu(self).item(); }

struct Mapping {  // of shared memory; the one who made it keeps the descriptor, for others to open
  void* start;
  size_t nbytes;
  int descriptor;
};
std::atomic<int64_t> mappings = 0;

void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  munmap(mapping->start, mapping->nbytes);
  if (mapping->descriptor >= 0) close(mapping->descriptor);
  delete mapping;
  --mappings;
}

at::Tensor mapped(int descriptor, bool keep, int64_t nbytes, int64_t index) {
  void* start = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (!keep) close(descriptor);
  TORCH_CHECK(start != MAP_FAILED, "mmap failed");
  ++mappings;
  c10::DataPtr data(start, new Mapping{start, static_cast<size_t>(nbytes), keep ? descriptor : -1}, &unmap,
                    c10::Device(TYPE, static_cast<c10::DeviceIndex>(index)));
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), nullptr, false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys(), caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  return tensor;
}

at::Tensor share(int64_t nbytes, int64_t index) {
  int descriptor = memfd_create("mpgrad-pretend", MFD_CLOEXEC);
  TORCH_CHECK(descriptor >= 0 && ftruncate(descriptor, nbytes) == 0, "no memory on pretend:", index);
  return mapped(descriptor, true, nbytes, index);
}

at::Tensor open_shared(c10::string_view path, int64_t nbytes, int64_t index) {
  int descriptor = open(std::string(path).c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(descriptor >= 0, "memory of another process cannot be opened (", path, ")");
  return mapped(descriptor, false, nbytes, index);
}

int64_t descriptor_of(const at::Tensor& tensor) {
  return static_cast<Mapping*>(tensor.storage().data_ptr().get_context())->descriptor;
}

int64_t mapping_count() { return mappings; }

void set_device(int64_t index) { current = static_cast<c10::DeviceIndex>(index); }
int64_t current_device() { return current; }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_local_scalar_dense", &local_scalar);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY(pretend, m) {
  m.def("share(int nbytes, int index) -> Tensor", &share);
  m.def("open(str path, int nbytes, int index) -> Tensor", &open_shared);
  m.def("descriptor_of(Tensor tensor) -> int", &descriptor_of);
  m.def("mapping_count() -> int", &mapping_count);
  m.def("set_device(int index) -> ()", &set_device);
  m.def("current_device() -> int", &current_device);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}
