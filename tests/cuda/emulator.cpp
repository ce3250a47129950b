// The fibers behind nestpipe/cuda/emulated.h: one loop draws a fiber, runs it until it waits or
// lets others run, and draws again.
#include <algorithm>
#include <deque>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "nestpipe/cuda/emulated.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Puts what a function must keep on the stack, stores the stack's end, goes over to another stack.
extern "C" void emulated_cuda_switch(void** stack_from, void* stack_to);
asm(R"(
.text
.type emulated_cuda_switch,@function
.globl emulated_cuda_switch
.hidden emulated_cuda_switch
emulated_cuda_switch:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbp
  popq %rbx
  ret
.size emulated_cuda_switch,.-emulated_cuda_switch
)");
#else
#include <ucontext.h>
#endif

namespace emulated_cuda {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kStackBytes = 128 << 10;
#else
constexpr std::size_t kStackBytes = 32 << 10;
#endif
constexpr std::uint64_t kMostSteps = 1ull << 28;
constexpr unsigned kSlowness = 12;

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  // Uniform in [0, limit), near enough.
  std::uint64_t below(std::uint64_t limit) {
    std::uint64_t word = state_ += 0x9E3779B97F4A7C15ull;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return (word ^ (word >> 31)) % limit;
  }

 private:
  std::uint64_t state_;
};

// A stack and where its execution stands.
struct Context {
#if defined(__x86_64__)
  void* stack_end = nullptr;
#else
  ucontext_t registers;
#endif
  void* fake_stack = nullptr;  // AddressSanitizer's
};

struct Gathering {
  unsigned mask = 0, arrived = 0;
  Meeting kind = Meeting::kSync;
  Values values{};
};

struct Warp {
  unsigned returned = 0;  // lanes; also those that the block does not have
  std::vector<std::shared_ptr<Gathering>> open;
};

struct Block;

enum class State { kReady, kWaits, kReturned };

struct Fiber {
  Place place;
  Block* block = nullptr;
  unsigned number = 0;  // in the block
  State state = State::kReady;
  bool slow = false;
  Context context;
  std::unique_ptr<unsigned char[]> stack;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[]> shared_memory;
  unsigned running = 0, at_barrier = 0;
};

void begin_fiber();

class Machine {
 public:
  Machine(const std::function<void()>& body, dim3 grid, dim3 block, std::size_t shared_bytes)
      : body_(body),
        grid_(grid),
        block_(block),
        shared_bytes_(shared_bytes),
        random_(schedule().seed * 0x2545F4914F6CDD1Dull + 1) {}

  void run() {
    const std::uint64_t num_blocks = std::uint64_t{grid_.x} * grid_.y * grid_.z;
    std::uint64_t started = 0;
    for (std::uint64_t step = 0;; ++step) {
      while (started < num_blocks && blocks_.size() < resident()) start_block(started++);
      if (blocks_.empty()) return;
      if (ready_.empty()) fail_waiting();
      if (step == kMostSteps) throw std::runtime_error("emulated CUDA: threads that never end");
      Fiber* fiber = draw();
      current = fiber;
      enter(fiber);
      current = nullptr;
      if (error_) std::rethrow_exception(error_);
      if (fiber->state == State::kReady) ready_.push_back(fiber);
      if (fiber->state == State::kReturned) retire(fiber);
    }
  }

  void yield() {
    if (random_.below(100) < static_cast<std::uint64_t>(schedule().yield_percent)) leave();
  }

  void wait_at_barrier() {
    Block& block = *current->block;
    current->state = State::kWaits;
    ++block.at_barrier;
    open_barrier(block);
    leave();
  }

  Values meet(unsigned mask, Meeting kind, std::uint64_t value) {
    Fiber* fiber = current;
    if ((mask >> fiber->place.lane & 1u) == 0) fail("a lane is not in the mask that it names");
    Warp& warp = fiber->block->warps[fiber->number / kWarpSize];
    std::shared_ptr<Gathering> mine;
    for (const auto& open : warp.open) {
      if (open->mask != mask) continue;
      if (open->kind != kind) fail("lanes of one warp meet for different operations");
      mine = open;
    }
    if (!mine) {
      mine = std::make_shared<Gathering>();
      mine->mask = mask;
      mine->kind = kind;
      warp.open.push_back(mine);
    }
    mine->values[fiber->place.lane] = value;
    mine->arrived |= 1u << fiber->place.lane;
    fiber->state = State::kWaits;
    end_meetings(*fiber->block, fiber->number / kWarpSize);
    leave();
    return mine->values;
  }

