// Tasks on the threads of torch.
//
// `run` is GOMP_parallel of the OpenMP library that torch has loaded: the tasks run on torch's own
// threads, and no second pool competes for the cores.
#pragma once

#include <atomic>
#include <cstdint>

namespace conure {

struct Threads {
  void (*run)(void (*)(void*), void*, unsigned, unsigned);  // null: no threads
  int64_t count;
};

// Calls body(task, worker) for all tasks. Each thread takes tasks in ascending order.
template <class Body>
void parallel_for(const Threads& threads, int64_t num_tasks, Body body) {
  struct Job {
    Body& body;
    int64_t num_tasks;
    std::atomic<int64_t> next_task{0}, next_worker{0};
  } job{body, num_tasks};
  const auto work = [](void* data) {
    Job& job = *static_cast<Job*>(data);
    const int64_t worker = job.next_worker++;
    for (int64_t task; (task = job.next_task++) < job.num_tasks;) job.body(task, worker);
  };
  const int64_t count = threads.count < num_tasks ? threads.count : num_tasks;
  if (threads.run && count > 1)
    threads.run(work, &job, unsigned(count), 0);
  else if (num_tasks)
    work(&job);
}

}  // namespace conure
