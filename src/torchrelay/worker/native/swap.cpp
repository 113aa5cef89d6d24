// Reach below a live c10d::ProcessGroup: take its backends (and its store) away, so that new ones can be registered.
//
// A ProcessGroup refuses a second backend of a type that it already has, and nothing in Python frees the first one. Once
// its maps are empty, the ordinary `_register_backend` works again, and whoever holds the group (DDP, FSDP, DeviceMesh)
// goes on holding the same object. Nothing here runs during a collective, so a collective costs what it did before.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>
#include <vector>

namespace {

using c10d::ProcessGroup;
using c10d::Store;

// The maps are protected. A pointer to a protected member may be formed in a derived class, and applied to any group.
struct Opened : ProcessGroup {
  static constexpr auto by_device = &Opened::deviceTypeToBackend_;
  static constexpr auto by_type = &Opened::backendTypeToBackend_;
  static constexpr auto store = &Opened::store_;
};

// What was taken out of a group. Letting go of it waits for the backends' threads: that may be done by another thread
// than the one that took them, and never holds the interpreter's lock.
class Taken {
 public:
  explicit Taken(ProcessGroup& group)
      : backends_(std::exchange(group.*Opened::by_type, {})), store_(std::exchange(group.*Opened::store, nullptr)) {
    (group.*Opened::by_device).clear();
  }
  Taken(const Taken&) = delete;
  Taken(Taken&&) = default;

  ~Taken() { release(); }

  // Returns, for each backend, how many others still hold it: after 0 its threads have ended, its sockets are closed.
  std::vector<size_t> release() {
    std::vector<size_t> others;
    auto backends = std::exchange(backends_, {});
    auto store = std::exchange(store_, nullptr);
    for (const auto& entry : backends) others.push_back(entry.second.use_count() - 1);
    pybind11::gil_scoped_release nogil;
    backends.clear();
    store.reset();
    return others;
  }

 private:
  std::remove_cvref_t<decltype(std::declval<ProcessGroup&>().*Opened::by_type)> backends_;
  c10::intrusive_ptr<Store> store_;
};

// Gives the group the store at which its next backends meet.
void set_store(ProcessGroup& group, Store& store) {
  group.*Opened::store = c10::intrusive_ptr<Store>::unsafe_reclaim_from_nonowning(&store);
}

}  // namespace

PYBIND11_MODULE(TORCHRELAY_MODULE, module) {
  module.doc() = "Takes the backends out of a live ProcessGroup, so that others can be registered";
  pybind11::class_<Taken>(module, "Taken").def("release", &Taken::release);
  module.def("take", [](ProcessGroup& group) { return Taken(group); }, pybind11::arg("group"));
  module.def("set_store", &set_store, pybind11::arg("group"), pybind11::arg("store"));
}