  // On a fiber's own stack.
  void run_current() {
    arrive(nullptr);
    try {
      body_();
    } catch (...) {
      error_ = std::current_exception();
    }
    current->state = State::kReturned;
    leave();
  }

  static thread_local Fiber* current;
  static thread_local Machine* machine;

 private:
  std::size_t resident() const {
    return static_cast<std::size_t>(std::max(schedule().resident_blocks, 1));
  }

  [[noreturn]] static void fail(const std::string& what) {
    const Place& at = current->place;
    throw std::runtime_error("emulated CUDA: " + what + " (block " + std::to_string(at.block.x) +
                             ", thread " + std::to_string(current->number) + ")");
  }

  [[noreturn]] void fail_waiting() const {
    std::size_t waiting = 0, at_barrier = 0;
    for (const auto& block : blocks_) {
      waiting += block->running;
      at_barrier += block->at_barrier;
    }
    throw std::runtime_error("emulated CUDA: no thread can go on: " + std::to_string(at_barrier) +
                             " wait at a barrier of their block and " +
                             std::to_string(waiting - at_barrier) +
                             " for lanes of their mask, which the others do not reach");
  }

  Fiber* draw() {
    for (;;) {
      const std::size_t at = random_.below(ready_.size());
      Fiber* fiber = ready_[at];
      if (fiber->slow && ready_.size() > 1 && random_.below(kSlowness) != 0) continue;
      ready_[at] = ready_.back();
      ready_.pop_back();
      return fiber;
    }
  }

  void start_block(std::uint64_t number) {
    auto block = std::make_unique<Block>();
    const unsigned num_threads = block_.x * block_.y * block_.z;
    block->running = num_threads;
    block->warps.resize((num_threads + kWarpSize - 1) / kWarpSize);
    if (num_threads % kWarpSize != 0) block->warps.back().returned = ~0u << num_threads % kWarpSize;
    block->shared_memory.reset(new unsigned char[shared_bytes_]);
    std::memset(block->shared_memory.get(), 0xA5, shared_bytes_);
    const bool slow_block = random_.below(4) == 0;
    bool slow_warp = false;
    for (unsigned thread = 0; thread < num_threads; ++thread) {
      if (thread % kWarpSize == 0) slow_warp = random_.below(4) == 0;
      auto fiber = std::make_unique<Fiber>();
      fiber->block = block.get();
      fiber->number = thread;
      fiber->slow = slow_block || slow_warp || random_.below(8) == 0;
      fiber->place.thread = {thread % block_.x, thread / block_.x % block_.y,
                             thread / block_.x / block_.y};
      fiber->place.block = {static_cast<unsigned>(number % grid_.x),
                            static_cast<unsigned>(number / grid_.x % grid_.y),
                            static_cast<unsigned>(number / grid_.x / grid_.y)};
      fiber->place.block_shape = block_;
      fiber->place.grid_shape = grid_;
      fiber->place.lane = thread % kWarpSize;
      fiber->place.shared_memory = block->shared_memory.get();
      prepare(*fiber);
      ready_.push_back(fiber.get());
      block->fibers.push_back(std::move(fiber));
    }
    blocks_.push_back(std::move(block));
  }

  void prepare(Fiber& fiber) {
    if (stacks_.empty()) stacks_.emplace_back(new unsigned char[kStackBytes]);
    fiber.stack = std::move(stacks_.back());
    stacks_.pop_back();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack.get(), kStackBytes);  // frames that never returned
#endif
#if defined(__x86_64__)
    auto top =
        reinterpret_cast<std::uintptr_t>(fiber.stack.get() + kStackBytes) & ~std::uintptr_t{15};
    auto* word = reinterpret_cast<void**>(top);
    *--word = nullptr;  // where begin_fiber would return to; its stack is aligned as after a call
    *--word = reinterpret_cast<void*>(&begin_fiber);
    for (int kept = 0; kept < 6; ++kept) *--word = nullptr;
    fiber.context.stack_end = word;
#else
    getcontext(&fiber.context.registers);
    fiber.context.registers.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.registers.uc_stack.ss_size = kStackBytes;
    fiber.context.registers.uc_link = nullptr;
    makecontext(&fiber.context.registers, &begin_fiber, 0);
#endif
  }

  static void go_over(Context& from, Context& to) {
#if defined(__x86_64__)
    emulated_cuda_switch(&from.stack_end, to.stack_end);
#else
    swapcontext(&from.registers, &to.registers);
#endif
  }

  // From the loop to a fiber, and on after the fiber has left.
  void enter([[maybe_unused]] Fiber* fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&loop_.fake_stack, fiber->stack.get(), kStackBytes);
#endif
    go_over(loop_, fiber->context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(loop_.fake_stack, nullptr, nullptr);
#endif
  }

  // From the running fiber to the loop, and on once the fiber is drawn again.
  void leave() {
    Fiber* fiber = current;
#if defined(__SANITIZE_ADDRESS__)
    const bool returned = fiber->state == State::kReturned;
    __sanitizer_start_switch_fiber(returned ? nullptr : &fiber->context.fake_stack, loop_stack_,
                                   loop_stack_bytes_);
#endif
    go_over(fiber->context, loop_);
    arrive(fiber->context.fake_stack);
  }

  // First thing on a fiber's stack after a switch.
  void arrive([[maybe_unused]] void* fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &loop_stack_, &loop_stack_bytes_);
#endif
  }

  void wake(Fiber* fiber) {
    fiber->state = State::kReady;
    if (fiber != current) ready_.push_back(fiber);  // the current one is queued when it has left
  }

  void open_barrier(Block& block) {
    if (block.at_barrier == 0 || block.at_barrier != block.running) return;
    block.at_barrier = 0;
    for (const auto& fiber : block.fibers) {
      if (fiber->state == State::kWaits) wake(fiber.get());
    }
  }

  void end_meetings(Block& block, unsigned warp_number) {
    Warp& warp = block.warps[warp_number];
    const auto complete = [&](const std::shared_ptr<Gathering>& open) {
      if ((open->mask & ~(open->arrived | warp.returned)) != 0) return false;
      for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        if ((open->arrived >> lane & 1u) != 0) {
          wake(block.fibers[warp_number * kWarpSize + lane].get());
        }
      }
      return true;
    };
    warp.open.erase(std::remove_if(warp.open.begin(), warp.open.end(), complete), warp.open.end());
  }

  void retire(Fiber* fiber) {
    Block& block = *fiber->block;
    const unsigned warp = fiber->number / kWarpSize;
    block.warps[warp].returned |= 1u << fiber->place.lane;
    stacks_.push_back(std::move(fiber->stack));
    --block.running;
    if (block.running == 0) {
      blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(),
                                 [&](const auto& other) { return other.get() == &block; }));
      return;
    }
    end_meetings(block, warp);
    open_barrier(block);
  }

  const std::function<void()>& body_;
  const dim3 grid_, block_;
  const std::size_t shared_bytes_;
  Random random_;
  std::deque<std::unique_ptr<Block>> blocks_;
  std::vector<Fiber*> ready_;
  std::vector<std::unique_ptr<unsigned char[]>> stacks_;  // to be used again
  Context loop_;
  const void* loop_stack_ = nullptr;
  std::size_t loop_stack_bytes_ = 0;
  std::exception_ptr error_;
};

thread_local Fiber* Machine::current = nullptr;
thread_local Machine* Machine::machine = nullptr;

void begin_fiber() { Machine::machine->run_current(); }

}  // namespace

Schedule& schedule() {
  static Schedule chosen;
  return chosen;
}

const Place& place() { return Machine::current->place; }
void perhaps_yield() { Machine::machine->yield(); }
void barrier() { Machine::machine->wait_at_barrier(); }
Values meet(unsigned mask, Meeting kind, std::uint64_t value) {
  return Machine::machine->meet(mask, kind, value);
}

void run(const std::function<void()>& body, dim3 grid, dim3 block, std::size_t shared_bytes) {
  Machine machine(body, grid, block, shared_bytes);
  Machine::machine = &machine;
  try {
    machine.run();
  } catch (...) {
    Machine::machine = nullptr;
    throw;
  }
  Machine::machine = nullptr;
}

}  // namespace emulated_cuda

// For ctypes: the schedule of launches to come.
extern "C" __attribute__((visibility("default"))) void set_schedule(std::uint64_t seed,
                                                                    int resident_blocks,
                                                                    int yield_percent) {
  emulated_cuda::schedule() = {seed, resident_blocks, yield_percent};
}
